"""Detects waits that end by themselves: with a time limit in ``threading`` or ``queue``, or a sleep, and when it ends.

The end of a sleep is read from the kernel: /proc/PID/task/TID/syscall has the arguments of a thread's system call,
among them the address of the deadline (clock_nanosleep(2), futex(2); both absolute, as glibc and Python 3.11 use them).
A rank may read its own threads and its children's, also where Yama forbids others to (``ptrace_scope=1``). Known on
x86-64 and arm64; elsewhere nothing is reported.
"""

import os
import platform
import queue
import struct
import sys
import threading
import time
from pathlib import Path

from ..frame_locals import frame_locals

_FILES = frozenset((threading.__file__, queue.__file__))
_CALLS = {"x86_64": (230, 202), "aarch64": (115, 98)}
"""Numbers of clock_nanosleep(2) and futex(2)."""
_ABSOLUTE = 1
"""TIMER_ABSTIME of clock_nanosleep(2)."""
_WAIT_BITSET, _OF_COMMAND, _REAL_TIME = 9, 0x7F, 256
"""FUTEX_WAIT_BITSET, whose deadline is absolute; the bits of the command; FUTEX_CLOCK_REALTIME."""
_LOADER_WORKER = "pt_data_worker"


def waits_for_a_time(thread: int) -> bool:
    """Return whether a thread is in a wait of the standard library with a time limit, by its innermost frames."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename in _FILES:
        # Condition.wait, Event.wait, Thread.join, Barrier.wait, Queue.get; a Semaphore's is in Condition.wait.
        limit = frame_locals(frame).get("timeout")
        if isinstance(limit, float | int) and limit > 0:
            return True
        frame = frame.f_back
    return False


def seconds_until_awake(pid: int, thread: int) -> float | None:
    """Return the seconds until a thread's sleep ends by itself; None: it is not asleep for a set time, or unknown.

    Args:
        pid: its process: this one, or a child.
        thread: its number in the kernel.
    """
    numbers = _CALLS.get(platform.machine())
    try:
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        if numbers is None or len(words) < 7:  # "running", or a kernel without this file
            return None
        call, arguments = int(words[0]), [int(word, 16) for word in words[1:7]]
        if call == numbers[0] and arguments[1] & _ABSOLUTE:
            clock, address = arguments[0], arguments[2]
        elif call == numbers[1] and arguments[1] & _OF_COMMAND == _WAIT_BITSET and arguments[3]:
            clock = time.CLOCK_REALTIME if arguments[1] & _REAL_TIME else time.CLOCK_MONOTONIC
            address = arguments[3]
        else:
            return None
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        try:
            seconds, nanoseconds = struct.unpack("qq", os.pread(memory, 16, address))
        finally:
            os.close(memory)
        return max(0.0, seconds + nanoseconds * 1e-9 - time.clock_gettime(clock))
    except (OSError, ValueError, OverflowError, struct.error):
        return None


def first_worker_awake(pid: int) -> float | None:
    """Return the seconds until the first sleep of a dataloader worker of this process ends; None: no worker sleeps."""
    found: list[float] = []
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            if Path(f"/proc/{child}/comm").read_text().strip() == _LOADER_WORKER:
                seconds = seconds_until_awake(child, child)
                found += [] if seconds is None else [seconds]
    except (OSError, ValueError):
        return None
    return min(found, default=None)
