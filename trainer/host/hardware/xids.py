"""Reads errors of NVIDIA's driver (XIDs) from the kernel log if permitted, else from NVML's events.

The log's lines are ``NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.`` Records
already in the log at the start are older than the run and are ignored.
"""

import contextlib
import os
import re
import time
from itertools import islice
from typing import Any

import pynvml

from ....protocol.messages.health import Xid
from ....protocol.text import sanitize
from .kernel_log import read_records

_LINE = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)[^)]*\): (?P<code>\d+)")
_MOST = 256
"""Maximum number of records read per call."""


def read_xid(record: str, host: str, now: float) -> Xid | None:
    """Parse one record of ``/dev/kmsg`` (or a plain log line); None if it is not an XID."""
    text = record.split(";", 1)[-1].split("\n", 1)[0]
    found = _LINE.search(text)
    if found is None:
        return None
    return Xid(host, now, int(found["code"]), -1, found["bus"], sanitize(text[found.start() :], 400))


class Xids:
    """Watches for XIDs. Use it from one thread, and ``close`` it. ``log`` differs only in tests."""

    def __init__(self, host: str, log: str = "/dev/kmsg") -> None:
        self._host = host
        self._events: Any = None
        self._handles: list[Any] = []
        self._log: int | None = None
        try:
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._register()

    def poll(self) -> list[Xid]:
        """Return the errors since the last call; never waits."""
        return self._from_log() if self._log is not None else self._from_nvml()

    def close(self) -> None:
        """Close the log and NVML."""
        if self._log is not None:
            os.close(self._log)
            self._log = None
        if self._events is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
            self._events = None

    def _from_log(self) -> list[Xid]:
        assert self._log is not None
        lines = islice(read_records(self._log), _MOST)
        return [xid for line in lines if (xid := read_xid(line, self._host, time.time())) is not None]

    def _register(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            return
        for index in range(_count()):
            # A consumer card may not support the event; the others are still watched.
            with contextlib.suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
                self._handles.append(handle)
        self._events = events

    def _from_nvml(self) -> list[Xid]:
        found: list[Xid] = []
        if self._events is None or not self._handles:
            return found
        for _ in range(_MOST):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
                index = int(pynvml.nvmlDeviceGetIndex(event.device))
            except (pynvml.NVMLError, AttributeError):
                break
            found.append(Xid(self._host, time.time(), int(event.eventData), index))
        return found


def _count() -> int:
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
