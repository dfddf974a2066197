"""The manifest of a checkpoint: its contents, and every file's size and checksum. It is written last.

A checkpoint is the folder ``step-N``. It is written as ``step-N.part`` and renamed when it is complete, so a folder
without a manifest, or with a file of another size, was damaged afterwards.
"""

import contextlib
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..state import TrainState

NAME = "manifest.json"
_CHUNK_BYTES = 8 << 20


class File(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a checkpoint."""

    bytes: int
    crc32: int | None = None
    """Checksum of its content (zlib); None: not known."""


class Base(msgspec.Struct, frozen=True):
    """The frozen model that adapters were trained on."""

    name: str
    """``model.name``, or empty for random weights."""
    fingerprint: str
    """Hash of names, shapes and contents of the frozen parameters."""


class Manifest(msgspec.Struct, frozen=True, omit_defaults=True):
    """``manifest.json``."""

    time: float
    """Seconds since the epoch at which it was complete."""
    state: TrainState
    zero_stage: int
    precision: str
    parameters: dict[str, list[int]]
    """Shape of each parameter of the model, by name."""
    trained: list[str]
    """Names of the trained parameters. With a ``base`` no others are saved."""
    files: Mapping[str, File]
    """Files by path within the folder."""
    base: Base | None = None
    optimizer: str = "adamw"
    """Kind of the optimizer's states (``optim.support.states``)."""
    evaluation_loss: float | None = None
    """Loss of the evaluation at this step, if there was one."""


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
