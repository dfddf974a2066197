"""Checks a configuration against itself, its files and this machine before anything is started, and resolves it.

A refusal is a ``ConfigError`` whose text names the place and the dotted path.
"""

import os
import shlex
import socket
import threading
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from ....protocol.errors import UsageError
from .. import hardware
from ..checkpoint import manifest as checkpoints
from ..config.load import Loaded
from ..config.schema import Config, Run
from ..data import messages
from ..data.messages import NONE, first_record, shipped
from ..model.shape import is_small
from ..support import learning_rate
from . import consistency, ds_keys
from .consistency import check_batch, check_dtypes, check_fault, check_lengths, check_settings, optimizer_refusal

_SMALL = 2_000_000_000  # Parameters whose gradients take a tenth of a GPU of 80 GB in fp32
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


def check_model(loaded: Loaded) -> None:
    """Refuse a model or tokenizer that is not given, given twice, or missing."""
    model = loaded.config.model
    if not model.name and not model.config:
        raise loaded.error("model", "needs a name (a hub name or a local folder) or a config (random weights)")
    if model.name and model.config:
        raise loaded.error("model", "has both a name and a config; leave one out")
    if model.overrides and not model.name:
        raise loaded.error("model.overrides", "needs a model.name; without one write the values into model.config")
    if model.config and not isinstance(model.config.get("model_type"), str):
        raise loaded.error("model.config", "needs a model_type, such as llama or qwen2")
    for path, name, marker in (
        ("model.name", model.name, "config.json"),
        ("tokenizer.name", loaded.config.tokenizer.name, "tokenizer_config.json"),
    ):
        if not is_path(name):
            continue
        folder = Path(name).expanduser()
        if not folder.is_dir():
            what = "is a file; give the folder that has it" if folder.exists() else "no such folder"
            raise loaded.error(path, f"{name}: {what}")
        if not (folder / marker).exists():
            raise loaded.error(path, f"{name}: is not a folder that save_pretrained wrote (no {marker})")


def check_data(loaded: Loaded) -> None:
    """Refuse data that is not given, given twice, or missing, and files that cannot be read."""
    data = loaded.config.data
    given = [key for key in ("path", "files", "name") if getattr(data, key)]
    if not given:
        raise loaded.error("data", "needs a path (a local file), files (several) or a name (of a data set on the hub)")
    if len(given) > 1:
        raise loaded.error(
            "data", f"has both a {given[0]} and {'' if given[1] == 'files' else 'a '}{given[1]}; leave one out"
        )
    # A folder may be a data set in the hub's form: files of several splits, named in a card.
    if is_path(data.name) and not (folder := Path(data.name).expanduser()).is_dir():
        what = "is a file; give it as data.path" if folder.exists() else "no such folder; give a file as data.path"
        raise loaded.error("data.name", f"{data.name}: {what}")
    template = Path(data.chat_template).expanduser()
    if data.chat_template and data.chat_template not in (NONE, *shipped()) and not template.is_file():
        raise loaded.error(
            "data.chat_template", f"{data.chat_template}: no such file; give {', '.join(shipped())}, none or a path"
        )
    if data.path:
        check_file(loaded, "data.path", data.path)
    for number, file in enumerate(data.files):
        check_file(loaded, f"data.files[{number}].path", file.path)


