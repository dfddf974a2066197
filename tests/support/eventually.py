"""The one way in which tests wait: for a condition, with a bound that only a fault reaches."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS = 200.0
"""For anything that needs seconds on a free machine: tests share two cores with a compiler and ranks that import torch.
Below the tests' timeout, so that a failure says what it waited for."""


def eventually(
    found: Callable[[], T],
    what: str,
    seconds: float = SECONDS,
    *,
    each: Callable[[], Any] | None = None,
    state: Callable[[], object] | None = None,
    every: float = 0.02,
) -> T:
    """Return the first true value of ``found``; fail with ``what`` was waited for, and the ``state`` there is instead.

    ``each`` is called before each look; after it returned something true there is no pause of ``every`` seconds. A
    pause is longer than the look before it, which may read all processes: what is waited for needs the processor.
    """
    deadline = time.monotonic() + seconds
    while True:
        moved = each() if each is not None else None
        began = time.monotonic()
        if value := found():
            return value
        now = time.monotonic()
        if now > deadline:
            instead = f":\n{state()}" if state is not None else ""
            raise AssertionError(f"not within {seconds:g} s: {what}{instead}")
        if not moved:
            time.sleep(max(every, min(0.5, 3 * (now - began))))
