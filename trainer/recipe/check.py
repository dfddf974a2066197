"""Checks across the configuration, the files it names and this machine, made before anything is started."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import UsageError
from . import faults, hardware
from .config import Config
from .decode import Loaded

_DATA_SUFFIXES = (".jsonl", ".json", ".parquet")


class Resolved(msgspec.Struct, frozen=True):
    """A checked configuration with nothing left to choose, and the devices it runs on."""

    config: Config
    device: str
    """``cuda`` or ``cpu``."""
    gpus: list[str]
    """The GPUs of the ranks, as CUDA_VISIBLE_DEVICES names them; empty on the CPU."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.config.run.ranks


def resolve(loaded: Loaded) -> Resolved:
    """Check a configuration against itself, its files and this machine, and settle what was left to choose.

    Raises:
        ConfigError: something does not hold; the text names the place and the dotted path.
    """
    config = loaded.config
    _check_model(loaded)
    _check_data(loaded)
    device, gpus = _devices(loaded)
    ranks = config.run.ranks or len(gpus) or 1
    if device == "cuda":
        gpus = gpus[:ranks]
    _check_batch(loaded, ranks)
    _check_settings(loaded, device)
    _check_output(loaded)
    _check_fault(loaded, ranks)
    run = msgspec.structs.replace(
        config.run, device=device, ranks=ranks, threads=config.run.threads or max(1, hardware.cores() // ranks)
    )
    precision = config.training.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    settled = msgspec.structs.replace(
        config,
        run=run,
        training=msgspec.structs.replace(config.training, precision=precision),
        data=msgspec.structs.replace(config.data, path=_absolute(config.data.path)),
        model=msgspec.structs.replace(config.model, name=_absolute_if_folder(config.model.name)),
        tokenizer=msgspec.structs.replace(config.tokenizer, name=_absolute_if_folder(config.tokenizer.name)),
        output=msgspec.structs.replace(config.output, dir=_absolute(config.output.dir)),
        checkpoint=msgspec.structs.replace(config.checkpoint, resume=_resume_path(config.checkpoint.resume)),
    )
    return Resolved(settled, device, gpus)


def _check_model(loaded: Loaded) -> None:
    model = loaded.config.model
    if not model.name and not model.config:
        raise loaded.error("model", "needs a name (a hub name or a local folder) or a config (random weights)")
    if model.name and model.config:
        raise loaded.error("model", "has both a name and a config; leave one out")
    if model.config and not isinstance(model.config.get("model_type"), str):
        raise loaded.error("model.config", "needs a model_type, such as llama or qwen2")
    for path, name, marker in (
        ("model.name", model.name, "config.json"),
        ("tokenizer.name", loaded.config.tokenizer.name, "tokenizer_config.json"),
    ):
        if not _is_path(name):
            continue
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise loaded.error(path, f"{name}: no such folder")
        if not (folder / marker).exists():
            raise loaded.error(path, f"{name}: is not a folder that save_pretrained wrote (no {marker})")


def _check_data(loaded: Loaded) -> None:
    data = loaded.config.data
    if not data.path and not data.name:
        raise loaded.error("data", "needs a path (a local file) or a name (of a data set on the hub)")
    if data.path and data.name:
        raise loaded.error("data", "has both a path and a name; leave one out")
    if data.name and _is_path(data.name):
        raise loaded.error("data.name", f"{data.name} looks like a file; give it as data.path")
    if not data.path:
        return
    path = Path(data.path).expanduser()
    if not path.is_file():
        raise loaded.error("data.path", f"{data.path}: " + ("is a directory" if path.is_dir() else "no such file"))
    if path.suffix not in _DATA_SUFFIXES:
        raise loaded.error("data.path", f"{data.path}: must end in {', '.join(_DATA_SUFFIXES[:-1])} or .parquet")
    if path.stat().st_size == 0:
        raise loaded.error("data.path", f"{data.path}: is empty")
    if path.suffix != ".parquet":
        check_columns(loaded, _first_record(loaded, path))


def _first_record(loaded: Loaded, path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            record: Any = json.loads(file.readline())
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise loaded.error("data.path", f"{path}: line 1 is not a JSON record; one record a line is read") from None
    except OSError as error:
        raise loaded.error("data.path", f"{path}: cannot be read: {error.strerror}") from None
    if not isinstance(record, dict):
        raise loaded.error("data.path", f"{path}: line 1 is not a JSON object")
    return list(record)


def check_columns(loaded: Loaded, columns: list[str]) -> None:
    """Refuse data whose columns do not hold what ``data.format`` needs.

    Raises:
        ConfigError: a column is not there.
    """
    try:
        data_format(loaded.config, columns)
    except UsageError as error:
        path, _, text = str(error).partition(" ")
        raise loaded.error(path, text) from None


def data_format(config: Config, columns: list[str]) -> str:
    """Return ``text``, ``instruction`` or ``chat`` for data with these columns.

    Raises:
        UsageError: a column is not there; the text starts with the dotted path of the key that names it.
    """
    data = config.data
    needed = {
        "chat": {"messages_column": data.messages_column},
        "instruction": {"prompt_column": data.prompt_column, "response_column": data.response_column},
        "text": {"text_column": data.text_column},
    }
    if data.format == "auto":
        for name, keys in needed.items():
            if all(column in columns for column in keys.values()):
                return name
        raise UsageError(
            f"data.format cannot be told from the columns ({', '.join(columns)}): name them in data.text_column, or "
            "data.prompt_column and data.response_column, or data.messages_column"
        )
    for key, column in needed[data.format].items():
        if column not in columns:
            raise UsageError(f"data.{key} is {column}, but the data's columns are {', '.join(columns)}")
    return data.format


def _devices(loaded: Loaded) -> tuple[str, list[str]]:
    run = loaded.config.run
    gpus = [] if run.device == "cpu" else hardware.usable_gpus()
    if run.device == "cuda" and not gpus:
        why = "PyTorch here is built for the CPU alone" if hardware.torch_is_cpu_only() else "no GPU is visible"
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


def _check_batch(loaded: Loaded, ranks: int) -> None:
    training = loaded.config.training
    total = training.micro_batch * training.grad_accumulation * ranks
    if training.total_batch not in (0, total):
        raise loaded.error(
            "training.total_batch",
            f"is {training.total_batch}, but micro_batch {training.micro_batch} x grad_accumulation "
            f"{training.grad_accumulation} x {ranks} rank{'s' * (ranks != 1)} is {total}",
        )


def _check_settings(loaded: Loaded, device: str) -> None:
    config = loaded.config
    if config.zero.offload_optimizer and config.zero.stage == 0:
        raise loaded.error("zero.offload_optimizer", "needs zero.stage 1, 2 or 3")
    if config.optimizer.kind == "torch_fused" and device == "cpu" and config.training.precision == "fp16":
        raise loaded.error("optimizer.kind", "torch_fused does not do fp16 on the CPU; use torch")
    if device == "cpu" and config.model.attention == "flash_attention_2":
        raise loaded.error("model.attention", "flash_attention_2 needs a GPU")
    if device == "cpu" and config.training.precision == "fp16":
        raise loaded.error("training.precision", "fp16 is not for the CPU; use fp32 or bf16")
    if config.training.max_steps and config.schedule.warmup_steps > config.training.max_steps:
        raise loaded.error(
            "schedule.warmup_steps",
            f"is {config.schedule.warmup_steps}, more than training.max_steps, which is {config.training.max_steps}",
        )


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


def _check_fault(loaded: Loaded, ranks: int) -> None:
    if not loaded.config.debug.fault:
        return
    try:
        fault = faults.parse(loaded.config.debug.fault, ranks)
    except UsageError as error:
        raise loaded.error("debug.fault", str(error)) from None
    steps = loaded.config.training.max_steps
    if steps and fault.step > steps:
        raise loaded.error("debug.fault", f"comes at step {fault.step}, but training ends at step {steps}")


def _is_path(name: str) -> bool:
    """Tell a local path from a hub name such as ``Qwen/Qwen2.5-0.5B``."""
    if not name:
        return False
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir() or name.count("/") > 1


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_if_folder(name: str) -> str:
    return _absolute(name) if _is_path(name) else name


def _resume_path(resume: str) -> str:
    return resume if resume in ("never", "auto") else _absolute(resume)
