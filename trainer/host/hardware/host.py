"""Watches this host: free disk space, memory and CPU as a device sample, and kills by the kernel's OOM killer."""

import contextlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ....protocol.host.machine import cpu_model, group_limit, group_memory, hierarchies, memory_group
from ....protocol.host.process import proc_bytes, proc_text
from ....protocol.messages.hosts import KernelKill
from ....protocol.messages.telemetry import DeviceSample, DiskSpace, ProcessMemory, Volume
from ....protocol.text import sanitize
from ..processes import open_files

SEARCH_SECONDS = 10.0  # Seconds between searches for directories; free space is read at every call of ``measure``
SEND_SECONDS = 30.0  # Seconds after which unchanged figures are sent again
CHANGED_SHARE = 0.0005  # Share of a volume's size; smaller changes are not sent at once
MOST_VOLUMES = 16
MOST_FILES = 512
_NO_DISKS = ("/proc/", "/sys/", "/dev/")
SHM = "/dev/shm"
Place = tuple[str, str]  # A directory, and its use by the run


class Disks:
    """Measures free space on the file systems that a run uses on this host. Not thread-safe.

    Directories: the run's own, each rank's working directory, ``TMPDIR``, ``/dev/shm``, the output directory that a
    rank announced, and those of files that a rank has open for writing (a checkpoint being saved). One directory is
    reported per file system.
    ``root`` is the parent directory of ``proc``; it and ``statvfs`` differ only in tests.
    """

    def __init__(
        self,
        host: str,
        run: Path,
        rank_pids: Callable[[], dict[int, int]],
        statvfs: Callable[[str], Any] = os.statvfs,
        root: Path = Path("/"),
    ) -> None:
        self._host = host
        self._run = run
        self._rank_pids = rank_pids
        self._statvfs = statvfs
        self._root = root
        self._outputs: dict[int, str] = {}
        self._volumes: dict[int, Place] = {}  # Directory and use, by device number
        self._searched = -SEARCH_SECONDS
        self._sent: dict[str, int] = {}
        self._sent_at = -SEND_SECONDS

    def note_output(self, rank: int, path: str) -> None:
        """Record the directory that a rank writes to; any thread."""
        if path:
            self._outputs[rank] = path

    def measure(self, now: float | None = None) -> DiskSpace | None:
        """Return free space; None if it has not changed enough since the last message."""
        now = time.monotonic() if now is None else now
        if now - self._searched >= SEARCH_SECONDS:
            self._searched = now
            self._find()
        volumes: list[Volume] = []
        for path, use in self._volumes.values():
            try:
                found = self._statvfs(path)
            except OSError:
                continue
            size = found.f_frsize or found.f_bsize
            if found.f_blocks:
                volumes.append(Volume(path, use, found.f_bavail * size, found.f_blocks * size))
        changed = any(
            abs(one.free_bytes - self._sent.get(one.path, -1)) >= max(1, CHANGED_SHARE * one.total_bytes)
            for one in volumes
        )
        if not volumes or (not changed and now - self._sent_at < SEND_SECONDS):
            return None
        self._sent = {one.path: one.free_bytes for one in volumes}
        self._sent_at = now
        return DiskSpace(self._host, time.time(), volumes)

    def _find(self) -> None:
        found: dict[int, Place] = {}
        for path, use in self._places():
            try:
                device = os.stat(path).st_dev
            except OSError:
                continue
            if device not in found and len(found) < MOST_VOLUMES:
                found[device] = self._volumes.get(device, (sanitize(path, 1024), use))
        self._volumes = found

    def _places(self) -> Iterator[Place]:
        try:
            pids = dict(self._rank_pids())
        except RuntimeError:  # the table changed while it was read
            pids = {}
        for rank, path in list(self._outputs.items()):
            cwd = self._link(pids.get(rank, 0), "cwd")
            if path.startswith("/") or cwd:
                yield _existing(os.path.join(cwd, path)), "output"
        yield str(self._run), "run directory"
        for pid in pids.values():
            for path in self._written(pid):
                yield path, "output"
            cwd = self._link(pid, "cwd")
            if cwd:
                yield cwd, "working directory"
        for pid in list(pids.values())[:1]:
            yield self._temporary(pid), "TMPDIR"
        yield SHM, SHM

    def _link(self, pid: int, name: str) -> str:
        try:
            return os.readlink(self._root / f"proc/{pid}/{name}") if pid else ""
        except OSError:
            return ""

    def _temporary(self, pid: int) -> str:
        environment = proc_bytes(self._root / f"proc/{pid}/environ").split(b"\0")
        found = (entry[7:] for entry in environment if entry.startswith(b"TMPDIR=") and len(entry) > 7)
        return os.fsdecode(next(found, b"/tmp"))

    def _written(self, pid: int) -> Iterator[str]:
        for path, target in islice(open_files(pid, self._root), MOST_FILES):
            with contextlib.suppress(OSError):
                mode = os.lstat(path).st_mode
                if mode & stat.S_IWUSR and target.startswith("/") and not target.startswith(_NO_DISKS):
                    yield os.path.dirname(target)


