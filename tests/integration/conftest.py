"""What every integration test needs."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from ftmon.protocol import run_store
from ftmon.protocol.rundir import RunDir
from ftmon_process import Ftmon
from run_picture import picture

Spawn = Callable[..., subprocess.Popen[str]]

STALE_SECONDS = 600.0
"""A compiler needs two minutes on two busy cores: a lock of this age was left by a process that was killed."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, with a failure, what the runs of the test's fixtures were doing."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            runs = value.runs()[:2] if isinstance(value, Ftmon) else [value] if isinstance(value, RunDir) else []
            report.sections += [(f"run {run.id}", picture(run)) for run in runs]
    return report


@pytest.fixture(scope="session", autouse=True)
def _deepspeed_extension() -> None:
    """Build the extension that DeepSpeed compiles for ranks on the CPU, once: a minute or two on two cores.

    A test that waits for its ranks' first step would wait for the compiler, and a rank that is killed while it builds
    leaves a lock behind that all later ones wait for: such a lock is removed.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    with contextlib.ExitStack() as stack:
        if root:
            folder = Path(root, "deepspeed_shm_comm")
            # One of the suite's workers builds, the others find it built.
            key = f"ftmon-tests-{os.getuid()}-{root.replace(os.sep, '-')}.lock"
            lock = stack.enter_context(open(Path(tempfile.gettempdir(), key), "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            left = folder / "lock"
            built = (folder / "deepspeed_shm_comm.so").exists() and not left.exists()
            with contextlib.suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > STALE_SECONDS:
                    left.unlink()
            if built:
                return
        code = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False, timeout=280)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Make the directory of a run in a private home."""
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FTMON_RUN", raising=False)
    return run_store.create("unit", ["true"], "run")


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