def check_file(loaded: Loaded, key: str, name: str) -> None:
    """Refuse a data file that cannot be read, or whose first record lacks what ``data.format`` needs."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise loaded.error(key, f"{name}: " + ("is a directory" if path.is_dir() else "no such file"))
    if path.suffix not in _DATA_SUFFIXES:
        raise loaded.error(key, f"{name}: must end in {', '.join(_DATA_SUFFIXES[:-1])} or .parquet")
    if path.stat().st_size == 0:
        raise loaded.error(key, f"{name}: is empty")
    if path.suffix == ".parquet":
        return
    try:
        record = first_record(path, loaded.config.data.text_column)
    except OSError as error:
        raise loaded.error(key, f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise loaded.error(key, f"{name}: {error}") from None
    try:
        messages.detect(record, loaded.config.data)
    except UsageError as error:
        path, _, text = str(error).partition(" ")
        raise loaded.error(path, text) from None


def is_path(name: str) -> bool:
    """Return whether a name is a local path, not a hub name such as ``Qwen/Qwen2.5-0.5B``."""
    if not name:
        return False
    return name.startswith(("/", "./", "../", "~")) or Path(name).exists() or name.count("/") > 1


_HUB = "https://huggingface.co"
_CONNECT_SECONDS = 8.0
_TRUE = ("1", "TRUE", "YES", "ON")


def check_hub(loaded: Loaded, *, data: bool = True) -> None:
    """Refuse names on the Hugging Face Hub that cannot be resolved, within seconds."""
    config = loaded.config
    for path, name, kind in (
        ("model.name", config.model.name, "models"),
        ("tokenizer.name", config.tokenizer.name, "models"),
        ("data.name", config.data.name if data else "", "datasets"),
    ):
        if name and not is_path(name) and (refusal := hub_refusal(name, kind)):
            raise loaded.error(path, refusal)


def hub_refusal(name: str, kind: str = "models") -> str:
    """Return why a name on the Hugging Face Hub cannot be resolved here; empty if it can.

    Without a connection the libraries repeat every request for half a minute or longer. If the cache has a copy,
    ``HF_HUB_OFFLINE`` is set, with which they use it at once, in this process and those that it starts.

    ``kind`` is ``models`` or ``datasets``.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        return ""
    endpoint = os.environ.get("HF_ENDPOINT") or _HUB
    problem = _connection_problem(endpoint)
    if not problem:
        return ""
    if _is_cached(name, kind):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return ""
    return (
        f"{name}: cannot reach {urlsplit(endpoint).hostname or endpoint} ({problem}), and the cache has no copy; give "
        "a local folder, or check the network and HTTPS_PROXY"
    )


@cache
def _connection_problem(endpoint: str) -> str:
    """Return why no connection to an endpoint, or to the proxy before it, is possible; empty if one is."""
    url = urlsplit(endpoint)
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    problems = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            problems[0] = ""
        except OSError as error:
            problems[0] = error.strerror or str(error)

    # A thread: the resolution of the name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    return problems[0]


def _is_cached(name: str, kind: str) -> bool:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("HF_HOME") or Path(base, "huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    folders = [hub / f"{kind}--{name.replace('/', '--')}" / "snapshots"]
    folders += [prepared / name.replace("/", "___")] if kind == "datasets" else []
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)


_GPU_THREADS = 4


class Resolved(msgspec.Struct, frozen=True):
    """A checked configuration without open choices, and its devices."""

    config: Config
    device: str  # ``cuda`` or ``cpu``
    gpus: list[str]  # GPUs of the ranks, as named in CUDA_VISIBLE_DEVICES; empty on the CPU

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.config.run.ranks


def resolve(loaded: Loaded, elsewhere: int = 0) -> Resolved:
    """Check a configuration against itself, its files and this machine, and resolve its open choices.

    ``elsewhere``: number of ranks of another machine to check it for, without this one's GPUs, compiler, ports and
    output folder; 0: check it for this machine.
    """
    config = loaded.config
    check_model(loaded)
    check_data(loaded)
    if elsewhere:
        device, gpus = "cpu" if config.run.device == "cpu" else "cuda", list[str]()
    else:
        device, gpus = _devices(loaded)
    ranks = config.run.ranks or elsewhere or len(gpus) or 1
    gpus = gpus[:ranks]
    check_batch(loaded, ranks)
    check_settings(loaded, device)
    ds_keys.check(config.deepspeed, loaded.error)
    precision = config.training.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    check_dtypes(loaded, precision)
    for refused in (optimizer_refusal(config, precision), consistency.refusal(config, ranks, precision)):
        if refused is not None:
            raise loaded.error(*refused)
    _check_evaluation(loaded)
    if not elsewhere:
        _check_compiler(loaded, device)
    check_fault(loaded, ranks)
    check_lengths(loaded, precision)
    threads = config.run.threads or _threads(config, device, ranks)
    run = msgspec.structs.replace(config.run, device=device, ranks=ranks, threads=threads)
    settled = msgspec.structs.replace(
        _settle_paths(config),
        run=run,
        zero=msgspec.structs.replace(config.zero, stage=_stage(loaded, run, precision)),
        training=msgspec.structs.replace(config.training, precision=precision),
        optimizer=msgspec.structs.replace(config.optimizer, lr=learning_rate(config)),
        evaluation=msgspec.structs.replace(config.evaluation, path=_absolute(config.evaluation.path)),
        output=msgspec.structs.replace(config.output, dir=_absolute(config.output.dir)),
    )
    saving = msgspec.structs.replace(config.checkpoint, resume=_resume(loaded, settled, elsewhere))
    settled = msgspec.structs.replace(settled, checkpoint=saving)
    if not elsewhere:
        _check_output(loaded, settled)
    return Resolved(settled, device, gpus)


