"""Waits of the standard library with a time limit, as a data set's between two attempts."""

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.trainer.probe.link.stacks import seconds_until_awake, waits_for_a_time

EVENT = threading.Event()
EMPTY: "queue.Queue[int]" = queue.Queue()


@pytest.mark.parametrize(
    ("wait", "timed"),
    [
        (lambda: EVENT.wait(60), True),
        (lambda: EVENT.wait(timeout=60.0), True),
        (lambda: EMPTY.get(timeout=60), True),
        (lambda: EVENT.wait(), False),
        (lambda: EMPTY.get(), False),
    ],
    ids=["event", "seconds by name", "queue", "event without a limit", "queue without a limit"],
)
def test_a_wait_with_a_limit_is_told_from_one_without(wait: Callable[[], object], timed: bool) -> None:
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        eventually(lambda: _waits(thread), "the wait")
        assert waits_for_a_time(thread.ident or 0) is timed
    finally:
        EVENT.set()
        EMPTY.put(1)
        thread.join()
        EVENT.clear()
        while not EMPTY.empty():
            EMPTY.get()
    assert not waits_for_a_time(threading.get_ident())


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def thread_asleep(sleep: Callable[[], object]) -> int:
    """Start a thread that sleeps; return its number in the kernel once it does."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: (found.append(threading.get_native_id()), sleep()), daemon=True)
    thread.start()
    eventually(lambda: bool(found) and state(found[0]) == "S", "the sleep")
    return found[0]


def state(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the kernel does not show system calls")
@pytest.mark.parametrize(
    ("sleep", "known"),
    [
        (lambda: time.sleep(500.0), True),
        (lambda: threading.Event().wait(500.0), True),
        (lambda: threading.Event().wait(), False),
    ],
    ids=["sleep", "wait with a limit", "wait without one"],
)
def test_the_end_of_a_sleep_is_read_from_the_kernel(sleep: Callable[[], object], known: bool) -> None:
    thread = thread_asleep(sleep)
    if not known:
        assert seconds_until_awake(os.getpid(), thread) is None
        return
    eventually(lambda: seconds_until_awake(os.getpid(), thread) is not None, "the sleep")
    left = seconds_until_awake(os.getpid(), thread)
    assert left is not None
    assert 400.0 < left < 500.5


def test_a_thread_that_runs_or_is_gone_does_not_sleep() -> None:
    assert seconds_until_awake(os.getpid(), threading.get_native_id()) is None
    assert seconds_until_awake(os.getpid(), 1 << 22) is None
