"""Reads, checks and completes DeepSpeed's configuration for a prediction."""

import copy
import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import hjson

from ...protocol.errors import ConfigError
from ..recipe.preflight import ds_keys

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "deepspeed": {"type": "AdamW", "params": {"lr": 1e-4}},
    "torch": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
"""Configurations of AdamW: DeepSpeed's (compiled), and PyTorch's."""
_ZERO = "zero_optimization"
_OBJECTS = (
    *(_ZERO, "bf16", "fp16", "amp", "torch_autocast", "optimizer", "scheduler", "activation_checkpointing"),
    *("data_types", "aio", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "checkpoint"),
)
_OFFLOADS = ("offload_optimizer", "offload_param")
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_MOST_STAGE = 3
_DEGREES = {
    "tensor_parallel.autotp_size": "tensor",
    "tensor_parallel.tp.tp_size": "tensor",
    "pipeline.stages": "pipeline",
    "sequence_parallel_size": "sequence",
}
"""Keys that split a model or a sequence over ranks, which predictions do not support."""
_KNOWN = {path.partition(".")[0] for path in (*ds_keys.TOP, *ds_keys.OWN, *ds_keys.REMOVED, *ds_keys.UNSUPPORTED)}
"""DeepSpeed's top-level keys."""
_QUOTED = re.compile(r'"([^"]+)"')


class Batch(NamedTuple):
    """Batch of a step."""

    micro: int  # Sequences per GPU and micro-step
    accumulation: int  # Micro-steps per step


KEEPS_GATHERED = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
"""Keys of ZeRO-3 that keep parameters whole between their uses, or prefetch them: memory for time."""
LIVE_PARAMETERS = 10**9
"""Elements of parameters that ZeRO-3 keeps gathered by default (``stage3_max_live_parameters``)."""