def _stage(loaded: Loaded, run: Run, precision: str) -> int:
    """Return the ZeRO stage: the given one, or 1 where the trainer reduces the gradients of a small model once a step.

    Stage 2, the default elsewhere, reduces them in each micro-step, and has a part of them alone in its memory.
    """
    config, zero = loaded.config, loaded.config.zero
    usual = config.optimizer.kind == "auto" and config.optimizer.master_weights == "fp32"
    as_fp32 = precision == "bf16" and zero.grad_accum_dtype == zero.communication_dtype == "auto"
    if run.device != "cuda" or run.ranks < 2 or config.training.sequence_parallel_size > 1 or not (usual and as_fp32):
        return zero.stage
    given = "zero.stage" in loaded.places or zero.offload_optimizer or config.deepspeed
    return zero.stage if given or not is_small(config, _SMALL) else 1


def settle_data(loaded: Loaded) -> Config:
    """Check and resolve a configuration, independent of this machine's hardware.

    Without ``run.ranks``, the number of ranks follows from ``training.total_batch`` and sequence parallelism.
    """
    config = loaded.config
    training, ranks = config.training, 1
    if config.run.device != "cpu":
        given = training.grad_accumulation != "auto"
        ranks = training.total_batch // (training.micro_batch * training.micro_steps) if given else 1
        ranks = training.sequence_parallel_size * max(1, ranks)
    return resolve(loaded, elsewhere=ranks).config


def _settle_paths(config: Config) -> Config:
    template = config.data.chat_template
    data = msgspec.structs.replace(
        config.data,
        path=_absolute(config.data.path),
        name=_absolute_if_folder(config.data.name),
        files=[msgspec.structs.replace(file, path=_absolute(file.path)) for file in config.data.files],
        chat_template=template if template in ("", NONE, *shipped()) else _absolute(template),
    )
    return msgspec.structs.replace(
        config,
        data=data,
        model=msgspec.structs.replace(config.model, name=_absolute_if_folder(config.model.name)),
        tokenizer=msgspec.structs.replace(config.tokenizer, name=_absolute_if_folder(config.tokenizer.name)),
    )


