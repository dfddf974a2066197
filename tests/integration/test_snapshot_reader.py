"""Snapshot files read by a process of their own: what comes back from it, and what would break any reader."""

import gzip
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.snapshot.reader import open_snapshot
from snapshot_files import DATA, ELEMENTS, bomb, read_snapshot, refusal


def test_a_real_file_comes_back_and_one_that_runs_code_or_is_packed_of_small_objects_is_refused(tmp_path):
    path = DATA / "oom_backward.pickle.gz"
    assert open_snapshot(path) == read_snapshot(path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({"segments": [_Runs(tmp_path / "was-run")]}))
    assert "would run code" in refusal(path, open_snapshot)
    assert not (tmp_path / "was-run").exists()
    assert "refused: " in refusal(bomb(tmp_path, next(iter(ELEMENTS.values()))), open_snapshot)


class _Runs:
    def __init__(self, wrote: Path) -> None:
        self.wrote = wrote

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.wrote}",)


TIMED = [{"name": "a", "stage": "START", "time_us": True}, {"name": "a", "time_us": 1}]
REFUSED = {
    "cut short": (gzip.compress(pickle.dumps({"segments": []}))[:20], "cut short"),
    "a truth value for a time": (pickle.dumps({"segments": [], "external_annotations": TIMED}), ""),
    # One opcode asks for a memo of two thousand million entries.
    "memo": (b"\x80\x02]r\xff\xff\xff\x7f.", ""),
    # A tuple nested three million times overflows the C stack when it is hashed.
    "nested": (b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.", ""),
    "string": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", ""),
    "bytearray": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 50) + b".", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_damaged_or_made_to_break_the_reader_are_refused(tmp_path: Path, name: str) -> None:
    content, words = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    assert words in refusal(tmp_path / name, open_snapshot)