def read(path: str, notes: list[str] | None = None) -> dict[str, Any]:
    """Return DeepSpeed's configuration without ``auto`` entries, which transformers' Trainer would fill in.

    It is read as by DeepSpeed: Hjson, which allows comments, and refuses duplicate keys. ``notes`` receives a line for
    the ``auto`` entries, and for each key that DeepSpeed does not have. Raises ``ConfigError`` if there is no such
    file, or it is no configuration; the text names the file and the key.
    """
    try:
        found = hjson.loads(Path(path).read_text(), object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"--deepspeed {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    settings = without_auto(found)
    try:
        check(settings)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if notes is not None:
        names = [".".join(one) for one in _autos(found)]
        autos = [f"'auto' entries are left out: {', '.join(names)}"] if names else []
        notes += (f"{path}: {text}" for text in [*autos, *unknown(settings)])
    return settings


def unknown(settings: Mapping[str, Any]) -> list[str]:
    """Return a line for each top-level key that DeepSpeed does not have, and so ignores."""
    found: list[str] = []
    for key in settings.keys() - _KNOWN:
        near = difflib.get_close_matches(key, _KNOWN, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        found.append(f"unknown key {key} is ignored by DeepSpeed{hint}")
    return sorted(found)


def _autos(value: Any) -> Iterator[tuple[str, ...]]:
    if value == "auto":
        yield ()
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from ((name, *rest) for rest in _autos(part))


def without_auto(value: Any) -> Any:
    """Return a configuration without its ``auto`` entries."""
    if not isinstance(value, dict):
        return value
    return {name: without_auto(part) for name, part in value.items() if part != "auto"}


def with_changes(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with other values at some dotted keys."""
    result = copy.deepcopy(settings)
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = result
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return result


def check(settings: Any) -> None:
    """Check the types of the values that a prediction reads itself; DeepSpeed checks the others in its engine.

    Raises ``ValueError`` if a type is wrong; the text has the key, the valid type and the value.
    """
    if not isinstance(settings, dict):
        raise ValueError(f"must be a JSON object, not {_kind(settings)}")
    for name in _OBJECTS:
        if name in settings and not isinstance(settings[name], dict):
            raise ValueError(f"{name}: must be an object, not {_kind(settings[name])}")
    zero = settings.get(_ZERO, {})
    stage = zero.get("stage", 0)
    if not _whole(stage) or not 0 <= stage <= _MOST_STAGE:
        raise ValueError(f"{_ZERO}.stage: must be 0, 1, 2 or 3, not {stage!r}")
    for path, kind_of in _DEGREES.items():
        degree = _at(settings, path)
        if _whole(degree) and degree > 1:
            raise ValueError(f"{path}: is {degree}, but {kind_of} parallelism is not predicted; leave it out, for 1")
    for name in _OFFLOADS:
        offload = zero.get(name)
        if offload is None:
            continue
        if not isinstance(offload, dict):
            raise ValueError(f"{_ZERO}.{name}: must be an object, not {_kind(offload)}")
        if offload.get("device") == "nvme":
            raise ValueError(f"{_ZERO}.{name}.device: nvme is not predicted, a dry run has no disk; predict with cpu")
    for name in ("bf16", "fp16"):
        enabled = settings.get(name, {}).get("enabled", False)
        if not isinstance(enabled, bool):
            raise ValueError(f"{name}.enabled: must be true or false, not {enabled!r}")
    for name in _BATCHES:
        if name in settings and (not _whole(settings[name]) or settings[name] < 1):
            raise ValueError(f"{name}: must be a whole number of 1 or more, not {settings[name]!r}")
    kind = settings.get("optimizer", {}).get("type", "")
    if not isinstance(kind, str):
        raise ValueError(f"optimizer.type: must be a name, not {_kind(kind)}")


def place(path: str, refusal: str) -> str:
    """Return the place of DeepSpeed's refusal in a file: ``ds.json:6``; only the file if no line is found.

    A refusal begins with a dotted key, or contains a value.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return path
    key, colon, _ = refusal.partition(": ")
    keys = key.split(".") if colon and " " not in key else []
    at = 0
    for name in keys:
        at = next((number for number, line in enumerate(lines[at:], at) if f'"{name}"' in line), -1)
        if at < 0:
            return path
    if keys:
        return f"{path}:{at + 1}"
    words = refusal.split()
    found = (number for number, line in enumerate(lines, 1) if any(word in words for word in _QUOTED.findall(line)))
    number = next(found, 0)
    return f"{path}:{number}" if number else path


def stage(settings: dict[str, Any]) -> int:
    """Return ZeRO's stage."""
    return int(settings.get(_ZERO, {}).get("stage", 0))


def offloads(settings: dict[str, Any], what: str = "optimizer") -> bool:
    """Return whether ZeRO keeps the states (``optimizer``) or the parameters (``param``) on the host."""
    found = settings.get(_ZERO, {}).get(f"offload_{what}")
    return bool(found) and found.get("device", "none") != "none"


def batch(settings: dict[str, Any], ranks: int, micro: int | None, accumulation: int | None) -> Batch:
    """Return the batch of the configuration, by DeepSpeed's rules; given arguments override its entries.

    Raises ``ValueError`` if the batch does not divide among the ranks, or its three entries contradict each other.
    """
    given: tuple[int | None, ...] = tuple(settings.get(name) for name in _BATCHES)
    whole = given[0] if micro is None or accumulation is None else None
    micro = micro or given[1]
    accumulation = accumulation or given[2]
    if whole is None:
        return Batch(micro or 1, accumulation or 1)
    micro = micro or whole // (ranks * (accumulation or 1))
    accumulation = accumulation or whole // (ranks * max(1, micro))
    if micro * accumulation * ranks != whole:
        raise ValueError(
            f"{_BATCHES[0]}: is {whole}, but {ranks} ranks x micro-batch {micro} x accumulation {accumulation} is "
            f"{ranks * micro * accumulation}"
        )
    return Batch(micro, accumulation)


def _at(settings: Any, path: str) -> Any:
    for name in path.split("."):
        settings = settings.get(name) if isinstance(settings, dict) else None
    return settings


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