def _threads(config: Config, device: str, ranks: int) -> int:
    """Return a rank's host threads: its share of the cores if the host computes, else few."""
    share = max(1, hardware.cores() // ranks)
    computes = device == "cpu" or config.zero.offload_optimizer
    return share if computes else min(share, _GPU_THREADS)


def _devices(loaded: Loaded) -> tuple[str, list[str]]:
    run = loaded.config.run
    gpus = [] if run.device == "cpu" else hardware.usable_gpus()
    if run.device == "cuda" and not gpus:
        why = "PyTorch here is built for the CPU only" if hardware.torch_is_cpu_only() else "no GPU is visible"
        raise loaded.error("run.device", f"is cuda, but {why}; see 'ftmon doctor', or use run.device=cpu")
    if gpus and run.ranks > len(gpus):
        raise loaded.error(
            "run.ranks", f"is {run.ranks}, but {len(gpus)} GPU{'s are' * (len(gpus) != 1) or ' is'} visible"
        )
    if not gpus and run.ranks > hardware.cores() * 4:
        raise loaded.error("run.ranks", f"is {run.ranks}, too many for {hardware.cores()} CPU cores")
    if run.master_port and not hardware.port_is_free(run.master_port):
        raise loaded.error("run.master_port", f"{run.master_port} is taken; leave it out for a free one")
    return ("cuda" if gpus else "cpu"), gpus


def _check_compiler(loaded: Loaded, device: str) -> None:
    if loaded.config.model.compile == "layers" and hardware.compiler(device) is None:
        name = "C++ compiler (g++, clang++ or $CXX)" if device == "cpu" else "C compiler (gcc, clang or $CC)"
        raise loaded.error("model.compile", f"needs a {name}, not found here; install one, or use model.compile=off")


def _check_evaluation(loaded: Loaded) -> None:
    settings, data = loaded.config.evaluation, loaded.config.data
    given = ("path", settings.path), ("split", settings.split), ("share", settings.held_out)
    sources = [name for name, value in given if value]
    if len(sources) > 1:
        raise loaded.error(f"evaluation.{sources[1]}", f"is given beside evaluation.{sources[0]}; leave one out")
    if not sources and settings.share == 0:
        needing = ("every", settings.interval), ("patience", settings.patience), ("samples", settings.samples)
        for name, asked in needing:
            if asked:
                raise loaded.error(f"evaluation.{name}", "needs data: evaluation.path, evaluation.split or .share")
        return
    if settings.path:
        check_file(loaded, "evaluation.path", settings.path)
    if settings.split and not data.name:
        raise loaded.error("evaluation.split", "needs data.name; with a local file use evaluation.path or .share")
    if settings.patience and not settings.every:
        raise loaded.error("evaluation.patience", "needs evaluation.every above 0")
    if not settings.every and not settings.at_end:
        raise loaded.error("evaluation.every", "is 0 and evaluation.at_end is false: nothing would be evaluated")


def _resume(loaded: Loaded, settled: Config, elsewhere: int) -> str:
    """Return where a run resumes from: ``auto``, ``never``, or an absolute path."""
    resume, output = loaded.config.checkpoint.resume, loaded.config.output
    if resume not in ("never", "auto"):
        return _absolute(resume)
    if resume == "auto" and "checkpoint.resume" not in loaded.places:
        return "never" if output.overwrite or not output.dir else "auto"
    if resume == "auto" and output.overwrite and output.dir and not elsewhere:
        return "never" if _changes(settled) else "auto"
    return resume


def _changes(settled: Config) -> list[str]:
    """Return how a configuration differs from that of the newest checkpoint in its output folder, if there is one."""
    found, _ = checkpoints.candidates("auto", Path(settled.output.dir))
    return checkpoints.changes(found[0].manifest, settled) if found else []


def _check_output(loaded: Loaded, settled: Config) -> None:
    """Refuse a place to resume from that is not there, and an output folder that cannot be used."""
    config, resume = loaded.config, settled.checkpoint.resume
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        raise loaded.error("checkpoint.resume", f"{config.checkpoint.resume}: no such folder (or give never, or auto)")
    if not config.output.dir:
        if resume == "auto":
            raise loaded.error("checkpoint.resume", "is auto, but output.dir is not given: there is nowhere to look")
        return
    folder = Path(settled.output.dir)
    if folder.exists() and not folder.is_dir():
        raise loaded.error("output.dir", f"{config.output.dir}: is not a directory")
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        raise loaded.error("output.dir", f"{config.output.dir}: cannot be written ({existing} is not writable)")
    if resume in ("never", "auto") and not config.output.overwrite:
        _check_results(loaded, settled, folder)


def _check_results(loaded: Loaded, settled: Config, folder: Path) -> None:
    """Refuse an output folder with results that this run neither continues nor may write over."""
    found, notes = checkpoints.candidates("auto", folder)
    has_model = (folder / "model").exists()
    asked = "checkpoint.resume" in loaded.places
    problem = ""
    if settled.checkpoint.resume == "never":
        problem = "holds results of an earlier run" if found or notes or has_model else ""
    elif changes := _changes(settled):
        problem = f"{found[0].path.name} in it is of another configuration: {', '.join(changes)}"
    elif has_model and not asked:
        problem = "holds the final model of an earlier run"
    elif not found and not asked:
        problem = next((f"holds no complete checkpoint: {note}" for note in notes if "incomplete" in note), "")
    if problem:
        name = settled.output.dir
        ways = [f"go on from it with checkpoint.resume={shlex.quote(name)}"] if found else []
        ways += ["begin anew with output.overwrite=true", "or give another folder"]
        raise loaded.error("output.dir", f"{loaded.config.output.dir}: {problem}; {', '.join(ways)}")


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_if_folder(name: str) -> str:
    return _absolute(name) if is_path(name) else name
