"""The manifest of a checkpoint: its contents, and every file's size and checksum. It is written last.

A checkpoint is the folder ``step-N``. It is written as ``step-N.part`` and renamed when it is complete, so a folder
without a manifest, or with a file of another size, was damaged afterwards.
"""

import contextlib
import math
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ....protocol.errors import ConfigError
from .. import support
from ..config.schema import Config
from ..state import TrainState

NAME = "manifest.json"
_CHUNK_BYTES = 8 << 20
_SHOWN = 60  # Characters of a value in an error


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a checkpoint."""

    bytes: int
    crc32: int | None = None  # Checksum of its content (zlib); None: not known


class Base(msgspec.Struct, frozen=True):
    """The frozen model that adapters were trained on."""

    name: str  # ``model.name``, or empty for random weights
    fingerprint: str  # Hash of names, shapes and contents of the frozen parameters


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """``manifest.json``."""

    time: float  # Seconds since the epoch at which it was complete
    state: TrainState
    zero_stage: int
    precision: str
    parameters: dict[str, list[int]]  # Shape of each parameter of the model, by name
    trained: list[str]  # Names of the trained parameters. With a ``base`` no others are saved.
    files: Mapping[str, File]
    settings: dict[str, Any]  # What ``identity`` gave when it was written, without settings that it did not have then
    base: Base | None = None
    optimizer: str = "adamw"  # Kind of the optimizer's states (``support.states``)
    evaluation_loss: float | None = None


_IDENTITY = {
    "model": ("name", "config", "overrides", "quantization"),
    "lora": ("rank", "kind", "alpha", "dropout", "targets"),
    "optimizer": (
        *("lr", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "kind", "master_weights"),
        *("muon_lr", "muon_momentum"),
    ),
    "schedule": ("kind", "warmup_steps", "warmup_ratio", "final_ratio"),
    "training": ("max_steps", "epochs", "precision"),
}
"""What a training is of, and how it learns. Of data, seed and batch the position's own rules decide (``restore``). Left
out is what makes the same steps in other memory or time, and where results go."""
_SAME_ADAMW = ("auto", "deepspeed", "torch", "torch_foreach", "torch_fused")


def identity(config: Config) -> dict[str, Any]:
    """Return the settings of a resolved configuration that make a training another one, by dotted path."""
    found = {f"{name}.{key}": getattr(getattr(config, name), key) for name, keys in _IDENTITY.items() for key in keys}
    if found["optimizer.kind"] in _SAME_ADAMW:
        found["optimizer.kind"] = "auto"
    return msgspec.to_builtins(found)


def changes(saved: Manifest, config: Config) -> list[str]:
    """Return how a resolved configuration differs from that of a checkpoint; empty if both are the same training."""
    now = identity(config)
    return [
        f"{name} was {_shown(saved.settings[name])} and is {_shown(now[name])}"
        for name in now
        if name in saved.settings and saved.settings[name] != now[name]
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...") or "empty"


def read(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest, or None if it cannot be read."""
    try:
        return msgspec.json.decode((folder / NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def write(folder: Path, manifest: Manifest) -> None:
    """Write a manifest and force it to the disk, with the folder that names it."""
    content: dict[str, Any] = msgspec.to_builtins(manifest)
    # JSON has no infinity: such a value (no evaluation yet) is left out, and read back as the default that it is.
    finite = {
        key: value for key, value in content["state"].items() if not isinstance(value, float) or math.isfinite(value)
    }
    encoded = msgspec.json.encode({**content, "state": finite})
    write_durably(folder / NAME, msgspec.json.format(encoded, indent=1))
    for inner in {folder, *(folder / name for name in manifest.files)}:
        sync_folder(inner if inner.is_dir() else inner.parent)


def missing(folder: Path, manifest: Manifest) -> str:
    """Return what a checkpoint lacks; empty if all its files have their full size."""
    for name, file in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != file.bytes:
            return f"{name} has {size:,} bytes, not {file.bytes:,}"
    return ""


def damaged(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> str:
    """Return the first file whose content has another checksum, or an empty text; reads every ``parts``-th file."""
    for name, file in list(manifest.files.items())[part::parts]:
        if file.crc32 is not None and checksum(folder / name) != file.crc32:
            return f"{name} is damaged (its checksum differs)"
    return ""


def checksum(path: Path) -> int:
    """Return a file's CRC-32; -1 if it cannot be read."""
    value = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                value = zlib.crc32(chunk, value)
    except OSError:
        return -1
    return value


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file's content atomically: write a file beside it, force it to the disk, rename it."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to the disk, on file systems that can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_TAG = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)\.(part|old)")
LATEST = "latest"
"""The file that names the newest checkpoint, for DeepSpeed's own tools; written after everything else."""

TRIAL = "rehearsal"  # The folder of the rehearsal's files while they are compared; no tool takes it for a checkpoint


class Found(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def tag(step: int) -> str:
    """Return the folder's name of the checkpoint of a step."""
    return f"step-{step}"


def complete(folder: Path) -> tuple[list[Found], list[str]]:
    """Return the complete checkpoints of a folder, newest first, and notes on those that are not."""
    found: list[Found] = []
    notes: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name):
            if path.suffix == ".part":
                notes.append(f"{path.name} was not finished")
        elif _TAG.fullmatch(path.name):
            one, problem = examine(path)
            if one is not None:
                found.append(one)
            else:
                notes.append(f"{path.name} is incomplete: {problem}")
    return sorted(found, key=lambda one: (one.manifest.time, one.manifest.state.step), reverse=True), notes


def examine(path: Path) -> tuple[Found | None, str]:
    """Return a checkpoint if it is complete, else None and the problem."""
    content = read(path)
    if content is None:
        return None, f"{NAME} is damaged, or of another version" if (path / NAME).exists() else f"no {NAME}"
    problem = missing(path, content)
    return (None, problem) if problem else (Found(path, content), "")


def candidates(resume: str, output: Path) -> tuple[list[Found], list[str]]:
    """Return the checkpoints that a run may resume from, in the order to be tried, and notes on incomplete ones.

    ``resume`` is ``never``, ``auto``, or the path of a checkpoint (``step-N``), its parent, or an output folder; a path
    without a complete checkpoint is a ``ConfigError``.
    """
    if resume == "never":
        return [], []
    place = output if resume == "auto" else Path(resume)
    if _TAG.fullmatch(place.name) and resume != "auto":
        one, problem = examine(place)
        if one is None:
            others, _ = complete(place.parent)
            instead = f"; complete: {', '.join(other.path.name for other in others)}" if others else ""
            raise ConfigError(f"checkpoint.resume: {place} is not a complete checkpoint: {problem}{instead}")
        return [one], []
    notes: list[str] = []
    for folder in (place / "checkpoints", place):
        found, found_notes = complete(folder)
        notes += found_notes
        if found:
            return found, notes
    if resume == "auto":
        return [], notes
    why = f" ({'; '.join(notes)})" if notes else ""
    raise ConfigError(f"checkpoint.resume: {resume}: no complete checkpoint is there{why}")


def lowest(found: list[Found]) -> Found | None:
    """Return the checkpoint with the lowest evaluation loss; None without evaluations.

    ``found`` has the newest first. Losses of other evaluation examples than the newest one's do not compare.
    """
    rated = [one for one in found if one.manifest.evaluation_loss is not None]
    rated = [one for one in rated if one.manifest.state.evaluation_key == rated[0].manifest.state.evaluation_key]
    return min(rated, key=lambda one: one.manifest.evaluation_loss or 0.0, default=None)


def prune(folder: Path, keep: int, keep_best: bool) -> None:
    """Remove complete checkpoints except the newest ``keep``, and with ``keep_best`` the best one."""
    found, _ = complete(folder)
    best = lowest(found) if keep_best else None
    for old in found[keep:]:
        if best is None or old.path != best.path:
            support.replace_folder(old.path)


def remove_unfinished(folder: Path) -> None:
    """Remove files of killed writers; no process may be writing there."""
    for path in folder.iterdir() if folder.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name) or path.name == TRIAL:
            shutil.rmtree(path, ignore_errors=True)
