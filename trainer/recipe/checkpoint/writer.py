"""Writes a checkpoint's files, at once or later from a copy in host memory; errors are recorded, not raised.

It replaces DeepSpeed's checkpoint engine, through which DeepSpeed writes its files. An exception there would leave the
other ranks in a collective.
"""

import copy
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves

from ....protocol.host.host_memory import available_memory
from .manifest import File

_MARGIN = 1.25
"""Free host memory that a copy needs, as a multiple of its size."""


class Writer(TorchCheckpointEngine):
    """Collects or writes the files that DeepSpeed saves.

    Args:
        local_ranks: ranks on this host, which copy at the same time.
    """

    def __init__(self, local_ranks: int) -> None:
        super().__init__()
        self._local_ranks = local_ranks
        self._waiting: list[tuple[Path, Any]] = []
        self._folder = Path()
        self._background = False
        self._measuring = self._reading_back = False
        self.bytes = 0
        """Bytes of the tensors to be saved, counted after ``measure``."""
        self.compared = 0
        """Number of tensors that were read back and are equal."""
        self.files: dict[str, File] = {}
        """Written files, by path within the checkpoint."""
        self.error = ""
        """The first error, after which nothing more is written; empty without one."""
        self.in_foreground = ""
        """Reason why a file was written at once instead of in the background; empty without one."""

    def begin(self, folder: Path, background: bool, read_back: bool = False) -> None:
        """Start a new checkpoint in ``folder``; with ``read_back`` each file is read again and compared."""
        self._folder, self._background, self._reading_back = folder, background, read_back
        self._waiting, self.files, self.error, self.in_foreground = [], {}, "", ""
        self._measuring, self.compared = False, 0

    def measure(self) -> None:
        """Until the next ``begin``, count the bytes to be saved instead of writing them."""
        self.begin(Path(), background=False)
        self._measuring, self.bytes = True, 0

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Make a folder."""
        self.attempt(lambda: os.makedirs(path, exist_ok=exist_ok))

    def save(self, state_dict: Any, path: Any) -> None:
        """Write a file, or copy its content to host memory for ``write_waiting``."""
        if self.error:
            return
        if self._measuring:
            self.bytes += tensor_bytes(state_dict)
            return
        if self._background:
            needed = int(tensor_bytes(state_dict) * self._local_ranks * _MARGIN)
            free = available_memory()
            if needed <= free:
                self.attempt(lambda: self._waiting.append((Path(path), host_copy(state_dict, {}))))
                return
            self.in_foreground = (
                f"a copy needs {needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} are free"
            )
        self.attempt(lambda: self._write(state_dict, Path(path)))

    def write_bytes(self, content: bytes, path: Path) -> None:
        """Write a small file."""

        def write() -> None:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
            self.files[path.relative_to(self._folder).as_posix()] = File(len(content), zlib.crc32(content))

        self.attempt(write)

    def write_waiting(self) -> None:
        """Write the copied files; any thread."""
        waiting, self._waiting = self._waiting, []
        while waiting and not self.error:
            path, content = waiting.pop(0)
            self.attempt(lambda path=path, content=content: self._write(content, path))

    def _write(self, content: Any, path: Path) -> None:
        with path.open("wb") as file:
            summed: Any = _Summed(file)
            torch.save(content, summed)
            file.flush()
            os.fsync(file.fileno())
            if self._reading_back:
                # From the disk, not from the page cache, if the file system allows it.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.files[path.relative_to(self._folder).as_posix()] = File(summed.bytes, summed.crc32)
        if self._reading_back:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
            problem, compared = difference(found, content, path.name)
            if problem:
                raise ValueError(f"{problem} was not read back as it was written")
            self.compared += compared

    def attempt(self, action: Callable[[], object]) -> None:
        """Run an action unless one has failed for this checkpoint; record its error."""
        if self.error or self._measuring:
            return
        try:
            action()
        except Exception as error:  # OSError, or RuntimeError of PyTorch's writer around one
            cause: BaseException = error
            while not isinstance(cause, OSError) and (inner := cause.__cause__ or cause.__context__) is not None:
                cause = inner
            text = (cause.strerror if isinstance(cause, OSError) else None) or str(cause).strip() or repr(cause)
            self.error = text.splitlines()[0]


class _Summed:
    """A file that counts and checksums the bytes written to it, in order."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def flush(self) -> None:
        self._file.flush()


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(one.numel() * one.element_size() for one in tree_leaves(value) if isinstance(one, torch.Tensor))


def difference(found: Any, wanted: Any, name: str) -> tuple[str, int]:
    """Compare nested containers, tensors bit by bit.

    Returns:
        The place of the first difference, or an empty text; and the number of equal tensors.
    """
    leaves, shape = tree_flatten_with_path(wanted)
    others, other_shape = tree_flatten(found)
    if shape != other_shape:
        return name, 0
    compared = 0
    for (path, one), other in zip(leaves, others, strict=True):
        if isinstance(one, torch.Tensor):
            alike = isinstance(other, torch.Tensor) and (other.dtype, other.shape) == (one.dtype, one.shape)
            same = alike and torch.equal(_bits(other), _bits(one))
            compared += same
        else:
            same = not isinstance(one, int | float | str | bytes | None) or repr(other) == repr(one)
        if not same:
            return f"{name}{keystr(path)}", compared
    return "", compared


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def host_copy(value: Any, seen: dict[Any, torch.Tensor]) -> Any:
    """Return a copy in host memory that later training steps do not change; a shared tensor stays shared."""
    if isinstance(value, torch.Tensor):
        key = (value.data_ptr(), value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)
        if key not in seen or not value.numel():
            seen[key] = value.detach().to("cpu", copy=True)
        return seen[key]
    if isinstance(value, dict):
        made = copy.copy(value)
        for name, inner in value.items():
            made[name] = host_copy(inner, seen)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(host_copy(inner, seen) for inner in value))
    if isinstance(value, list | tuple):
        return type(value)(host_copy(inner, seen) for inner in value)
    try:
        return copy.deepcopy(value)
    except Exception:  # locks, handles: they cannot be saved either, and fail there
        return value
