"""Holes of sparse files: they justify no budget, and are not copied."""

import os
from pathlib import Path

import pytest
from ftmon.protocol.recording import extents
from ftmon.protocol.recording.extents import copy_data, data_bytes
from ftmon.protocol.recording.guard import Guard, RefusedError


def test_holes_of_a_sparse_file_justify_nothing_and_are_not_copied(tmp_path: Path) -> None:
    sparse, copy, size = tmp_path / "sparse", tmp_path / "copy", 20 * 2**30
    with sparse.open("wb") as file:
        for place in (0, 3 * 2**30 + 5, size - 10):
            file.seek(place)
            file.write(b"some data.")
    if sparse.stat().st_blocks * 512 > 2**30:
        pytest.skip("this file system has no sparse files")
    copy_data(sparse, copy)
    assert copy.stat().st_size == size
    assert copy.stat().st_blocks * 512 < 2**20
    with copy.open("rb") as file:
        for place in (0, 3 * 2**30 + 5, size - 10):
            file.seek(place)
            assert file.read(10) == b"some data."
    assert data_bytes(str(sparse)) < 2**20
    assert Guard(sparse).file_bytes == data_bytes(str(sparse))


def test_a_file_system_that_tells_no_holes_has_one_part_and_many_parts_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "whole", tmp_path / "copy"
    path.write_bytes(os.urandom(3_000_000))
    monkeypatch.setattr(extents, "_MOST_EXTENTS", 0)
    assert data_bytes(str(path)) == 3_000_000

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.undo()
    monkeypatch.setattr(extents.os, "lseek", refuse)
    assert data_bytes(str(path)) == 3_000_000
    copy_data(path, copy)
    assert copy.read_bytes() == path.read_bytes()


def test_a_file_that_grows_while_it_is_read_justifies_larger_answers(tmp_path: Path) -> None:
    path, answer = tmp_path / "growing", 30 * 2**20
    path.write_bytes(b"some data.")
    guard = Guard(path)
    with pytest.raises(RefusedError):
        guard.charge(answer)
    guard.begin()
    with pytest.raises(RefusedError):
        guard.charge(answer)
    with path.open("ab") as file:
        file.write(os.urandom(2**20))
        file.flush()
        os.fsync(file.fileno())
    guard.begin()
    guard.charge(answer)