def _existing(path: str) -> str:
    """Return the nearest existing parent: an output directory is created with the first checkpoint."""
    while not os.path.isdir(path) and len(path) > 1:
        path = os.path.dirname(path)
    return path


class HostLoad:
    """Samples this host as a device: memory under its cgroup's limit, busy CPU, the ranks' resident memory.

    Not thread-safe; use it from one thread. ``root`` differs only in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._name = f"{cpu_model(root)}, {os.cpu_count() or 1} CPUs"
        self._group = memory_group(root)
        psutil.cpu_percent(None)  # the first call only starts the measurement

    def sample(self, host: str, now: float, rank_of: dict[int, int]) -> DeviceSample:
        """Sample the host."""
        memory = psutil.virtual_memory()
        used, total = int(memory.total - memory.available), int(memory.total)
        limited = group_memory(self._group) if self._group is not None else None
        if limited is not None and limited[1] < total:
            used, total = limited
        return DeviceSample(
            *(host, "host", 0, self._name, now, used, total),
            utilization_percent=psutil.cpu_percent(None),
            processes=[
                ProcessMemory(pid, size, rank, sanitize(proc_text(f"/proc/{pid}/comm").strip(), 32))
                for pid, rank in rank_of.items()
                if (size := _resident_of(pid))
            ],
        )


RECENT_SECONDS = 30.0  # Maximum seconds between the kill and the death of a process; large processes die slowly
_COUNTS_KEPT = 16
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO: only there are the kernel log's pids those of /proc
_KILL_COUNT = re.compile(r"oom_kill \d+\s*")
_KILLED = re.compile(
    r"(?P<scope>Memory cgroup out of memory|Out of memory)[^:]*: Killed process (?P<pid>\d+)(?:, UID \d+,)? "
    r"\((?P<name>[^)]*)\).*?anon-rss:(?P<anon>\d+)kB"
)


class LogKill(NamedTuple):
    """A kill in the kernel's log."""

    pid: int
    name: str
    resident_bytes: int  # Anonymous resident memory
    of_group: bool  # Whether a cgroup's limit was reached; otherwise the host's memory was exhausted
    at: float  # Seconds since boot


def read_kill(record: str) -> LogKill | None:
    """Parse one record of ``/dev/kmsg`` (``priority,number,microseconds,flags;text``); None if it is not a kill."""
    head, _, text = record.partition(";")
    found = _KILLED.search(text)
    if found is None:
        return None
    fields = head.split(",")
    at = int(fields[2]) / 1e6 if len(fields) > 2 and fields[2].isdigit() else 0.0
    group = found["scope"].startswith("Memory cgroup")
    return LogKill(int(found["pid"]), sanitize(found["name"], 64), int(found["anon"]) * 1024, group, at)


def kill_count(group: Path) -> int | None:
    """Return the number of a cgroup's processes killed by the OOM killer; None: unknown."""
    lines = (line for name in ("memory.events", "memory.oom_control") for line in proc_text(group / name).splitlines())
    return next((int(line.split()[1]) for line in lines if _KILL_COUNT.fullmatch(line)), None)


def memory_groups(pid: int, root: Path = Path("/")) -> list[Path]:
    """Return the cgroups that account for the memory of a process, of version 2 and 1."""
    places = hierarchies("memory", pid, root)
    found = [next((group for group in place if kill_count(group) is not None), None) for place in places]
    return [group for group in found if group is not None]


