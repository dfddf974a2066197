"""Processes of a run, from /proc: descendants, processes with the run in their environment, and race-free signals.

A process is identified by its pid together with its start time (``Process``), because a pid may have been reused by the
time a signal is sent. Linux only (proc(5), pidfd_open(2)).

Not psutil: it lacks start ticks, session and a zombie's wait status, and takes six times as long for the table.
"""

import contextlib
import ctypes
import fcntl
import os
import platform
import signal
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ...protocol.analysis.hub_facts import UnhookedFacts
from ...protocol.host.process import proc_bytes, proc_text
from ...protocol.run.environment import RANK_PID_ENV, RUN_ENV

_GET_INFO = 0xC040FF0B
"""PIDFD_GET_INFO of linux/pidfd.h: ``_IOWR(0xFF, 11, struct pidfd_info)``, in its first version of 64 bytes."""
_INFO_EXIT = 1 << 3  # PIDFD_INFO_EXIT, Linux 6.15: exit status of a process that has been reaped
_INFO_BYTES = 64
_EXIT_CODE_AT = 60
_AGENT = "ftmon.trainer.agent"
"""Agents are not part of a run: an agent of "another host" may share our pid namespace, as with containers."""
_KILLS_KEPT = 4096
killed: dict[tuple[int, int], None] = {}  # Pid and start time of the processes that were sent SIGKILL most recently


class Process(NamedTuple):
    """One line of the process table."""

    pid: int
    parent: int
    group: int
    session: int
    state: str  # ``R``, ``S``, ``D`` (uninterruptible), ``T`` (stopped), ``t`` (traced), ``Z`` (zombie), ``X``
    start_ticks: int
    wait_status: int  # Its status in wait(2)'s format while it is a zombie; else 0
    name: str

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time, which no other process has."""
        return self.pid, self.start_ticks

    @property
    def alive(self) -> bool:
        """False for a zombie, which only keeps its exit status."""
        return self.state not in "ZX"


def stat_fields(path: str) -> tuple[str, list[str]] | None:
    """Return the name in a ``stat`` file of proc(5), and the fields after it; None if it cannot be read."""
    begin, _, fields = proc_text(path).rpartition(")")
    return (begin.partition("(")[2], fields.split()) if fields else None


def read(pid: int) -> Process | None:
    """Read ``/proc/PID/stat`` (proc(5)); return None if there is no such process."""
    found = stat_fields(f"/proc/{pid}/stat")
    if found is None:
        return None
    name, fields = found
    status = int(fields[49]) if len(fields) > 49 else 0
    return Process(pid, int(fields[1]), int(fields[2]), int(fields[3]), fields[0], int(fields[19]), status, name)


def status(pid: int, thread: int | None = None) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status`` (proc(5)) or of one thread's; empty if they are not readable."""
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    return {name: value.strip() for name, _, value in (line.partition(":") for line in proc_text(path).splitlines())}


