"""Runs in a private home, and real child processes that are ended whatever a test does."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ftmon.protocol import rundir
from ftmon.protocol.rundir import RunDir

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FTMON_RUN", raising=False)
    return rundir.create("unit", ["true"], "run")


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start ``python -c code`` in its own session, its stdin held open; it is ready when it prints ``ready``."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()
