"""Stacks that a rank writes on a signal: read while they are being written."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from ftmon.protocol.messages.telemetry import SelfDump
from ftmon.trainer.host.inspection import inspect
from ftmon.trainer.host.inspection.inspect import DumpTarget


def test_a_handler_that_pauses_between_two_lines_has_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.stacks"
    path.write_text("earlier stacks\n")
    writes = iter(["Thread 1\n", "", "", "", "  File a.py\n"])

    def sleep(_: float) -> None:
        with path.open("a") as file:
            file.write(next(writes, ""))

    monkeypatch.setattr(inspect, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: 0.0))
    monkeypatch.setattr(inspect, "may_signal", lambda _: True)
    monkeypatch.setattr(inspect, "_tgkill", lambda *_: True)
    pid = os.getpid()
    target = DumpTarget(3, pid, 1, SelfDump(10, pid, 5, str(path), "0x1", pid))
    assert inspect.by_signal([target]) == {3: "Thread 1\n  File a.py\n"}
