"""A process in uninterruptible sleep is said so, watched, and its end told."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.analysis.hub_facts import left_process
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.host import processes
from ftmon.trainer.host.inspection import inspect
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.detect import Leftovers, facts_of

# Between vfork and the child's end the kernel holds the parent in state D (vfork(2)).
UNINTERRUPTIBLE = """
import ctypes, sys
libc = ctypes.CDLL(None)
print("ready", flush=True)
if libc.vfork() == 0:
    while True: libc.pause()
"""


@pytest.fixture
def sleeper() -> Iterator[processes.Process]:
    """A process in state D."""
    process = subprocess.Popen([sys.executable, "-c", UNINTERRUPTIBLE], stdout=subprocess.PIPE, start_new_session=True)
    try:
        process.stdout.readline()
        yield eventually(lambda: (it := processes.read(process.pid)) and it.state == "D" and it, "state D")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_waits_for_the_kernel_is_not_asleep_and_one_left_is_watched_to_its_end(sleeper):
    look = inspect.measure(sleeper.pid, None, processes.table(), 1.0)
    assert look.on_disk
    assert look._replace(time=2.0).work_since(look) == "disk"
    assert "uninterruptible" in left_process(facts_of(sleeper))
    sent: list[Any] = []

    def emit(message: Any) -> tuple[int, float]:
        sent.append(message)
        return len(sent), time.time()

    run = RunFile(id="a", name="a", kind="run", command=["x"], cwd="/", created=1.0, host="h")
    left = Leftovers(Analysis(run, emit), list, lambda: False)
    left.note([sleeper.pid, os.getpid()])
    (alert,) = sent
    assert f"pid {sleeper.pid}" in alert.title
    assert "uninterruptible sleep" in alert.title
    assert alert.evidence["pids"] == [sleeper.pid], "this very process is reached by signals"
    now = time.monotonic()
    assert left.waiting(now)
    left.tick(now)
    assert len(sent) == 1
    os.killpg(sleeper.pid, signal.SIGKILL)
    eventually(
        lambda: not left.waiting(now),
        "an end of the watching",
        each=lambda: left.tick(time.monotonic() + 10 * len(sent)),
    )
    assert sent[-1].resolved is not None
    assert "gone now" in sent[-1].text
