"""What the whole suite needs: one thread for each process, the same random examples each time, the slow tests first."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import zmq
    from ftmon.protocol.run.rundir import RunDir
    from probe_collector import Collector

# The environment of these tests may not be activated, and its programs (``deepspeed``) are started by name.
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))

# Before torch is imported: a pool of threads in every process of a suite that runs several costs twice the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# DeepSpeed has torch.compile prepare a function of Muon's in every rank: 1.4 s of processor time for what no test runs.
# Tests that compile take it away (``compiling``).
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Those that compile need no vector instructions: their headers, and a probe for each set of them, take 15 s to compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

STARTUP = Path(__file__).with_name("support") / "startup"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), os.environ.get("PYTHONPATH"))))

# Where bytecode is not kept, every worker compiles all tests and every process of a run all of ftmon: a tenth of the
# suite's processor time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what is in its background with SIGINT ignored, nohup with SIGHUP ignored; what the tests start would
# inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Draws are timed by the clock, and the first one in a process parses all of ftmon's modules.
settings.register_profile(
    "suite", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")

# What is imported and collected stays to the end.
gc.disable()

INTEGRATION_SECONDS = 1500
"""The timeout of an integration test, for hangs: a fixture that trains many configurations takes minutes under load."""
INTEGRATION = Path(__file__).with_name("integration")
LONGEST = (
    "test_two_hosts.py",
    "test_predict_config.py",
    "test_predict.py",
    "test_resume.py",
    "test_sweep.py",
    "test_stall_verdicts.py",
)
"""Modules of a minute and more that would otherwise begin late."""
WORKERS_PER_CORE = 2.5
"""Half of the integration tests' time is spent waiting: for a patience to pass, for a process to end. Without them a
worker a core is best, as each imports what the tests need: 10 s of processor time."""


# What the fixtures import is imported by those that use them: here it would be in every worker, and before the settings
# above.


@pytest.fixture
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the test's own ``FTMON_HOME``, outside of any run."""
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FTMON_RUN", raising=False)
    return tmp_path / "home"


@pytest.fixture
def run(private_home: Path) -> "RunDir":
    """Make the directory of a run in a private home."""
    from ftmon.protocol.run import rundir

    return rundir.create("unit", ["true"], "run")


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    """Make a context of ZeroMQ, whose sockets end with the test."""
    import zmq

    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def collector(private_home: Path) -> Iterator["Collector"]:
    """What hears a job's ranks in the hub's place, in a private home."""
    from probe_collector import Collector

    with Collector(private_home) as collector:
        yield collector


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``torch.compile`` compile, here and in processes that the test starts."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    cores = len(os.sched_getaffinity(0))
    chosen = [config.invocation_params.dir / name.split("::")[0] for name in config.args]
    waits = any(INTEGRATION.is_relative_to(path) or path.is_relative_to(INTEGRATION) for path in chosen)
    return max(2, int(WORKERS_PER_CORE * cores)) if waits else cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put integration tests first, the longest before all: the rest fills what time the workers have left."""
    for item in items:
        if item.path.is_relative_to(INTEGRATION) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(INTEGRATION_SECONDS))
    items.sort(key=lambda item: (not item.path.is_relative_to(INTEGRATION), item.path.name not in LONGEST))


def pytest_collection_finish() -> None:
    """Have the garbage collector look at what the tests make alone."""
    gc.freeze()
    gc.enable()