def open_files(pid: int, root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """Yield the path in /proc of each descriptor of a process, and its target; none if they are not readable."""
    with contextlib.suppress(OSError), os.scandir(root / f"proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                yield entry.path, os.readlink(entry.path)


def tracer(pid: int) -> str:
    """Return the name of the process that traces this one; empty if none does."""
    number = int(status(pid).get("TracerPid", 0))
    found = read(number) if number else None
    return found.name if found is not None else ""


def same(process: Process) -> Process | None:
    """Read the process again; return None if it is gone or its pid was reused."""
    now = read(process.pid)
    return now if now is not None and now.start_ticks == process.start_ticks else None


def table() -> dict[int, Process]:
    """Return the whole process table, by pid, including zombies."""
    found = (read(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(roots: Iterable[int], processes: dict[int, Process], apart: Iterable[int] = ()) -> list[Process]:
    """Return all processes below ``roots`` (not the roots themselves), parents before children.

    Pids in ``apart``, such as other ranks, are excluded with their descendants.
    """
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    waiting = list(set(roots))
    seen = {*waiting, *apart}
    found: list[Process] = []
    while waiting:
        for child in children.get(waiting.pop(0), ()):
            if child.pid not in seen:
                seen.add(child.pid)
                found.append(child)
                waiting.append(child.pid)
    return found


def ancestors(pid: int, processes: Mapping[int, Process]) -> Iterator[Process]:
    """Yield the processes above ``pid``, from its parent on, without that of pid 1."""
    above = processes.get(processes[pid].parent)
    while above is not None and above.pid > 1:
        yield above
        above = processes.get(above.parent)


def environment_of(pid: int) -> list[bytes]:
    """Return the ``NAME=value`` strings with which a process was started; empty if not readable."""
    return proc_bytes(f"/proc/{pid}/environ").split(b"\0")


def variable_of(pid: int, name: str) -> str | None:
    """Return an environment variable with which a process was started; None if it is unset or not readable."""
    prefix = os.fsencode(f"{name}=")
    found = next((one for one in environment_of(pid) if one.startswith(prefix)), None)
    return None if found is None else os.fsdecode(found[len(prefix) :])


def marked(run: Path, processes: Iterable[Process], rank_pids: Iterable[int] | None = None) -> list[Process]:
    """Return the processes whose environment names ``run`` (and, if given, one of the ranks ``rank_pids``)."""
    wanted = os.fsencode(f"{RUN_ENV}={run}")
    ranks = None if rank_pids is None else {os.fsencode(f"{RANK_PID_ENV}={pid}") for pid in rank_pids}
    living = [(process, environment_of(process.pid)) for process in processes if process.alive]
    return [one for one, found in living if wanted in found and (ranks is None or not ranks.isdisjoint(found))]


def of_run(run: Path, roots: Iterable[int], spared: Collection[int]) -> list[Process]:
    """Return every living process of a run: descendants of ``roots``, or with the run in its environment.

    ``roots`` are included, ``spared`` pids are not. Descendants of a process found by its environment are included too,
    because they may have been started with another environment. Agents are excluded: they end by themselves.
    """
    processes = table()
    start = {pid for pid in roots if pid in processes}
    start.update(process.pid for process in marked(run, processes.values()))
    start.difference_update(spared)
    below = descendants(start, processes)
    members = {pid: processes[pid] for pid in start} | {process.pid: process for process in below}
    return [p for p in members.values() if p.alive and p.pid not in spared and not runs_module(p.pid, _AGENT)]


def runs_module(pid: int, module: str) -> bool:
    """Return whether a process was started as ``python -m MODULE``; False if it is gone."""
    return module.encode() in proc_bytes(f"/proc/{pid}/cmdline").split(b"\0")


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Signal exactly this process; return False if it is gone (or its pid was reused).

    Uses a pidfd, so that the pid cannot be reused between check and signal. Raises ``PermissionError`` if the process
    belongs to another user.
    """
    descriptor = -1
    try:
        with contextlib.suppress(OSError):  # a kernel before 5.3 has no pidfd: check, then signal
            descriptor = os.pidfd_open(process.pid)
        if same(process) is None:
            return False
        if descriptor < 0:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
        _note(process, number)  # before another thread may run and find its end
        return True
    except ProcessLookupError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _note(process: Process, number: signal.Signals) -> None:
    if number == signal.SIGKILL:
        killed[process.key] = None
        while len(killed) > _KILLS_KEPT:
            killed.pop(next(iter(killed)), None)


def status_of_reaped(pidfd: int) -> int | None:
    """Return the wait(2) status of a process that its parent has reaped; None if it has not, or on Linux before 6.15.

    ``pidfd`` was opened while the process existed (pidfd_open(2)).
    """
    info = bytearray(_INFO_BYTES)  # starts with the mask of requested fields; the kernel returns the provided ones
    struct.pack_into("=Q", info, 0, _INFO_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, info)
        if struct.unpack_from("=Q", info)[0] & _INFO_EXIT:
            return int(struct.unpack_from("=i", info, _EXIT_CODE_AT)[0])
    return None


def exit_of(wait_status: int) -> tuple[int | None, int | None]:
    """Split a wait(2) status into (exit code, None) or (None, signal number)."""
    if os.WIFSIGNALED(wait_status):
        return None, os.WTERMSIG(wait_status)
    return os.WEXITSTATUS(wait_status), None


# Processes that no longer descend from their rank: daemons that forked twice, workers of a dead parent. They are
# attributed to it by its pid in their environment (``RANK_PID_ENV``, after an exec), by the run's environment with the
# same stack address (kept by a fork without exec; the kernel randomizes it for each exec), or by descent from such one.
_START_STACK = 25  # Index of field 28 of /proc/PID/stat in the fields after the name


class Origin(NamedTuple):
    """Properties that identify the children of one rank's process; read while it lives."""

    rank: int
    pid: int
    start_ticks: int
    image: int  # Address of its stack; 0: unknown, or shared with its parent and thus not specific to this rank


def origin(rank: int, pid: int, table: Mapping[int, Process]) -> Origin | None:
    """Return the properties that identify a rank's children; None if the process is gone."""
    process = table.get(pid)
    if process is None:
        return None
    image = _image(pid)
    if image and image == _image(process.parent):
        image = 0  # ranks that were forked from one process are alike
    return Origin(rank, pid, process.start_ticks, image)


def escaped(origins: Iterable[Origin], table: Mapping[int, Process]) -> dict[int, list[Process]]:
    """Return, by rank, the living processes that the ranks started and that no longer descend from them."""
    wanted = list(origins)
    if not wanted:
        return {}
    by_pid = {one.pid: one for one in wanted}
    by_image = {one.image: one for one in wanted if one.image}
    oldest = min(one.start_ticks for one in wanted)
    below = {p.pid for p in descendants(by_pid, dict(table))}
    found: dict[int, list[Process]] = {}
    for process in table.values():
        if process.pid in below or process.pid in by_pid or not process.alive or process.start_ticks < oldest:
            continue
        owner = _owner(process, by_pid, by_image)
        if owner is not None:
            found.setdefault(owner.rank, []).append(process)
    return found


def _owner(process: Process, by_pid: Mapping[int, Origin], by_image: Mapping[int, Origin]) -> Origin | None:
    prefix = os.fsencode(f"{RANK_PID_ENV}=")
    for variable in environment_of(process.pid):
        if variable.startswith(prefix) and variable[len(prefix) :].isdigit():
            return by_pid.get(int(variable[len(prefix) :]))
    return by_image.get(_image(process.pid)) if by_image else None


def _image(pid: int) -> int:
    read = stat_fields(f"/proc/{pid}/stat")
    return int(read[1][_START_STACK]) if read is not None else 0


INJECT_DIR = Path(__file__).resolve().parent.parent / "probe" / "inject"
"""Put first on ``PYTHONPATH``: its ``sitecustomize`` installs the import hook in every Python process of the job."""
_PYTORCH = b"/libtorch"


def find_unhooked(run: Path, launcher: int) -> UnhookedFacts | None:
    """Return a process of ``run`` below ``launcher`` that has loaded PyTorch but not the import hook, else None."""
    for process in marked(run, descendants([launcher], table())):
        given = variable_of(process.pid, "PYTHONPATH")
        hooked = str(INJECT_DIR) in (given or "").split(os.pathsep)
        if not hooked and _PYTORCH in proc_bytes(f"/proc/{process.pid}/maps"):
            return UnhookedFacts(process.pid, given)
    return None


_PR_SET_PDEATHSIG = 1  # prctl(2)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # ioprio_set(2) has no wrapper in glibc
_IOPRIO_IDLE = 3 << 13


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent (by pid) ends; exit at once if the parent has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def lower_priority(idle: bool = True) -> None:
    """Lower this process's CPU and disk priority, and make it the first to be killed when memory runs out.

    ``idle``: the idle class; otherwise only a low priority, because a user waits for the result.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError):  # the niceness is raised also if the parent has set one, and never lowered
        os.setpriority(os.PRIO_PROCESS, 0, max(19 if idle else 10, os.getpriority(os.PRIO_PROCESS, 0)))
    if not idle:
        return
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError, AttributeError, KeyError):
        ctypes.CDLL(None).syscall(_IOPRIO_SET[platform.machine()], 1, 0, _IOPRIO_IDLE)
