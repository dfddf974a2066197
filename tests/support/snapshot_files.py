"""Snapshot files read in the test's own process: only those of the tests themselves, whose cost is known."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from ftmon.protocol.snapshot.columns import Snapshot, SnapshotError, compact
from ftmon.protocol.snapshot.reader import read_pickle

DATA = Path(__file__).parents[1] / "data"
ELEMENTS = {"dict": b"}", "list": b"]", "mark": b"(", "empty": b")", "tuple": b"N\x85"}
"""Opcodes of a pickle that make an object each."""


def read_snapshot(path: Path) -> Snapshot:
    """Read a snapshot as ``open_snapshot`` does, SnapshotError included, but in this process."""
    return compact(read_pickle(path), str(path))


def bomb(folder: Path, element: bytes) -> Path:
    """Write a file of less than a megabyte that asks for gigabytes of small objects."""
    path = folder / "bomb.pickle.gz"
    objects = gzip.compress(element * (2**21 // len(element)))
    path.write_bytes(gzip.compress(b"\x80\x04](") + 96 * objects + gzip.compress(b"e."))
    return path


def refusal(path: Path, read: Callable[[Path], object] = read_snapshot) -> str:
    with pytest.raises(SnapshotError) as caught:
        read(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert caught.value.exit_status == 2
    return text
