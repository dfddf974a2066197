"""The escalation of a kill, where its own thread does not run for a while."""

import signal
from types import SimpleNamespace

from ftmon.trainer.host.end import kill as module
from ftmon.trainer.host.end.kill import Kill, KillScope


def test_processes_that_ended_in_time_are_not_killed_by_a_thread_that_looks_late(tmp_path, monkeypatch):
    kill = Kill(KillScope(tmp_path, [], [], whole_run=True), signal.SIGTERM, False)
    now = iter([0.0, *[100.0] * 9])
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: next(now)))
    monkeypatch.setattr(kill, "_find", list)
    assert kill._wait([SimpleNamespace(pid=1)], 5.0) == []  # type: ignore[list-item]