class KernelKills:
    """Records kill counters while processes live, and finds evidence once one has died. Use it from one thread.

    A SIGKILL alone proves nothing. Evidence is a kernel log line that names the pid, or a control group's count of
    out-of-memory kills that rose just before the process died. Formats: Linux's mm/oom_kill.c (``Killed process``),
    cgroup version 2's ``memory.events`` and version 1's ``memory.oom_control``
    (Documentation/admin-guide/cgroup-v1/memory.rst). ``root`` differs only in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups: dict[int, list[Path]] = {}
        self._counts: dict[Path, deque[tuple[float, int]]] = {}
        self._resident: dict[int, int] = {}

    def record(self, pid: int, now: float) -> None:
        """Record a living process's cgroup, its counters and the process's size; about once a second."""
        groups = memory_groups(pid, self._root)
        if groups:
            self._groups[pid] = groups
        for group in groups:
            self._note(group, now)
        size = _resident_of(pid, self._root)
        if size:
            self._resident[pid] = size

    def find(self, pid: int, now: float) -> KernelKill | None:
        """Return evidence that the kernel killed a process that has just died by SIGKILL; None: there is none.

        A readable kernel log that does not name the process is evidence against a kill.
        """
        groups = memory_groups(pid, self._root) or self._groups.pop(pid, [])
        resident = self._resident.pop(pid, 0)
        limits = {group: limit for group in groups if (limit := group_limit(group))}
        readable, log = self._from_log(pid)
        if log is not None:
            exhausted = "group" if log.of_group else "host"
            known = list(limits.values())[:16]
            return KernelKill(True, exhausted, log.name, log.resident_bytes, known, resident_bytes=resident)
        for group in groups:
            before, after = self._note(group, now)
            if after > before:
                limit = [limits[group]] if group in limits else []
                return KernelKill(False, "group", "", 0, limit, after, after - before, resident)
        return KernelKill(False) if readable else None

    def forget(self, pid: int) -> None:
        """Stop recording a process."""
        self._groups.pop(pid, None)
        self._resident.pop(pid, None)

    def _note(self, group: Path, now: float) -> tuple[int, int]:
        """Return a group's count ``RECENT_SECONDS`` ago (or at the first read) and now."""
        count = kill_count(group) or 0
        known = self._counts.setdefault(group, deque(maxlen=_COUNTS_KEPT))
        if not known or known[-1][1] != count:
            known.append((now, count))
        while len(known) > 1 and known[1][0] < now - RECENT_SECONDS:
            known.popleft()
        return known[0][1], count

    def _from_log(self, pid: int) -> tuple[bool, LogKill | None]:
        """Return whether the kernel log could be read with this host's pids, and the kill of that pid in it."""
        try:
            are_kernels = os.readlink(self._root / "proc/self/ns/pid") == _INITIAL_PID_NAMESPACE
        except OSError:
            are_kernels = False
        records = _log_records(self._root) if are_kernels else []
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        kills = [kill for record in records if (kill := read_kill(record)) is not None]
        # The log's clock stops during suspend and may drift; a pid is not reused that soon.
        near = [kill for kill in kills if kill.pid == pid and (not kill.at or abs(now - kill.at) < 600)]
        return bool(records), near[-1] if near else None


def _log_records(root: Path) -> list[str]:
    """Return the kernel log from its beginning; empty without permission."""
    try:
        descriptor = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return list(read_records(descriptor))
    finally:
        os.close(descriptor)


def read_records(log: int) -> Iterator[str]:
    """Yield the records of an open, non-blocking ``/dev/kmsg`` until there are no more."""
    while True:
        try:
            data = os.read(log, 8192)  # one record per read; a plain file (in tests) is read in blocks
        except BrokenPipeError:
            continue  # records were overwritten; the next read returns the oldest one left
        except OSError:  # EAGAIN: no more records
            return
        if not data:
            return
        yield from data.decode("utf-8", "replace").splitlines()


def _resident_of(pid: int, root: Path = Path("/")) -> int:
    pages = [*proc_text(root / f"proc/{pid}/statm").split(), "0", "0"][1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
