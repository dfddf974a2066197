"""Checks a configuration against itself, its files and this machine before anything is started, and resolves it.

A refusal is a ``ConfigError`` whose text names the place and the dotted path.
"""

import os
from pathlib import Path

import msgspec

from .. import hardware
from ..config.load import Loaded
from ..config.schema import Config
from ..data.shipped import NONE, shipped
from . import ds_keys, sequence_parallel
from .consistency import check_batch, check_dtypes, check_fault, check_lengths, check_settings, optimizer_refusal
from .inputs import check_data, check_file, check_model, is_path

_GPU_THREADS = 4


class Resolved(msgspec.Struct, frozen=True):
    """A checked configuration without open choices, and its devices."""

    config: Config
    device: str
    """``cuda`` or ``cpu``."""
    gpus: list[str]
    """GPUs of the ranks, as named in CUDA_VISIBLE_DEVICES; empty on the CPU."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.config.run.ranks


def resolve(loaded: Loaded, elsewhere: int = 0) -> Resolved:
    """Check a configuration against itself, its files and this machine, and resolve its open choices.

    Args:
        loaded: the configuration.
        elsewhere: number of ranks of another machine to check it for, without this one's GPUs, compiler, ports and
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
    precision = _precision(config, device)
    check_dtypes(loaded, precision)
    for refused in (optimizer_refusal(config, precision), sequence_parallel.refusal(config, ranks, precision)):
        if refused is not None:
            raise loaded.error(*refused)
    _check_evaluation(loaded)
    if not elsewhere:
        _check_compiler(loaded, device)
        _check_output(loaded)
    check_fault(loaded, ranks)
    check_lengths(loaded, precision)
    resume = config.checkpoint.resume
    resume = resume if resume in ("never", "auto") else _absolute(resume)
    threads = config.run.threads or _threads(config, device, ranks)
    run = msgspec.structs.replace(config.run, device=device, ranks=ranks, threads=threads)
    settled = msgspec.structs.replace(
        _settle_paths(config),
        run=run,
        training=msgspec.structs.replace(config.training, precision=precision),
        evaluation=msgspec.structs.replace(config.evaluation, path=_absolute(config.evaluation.path)),
        output=msgspec.structs.replace(config.output, dir=_absolute(config.output.dir)),
        checkpoint=msgspec.structs.replace(
            config.checkpoint, resume=resume if resume in ("never", "auto") else _absolute(resume)
        ),
    )
    return Resolved(settled, device, gpus)


def settle_data(loaded: Loaded) -> Config:
    """Check and resolve a configuration, independent of this machine's hardware.

    Without ``run.ranks``, the number of ranks follows from ``training.total_batch`` and sequence parallelism.
    """
    config = loaded.config
    training, ranks = config.training, 1
    if config.run.device != "cpu":
        rows = training.micro_batch * training.grad_accumulation
        ranks = training.sequence_parallel_size * max(1, training.total_batch // rows)
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
    if loaded.config.model.compile != "off" and hardware.compiler(device) is None:
        name = "C++ compiler (g++, clang++ or $CXX)" if device == "cpu" else "C compiler (gcc, clang or $CC)"
        raise loaded.error("model.compile", f"needs a {name}, not found here; install one, or use model.compile=off")


def _precision(config: Config, device: str) -> str:
    """Return the training precision with ``auto`` resolved."""
    if config.training.precision == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return config.training.precision


def _check_evaluation(loaded: Loaded) -> None:
    settings, data = loaded.config.evaluation, loaded.config.data
    sources = [name for name in ("path", "split", "share") if getattr(settings, name)]
    if len(sources) > 1:
        raise loaded.error(f"evaluation.{sources[1]}", f"is given beside evaluation.{sources[0]}; leave one out")
    if not sources:
        for name in ("every", "patience", "samples"):
            if getattr(settings, name):
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


def _check_output(loaded: Loaded) -> None:
    config = loaded.config
    resume = config.checkpoint.resume
    if resume not in ("never", "auto") and not Path(resume).expanduser().is_dir():
        raise loaded.error("checkpoint.resume", f"{resume}: no such folder (or give never, or auto)")
    if not config.output.dir:
        if resume == "auto":
            raise loaded.error("checkpoint.resume", "is auto, but output.dir is not given: there is nowhere to look")
        return
    folder = Path(config.output.dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise loaded.error("output.dir", f"{config.output.dir}: is not a directory")
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        raise loaded.error("output.dir", f"{config.output.dir}: cannot be written ({existing} is not yours)")
    used = any((folder / name).exists() for name in ("checkpoints", "model"))
    if used and resume == "never" and not config.output.overwrite:
        raise loaded.error(
            "output.dir",
            f"{config.output.dir}: holds results of an earlier run; go on from them with checkpoint.resume=auto, "
            "begin anew with output.overwrite=true, or give another folder",
        )


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_if_folder(name: str) -> str:
    return _absolute(name) if is_path(name) else name
