"""The cost of reading is bounded by what a file occupies."""

import os

import pytest
from ftmon.protocol.errors import RecordingError
from ftmon.protocol.recording.opening import Guard, RefusedError
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.schema import APPLICATION_ID


def test_holes_of_a_sparse_file_justify_nothing_and_a_growing_one_justifies_larger_answers(tmp_path):
    sparse = tmp_path / "sparse"
    head = bytearray(b"SQLite format 3\0".ljust(100, b"\0"))
    head[16:18], head[60:64], head[68:72] = b"\x20\x00", (1).to_bytes(4, "big"), APPLICATION_ID.to_bytes(4, "big")
    sparse.write_bytes(head)
    os.truncate(sparse, 20 * 2**30)
    if sparse.stat().st_blocks * 512 > 2**30:
        pytest.skip("this file system has no sparse files")
    assert Guard(sparse).file_bytes < 2**20
    with pytest.raises(RecordingError, match="nothing of it can be read: it consists mostly of holes"):
        Reader(sparse)
    path, answer = tmp_path / "growing", 30 * 2**20
    path.write_bytes(b"some data.")
    guard = Guard(path)
    for _ in range(2):
        with pytest.raises(RefusedError):
            guard.charge(answer)
        guard.begin()
    with path.open("ab") as file:
        file.write(os.urandom(2**20))
        file.flush()
        os.fsync(file.fileno())
    guard.begin()
    guard.charge(answer)
