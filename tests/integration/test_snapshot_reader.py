"""Snapshot files read by a process of their own: what comes back from it, and what would break any reader."""

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from caching_allocator import MIB, CachingAllocator
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.snapshot.columns import SnapshotError
from ftmon.protocol.snapshot.reader import open_snapshot
from snapshot_files import DATA, ELEMENTS, bomb, read_snapshot


def refusal(path: Path) -> str:
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(str(path))
    assert caught.value.exit_status == 2
    return text


@pytest.mark.parametrize("name", ["oom_backward", "step_zero3", "expandable_zero2"])
def test_a_real_file_comes_back_as_it_is_read(name: str) -> None:
    path = DATA / f"{name}.pickle.gz"
    assert open_snapshot(path) == read_snapshot(path)


@pytest.mark.parametrize("protocol", range(6))
def test_any_pickle_protocol_is_read_packed_or_not(tmp_path: Path, protocol: int) -> None:
    allocator = CachingAllocator()
    allocator.alloc(3 * MIB, frames=[{"name": "f", "filename": "train.py", "line": 3}])
    data = pickle.dumps(allocator.snapshot(), protocol)
    for name, content in (("plain", data), ("packed", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        assert Replay(open_snapshot(tmp_path / name), 0).allocated[-1] == 20 * MIB - 17 * MIB


class _Runs:
    def __init__(self, wrote: Path) -> None:
        self.wrote = wrote

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.wrote}",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [_Runs(tmp_path / "was-run")]}))
    assert "would run code" in refusal(path)
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(pickle.dumps({"segments": []}))[:20], "cut short"),
        (b"hello, this is no pickle at all", "not a memory snapshot"),
        (pickle.dumps({"model": {}}), "without 'segments'"),
    ],
    ids=["cut short", "text", "another pickle"],
)
def test_what_is_no_snapshot_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert words in refusal(path)


WRONG_TYPES: dict[str, dict[str, Any]] = {
    "size": {"segments": [{"device": True, "total_size": True, "blocks": []}]},
    "time": {
        "segments": [],
        "external_annotations": [{"name": "a", "stage": "START", "time_us": True}, {"name": "a", "time_us": 1}],
    },
}


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_truth_values_in_place_of_numbers_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(WRONG_TYPES[name]))
    assert refusal(path)


HOSTILE = {
    # One opcode asks for a memo of two thousand million entries.
    "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    # A tuple nested three million times overflows the C stack when it is hashed.
    "nested": b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.",
    "string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_made_to_break_the_reader_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(HOSTILE[name])
    assert refusal(path)


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_a_packed_file_of_small_objects_is_refused(tmp_path: Path, element: bytes) -> None:
    assert "refused: " in refusal(bomb(tmp_path, element))
