"""Waits of the standard library with a time limit, as a data set's between two attempts."""

import queue
import sys
import threading
from collections.abc import Callable

import pytest
from eventually import eventually
from ftmon.trainer.probe.link.timed_waits import waits_for_a_time

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
