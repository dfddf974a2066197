"""The thread that folds a recording's log into its file."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.recording import writer as checkpoint
from ftmon.protocol.recording.writer import Checkpointer


class Watched(sqlite3.Connection):
    """A real connection that says when it has been used, or could not be made."""

    used = threading.Event()

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*arguments)
        finally:
            self.used.set()


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> None:
    Watched.used.clear()
    connect = sqlite3.connect

    def watched(*arguments: Any, **options: Any) -> sqlite3.Connection:
        try:
            return connect(*arguments, factory=Watched, **options)
        except sqlite3.Error:
            Watched.used.set()
            raise

    monkeypatch.setattr(checkpoint.sqlite3, "connect", watched)


def fold(path: Path) -> None:
    checkpointer = Checkpointer(path)
    checkpointer.start()
    checkpointer.poke()
    assert Watched.used.wait(200)
    checkpointer.stop()
    assert not checkpointer.is_alive()


def test_a_recording_that_was_removed_is_not_made_anew_and_a_log_of_any_name_is_folded_into_its_file(tmp_path):
    fold(tmp_path / "recording.sqlite")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "50% of #1?.sqlite"
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("CREATE TABLE numbers(number)")
    Watched.used.clear()
    before = path.stat().st_size
    fold(path)
    assert path.stat().st_size > before
    writer.close()
