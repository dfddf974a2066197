"""What every integration test needs."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import Ftmon, ftmon_home
from run_picture import picture

Spawn = Callable[..., subprocess.Popen[str]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show, with a failure, what the runs of the test's fixtures were doing."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            runs = value.runs()[:2] if isinstance(value, Ftmon) else [value] if isinstance(value, RunDir) else []
            report.sections += [(f"run {run.id}", picture(run)) for run in runs]
    return report


@pytest.fixture(scope="package", autouse=True)
def _no_extension() -> Iterator[None]:
    """Make a script fail at once that would have DeepSpeed compile an extension, which takes a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", os.path.join(os.devnull, "no extension is compiled in a test"))
        yield


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="") as ftmon:
        yield ftmon


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
        assert process.stdout.readline().strip() == "ready"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(200)
        process.stdout.close()
        process.stdin.close()
