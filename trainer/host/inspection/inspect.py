"""Inspects ranks of this host without their cooperation: their processes' activity, and their stacks by a signal."""

import contextlib
import ctypes
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.analysis.stalls.evidence import Activity, Calls, LockWait
from ....protocol.host.process import proc_text
from ....protocol.messages import control
from ....protocol.messages.telemetry import SelfDump
from ....protocol.text import kernel_sleep, sanitize
from .. import processes
from ..processes import Process, escaped, origin

_LINE = re.compile(r"(\d+): (->)?\s*\S+\s+\S+\s+\S+\s+(-?\d+)\s+([0-9a-f]+):([0-9a-f]+):(\d+)\s")


class LockWaiter(NamedTuple):
    """A process that waits for a file lock."""

    pid: int
    holder: int  # Pid of the holder; 0 or less if the kernel does not name one
    path: str  # The locked file; empty if it was not found among the process's descriptors


def lock_waiters(table: Mapping[int, Process]) -> dict[int, LockWaiter]:
    """Return, by pid, the processes that wait for a lock held by another process, from /proc/locks of proc(5)."""
    holders: dict[str, int] = {}
    found: dict[int, LockWaiter] = {}
    for line in proc_text("/proc/locks").splitlines():
        read = _LINE.match(line)
        if read is None:
            continue
        number, waits, pid, major, minor, inode = read.groups()
        if not waits:
            holders[number] = int(pid)
        elif int(pid) in table:
            device = os.makedev(int(major, 16), int(minor, 16))
            found[int(pid)] = LockWaiter(int(pid), holders.get(number, 0), _path(int(pid), device, int(inode)))
    return found


def _path(pid: int, device: int, inode: int) -> str:
    for path, target in processes.open_files(pid):
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == (device, inode):
                return target
    return ""


# Bytes per TCP connection are read through sock_diag(7): ``/proc/PID/io`` counts read(2) and write(2) only, and those
# of send(2) and recv(2), as Python's sockets use, are counted by the connection (``tcp_info`` of linux/tcp.h).
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_INFO = 2  # INET_DIAG_INFO: the attribute that holds ``struct tcp_info``
_MESSAGE_BYTES = 72
_INODE_AT = 68
_ACKED_AT = 120  # Offset of ``tcpi_bytes_acked``, followed by ``tcpi_bytes_received``; Linux 4.1
_TIMEOUT_SECONDS = 0.5
_LARGEST_REPLY = 1 << 18


def by_socket() -> dict[int, int]:
    """Return, by socket inode, the bytes acknowledged plus received; empty if the kernel does not report them.

    Covers the connections of the caller's network namespace.
    """
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, AttributeError, struct.error):
            found |= _of_family(family)
    return found


def of_process(pid: int, sockets: Mapping[int, int]) -> int:
    """Return the bytes of all TCP connections that a process has open; 0 if its descriptors are not readable."""
    targets = (target for _, target in processes.open_files(pid)) if sockets else ()
    return sum(sockets.get(int(target[8:-1]), 0) for target in targets if target.startswith("socket:["))


def _of_family(family: int) -> dict[int, int]:
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_TIMEOUT_SECONDS)
        body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF)
        link.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            for kind, message in _parts(link.recv(_LARGEST_REPLY), "=IH", 16):
                if kind in (_DONE, _ERROR):
                    return found
                (inode,) = struct.unpack_from("=I", message, _INODE_AT)
                for attribute, value in _parts(message[_MESSAGE_BYTES:], "=HH", 4):
                    if attribute == _INFO and len(value) >= _ACKED_AT + 16 and inode:
                        found[inode] = sum(struct.unpack_from("=QQ", value, _ACKED_AT))


def _parts(data: bytes, head: str, head_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield kind and content of each message, or each attribute of one; ``_ERROR`` for one that is damaged."""
    while len(data) >= head_bytes:
        length, kind = struct.unpack_from(head, data)
        if length < head_bytes:
            yield _ERROR, b""
            return
        yield kind, data[head_bytes:length]
        data = data[(length + 3) & ~3 :]


_OWN_THREADS = ("ZMQbg", "ftmon", "pt_", "gloo_", "NCCL")
"""Threads of the monitor's sockets, of PyTorch's watchdogs and of communication libraries. They poll many times a
second and forward data of other ranks, which is not work of the script."""
_LOADER_WORKER = "pt_data_worker"  # PyTorch's name for a worker's main thread
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(
    pid: int,
    dump: SelfDump | None,
    table: Mapping[int, Process],
    now: float,
    sockets: Mapping[int, int] | None = None,
    others: Iterable[int] = (),
    ranks: Iterable[int] = (),
) -> Activity:
    """Return the totals of the process ``pid`` and its descendants.

    ``dump`` has the ids of its training thread and of the probe's thread; None: unknown, the main thread is used.
    The work of ``others`` counts as this rank's: daemons it started, holders of a lock it waits for. That of ``ranks``
    that it started does not. ``sockets`` is ``by_socket()``; None: read here.
    """
    sockets = by_socket() if sockets is None else sockets
    training = dump.training if dump is not None else pid
    found = _threads(pid, training, dump.receiver if dump is not None else -1)
    further = [table[other] for other in others if other in table and other != pid]
    tree = processes.descendants([pid, *others], dict(table), ranks)
    below = {p.pid: p for p in (*further, *tree) if p.pid != pid}
    reads = [_threads(child, child, -1) for child in below]
    # A data set sleeps between two attempts; an idle worker waits in poll(2), where it wakes up too.
    workers = [child.pid for child in below.values() if child.name == _LOADER_WORKER]
    napping = [worker for worker in workers if "nanosleep" in wchan(worker, worker)]
    living = [child for child in below.values() if child.alive]
    newest = max((child.start_ticks for child in living), default=0)
    return Activity(
        time=now,
        state=found.state,
        wchan=wchan(pid, training),
        cpu_seconds=found.seconds,
        io_bytes=sum(read.io_bytes for read in (found, *reads)),
        on_disk=any(read.on_disk for read in (found, *reads)),
        switches=switches(pid, training),
        below_seconds=sum(read.seconds for read in reads),
        chars=sum(read.chars for read in (found, *reads)),
        traffic=sum(of_process(each, sockets) for each in (pid, *below)),
        processes=1 + len(living),
        newest=newest,
        worker_naps=sum(switches(worker, worker) for worker in napping),
        training_seconds=found.training_seconds,
    )


def wchan(pid: int, thread: int) -> str:
    """Return the kernel function in which a thread waits; empty if it waits in none, or if it is not readable."""
    return proc_text(f"/proc/{pid}/task/{thread}/wchan").strip().strip("0")


def switches(pid: int, thread: int) -> int:
    """Return the context switches of a thread so far; 0 if they are not readable."""
    fields = processes.status(pid, thread)
    return sum(int(fields.get(f"{kind}_ctxt_switches", 0)) for kind in ("voluntary", "nonvoluntary"))


class _Threads(NamedTuple):
    state: str
    seconds: float
    io_bytes: int
    chars: int
    on_disk: bool
    training_seconds: float


def _threads(pid: int, training: int, own: int) -> _Threads:
    """Return the summed work of one process's threads, without those in ``_OWN_THREADS``."""
    state, ticks, own_ticks, moved, chars, waits = "", 0, 0, 0, 0, False
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        threads = []
    for thread in threads:
        folder = f"/proc/{pid}/task/{thread}"
        read = processes.stat_fields(f"{folder}/stat")
        if read is None:
            continue
        name, fields = read
        number = int(thread)
        if number == training:
            state, own_ticks = fields[0], int(fields[11]) + int(fields[12])
        if number == own or name.startswith(_OWN_THREADS):
            continue
        waits = waits or fields[0] == "D"
        ticks += int(fields[11]) + int(fields[12])
        disk, passed = _io(f"{folder}/io")
        moved += disk
        chars += passed
    return _Threads(state, ticks / _TICKS, moved, chars, waits, own_ticks / _TICKS)


def _io(path: str) -> tuple[int, int]:
    """Return a thread's bytes read from and written to disks, and through read(2) and write(2); 0 if not readable."""
    found = dict(line.split(": ") for line in proc_text(path).splitlines() if ": " in line)
    disk = int(found.get("read_bytes", 0)) + int(found.get("write_bytes", 0))
    return disk, int(found.get("rchar", 0)) + int(found.get("wchar", 0))


# The default action of the signal to faulthandler ends a process. It is therefore sent only if the process has the
# known pid and start time, currently catches the signal, and still has the announced file open (``SelfDump``).
#
# faulthandler reads the frames of all threads without the GIL: signal only ranks that ``waiting_for_gil`` has found.
WRITE_SECONDS = 1.0  # Time limit for the handler, from the signal to the last line written
PY_SPY_SECONDS = 20.0
_PAUSE_POLL_SECONDS = 0.005
_POLL_SECONDS = 0.02
_QUIET_LOOKS = 5
"""Looks in a row at a file that did not grow: the handler is done. It may not run between two of its lines."""
_LARGEST = 1 << 20


class DumpTarget(NamedTuple):
    """A rank to signal."""

    rank: int
    pid: int
    start_ticks: int
    dump: SelfDump | None


def by_signal(targets: Iterable[DumpTarget]) -> dict[int, str]:
    """Signal ranks whose native code holds the GIL to write their stacks, and return the stacks.

    Ranks that must not be signalled are omitted. Blocks for up to ``WRITE_SECONDS`` for all of them together; not for
    use in a main loop.
    """
    waiting: dict[int, tuple[Path, int]] = {}
    for target in targets:
        if target.dump is not None and may_signal(target):
            path = Path(target.dump.path)
            size = path.stat().st_size
            if _tgkill(target.pid, target.dump.receiver, target.dump.signal):
                waiting[target.rank] = path, size
    found: dict[int, str] = {}
    unchanged: Counter[int] = Counter()
    deadline = time.monotonic() + WRITE_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        for rank, (path, size) in list(waiting.items()):
            text = _added(path, size)
            # faulthandler writes line by line: it is done when the file stops growing.
            unchanged[rank] = unchanged[rank] + 1 if text and text == found.get(rank) else 0
            if unchanged[rank] == _QUIET_LOOKS:
                del waiting[rank]
            found[rank] = text
    return {rank: text for rank, text in found.items() if text}


def may_signal(target: DumpTarget) -> bool:
    """Return whether the process is the same, catches the signal, and still has the announced file open."""
    dump = target.dump
    process = processes.read(target.pid)
    if dump is None or process is None or process.start_ticks != target.start_ticks or process.state not in "RS":
        return False
    bit = 1 << (dump.signal - 1)
    caught = processes.status(target.pid).get("SigCgt", "0")
    blocked = processes.status(target.pid, dump.receiver).get("SigBlk")
    if not int(caught, 16) & bit or blocked is None or int(blocked, 16) & bit:
        return False
    try:
        return os.path.samefile(f"/proc/{target.pid}/fd/{dump.descriptor}", dump.path)
    except OSError:
        return False


def py_spy() -> str:
    """Return the path of py-spy; empty if it is not installed."""
    return shutil.which("py-spy") or ""


def native(process: Process) -> tuple[str, str]:
    """Return a process's stacks by py-spy, including native frames; or an empty string, and the reason.

    The process is paused meanwhile: the first line of the text has the measured time.
    """
    program = py_spy()
    if not program:
        return "", "py-spy is not installed"
    pause = _Pause(process.pid)
    pause.start()
    try:
        command = [program, "dump", "--native", "--pid", str(process.pid)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PY_SPY_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    finally:
        seconds = pause.end()
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return "", f"py-spy: {last[-1] if last else f'exit status {done.returncode}'}"[:300]
    return f"paused for {seconds:.2f} s\n{done.stdout[:_LARGEST].decode(errors='replace')}", ""


class _Pause(threading.Thread):
    """Measures how long a tracer stops a process, to within two polls."""

    def __init__(self, pid: int) -> None:
        super().__init__(name="pause", daemon=True)
        self._pid = pid
        self._over = threading.Event()
        self._seconds = 0.0

    def run(self) -> None:
        before = time.monotonic()
        while not self._over.wait(_PAUSE_POLL_SECONDS):
            now = time.monotonic()
            found = processes.read(self._pid)
            self._seconds += now - before if found is not None and found.state == "t" else 0.0
            before = now

    def end(self) -> float:
        self._over.set()
        self.join()
        return self._seconds + 2 * _PAUSE_POLL_SECONDS


def _tgkill(pid: int, thread: int, number: int) -> bool:
    libc: Any = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):  # glibc before 2.30
        return libc.tgkill(pid, thread, number) == 0
    return False


def _added(path: Path, size: int) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(size)
        return file.read(_LARGEST).decode(errors="replace")
    return ""


# If a thread runs Python while faulthandler reads its frames, it may follow a frame that no longer exists, and the
# process dies of SIGSEGV. No thread is assumed to run Python if the probe's thread waits
# for the GIL without getting it, and each other thread sleeps or has used enough processor time that it would have
# released the GIL if it ran Python; a garbage collection is native code. A thread in state D, for example on a page
# fault, counts as runnable. The threads are sampled, not stopped, so this is not a proof: ``bench/RESULTS.md`` has the
# error rates on an overloaded host.
_SAMPLES, _SAMPLE_SECONDS = 8, 0.03
_LEAST_WAKEUPS = 2
_LONGEST_SECONDS = 0.045
"""A thread that waits for the GIL wakes up every 5 ms (``sys.getswitchinterval``), so at least ``_LEAST_WAKEUPS`` times
between two samples. A thread that waits for messages sleeps for a tenth of a second, so it wakes up at most once
between two samples that are at most ``_LONGEST_SECONDS`` apart. Samples delayed by an overloaded host prove nothing."""
RANKS_AT_ONCE = 4  # Maximum number of ranks to sample together, because reading the state of 150 threads takes 5 ms
_LEAST_TICKS = 3
"""Processor time, in clock ticks, from the first sample to the last, after which a thread that runs Python would have
released the GIL. A thread in state R or D with less may hold the GIL without getting a processor."""


class Sample(NamedTuple):
    """State of a rank's threads at one moment."""

    begun: float
    ended: float  # ``time.monotonic`` before and after ``wakeups`` was read
    wakeups: int  # Number of waits of the probe's thread so far; 0 if not readable
    threads: dict[int, tuple[str, int]]  # State (proc(5)) and processor time, clock ticks, of every other thread, by id


def waiting_for_gil(targets: Iterable[DumpTarget]) -> set[int]:
    """Return the ranks whose native code holds the GIL. Blocks for a fifth of a second; not for use in a main loop.

    Takes at most ``RANKS_AT_ONCE`` ranks.
    """
    samples: dict[DumpTarget, list[Sample]] = {target: [] for target in targets}
    begun = time.monotonic()
    for number in range(_SAMPLES if samples else 0):
        time.sleep(max(0.0, begun + number * _SAMPLE_SECONDS - time.monotonic()))
        for target, found in samples.items():
            found.append(_sample(target))
    return {target.rank for target, found in samples.items() if is_held_by_native_code(found)}


def is_held_by_native_code(samples: Sequence[Sample]) -> bool:
    """Return whether the probe's thread waited for the GIL in all samples, and no other thread can have run Python."""
    if any(
        after.wakeups - before.wakeups < _LEAST_WAKEUPS or after.ended - before.begun > _LONGEST_SECONDS
        for before, after in pairwise(samples)
    ):
        return False
    first, last = samples[0].threads, samples[-1].threads
    unknown = {thread for sample in samples for thread, (state, _) in sample.threads.items() if state in "RD"}
    return unknown <= first.keys() & last.keys() and all(
        last[thread][1] - first[thread][1] >= _LEAST_TICKS for thread in unknown
    )


def _sample(target: DumpTarget) -> Sample:
    begun = time.monotonic()
    if target.dump is None:
        return Sample(begun, begun, 0, {})
    receiver = target.dump.receiver
    wakeups = int(processes.status(target.pid, receiver).get("voluntary_ctxt_switches", 0))
    ended = time.monotonic()
    threads: dict[int, tuple[str, int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{target.pid}/task"):
            if int(name) == receiver:
                continue
            read = processes.stat_fields(f"/proc/{target.pid}/task/{name}/stat")
            if read is not None:
                threads[int(name)] = read[1][0], int(read[1][11]) + int(read[1][12])
    return Sample(begun, ended, wakeups, threads)


class Inspection(NamedTuple):
    """Results of an inspection, by rank."""

    stacks: dict[int, str]  # Stacks of the silent ranks that wrote them on a signal
    why: dict[int, str]  # Reasons for the silent ranks that did not
    activities: dict[int, Activity]
    locks: dict[int, LockWait] = {}  # noqa: RUF012
    """File locks that ranks of this host wait for, by rank."""
    nccl: dict[int, Calls] = {}  # noqa: RUF012
    """Collectives that ranks have launched by NCCL's count, by rank."""


def inspect_ranks(targets: list[DumpTarget], silent: Collection[int]) -> Inspection:
    """Return the activity of this host's ranks and the stacks of the silent ones. Blocks for seconds."""
    asked = [target for target in targets if target.rank in silent]
    locked: set[int] = set()
    stacks: dict[int, str] = {}
    for first in range(0, len(asked), RANKS_AT_ONCE):
        group = asked[first : first + RANKS_AT_ONCE]
        found = waiting_for_gil(group)
        stacks |= by_signal(target for target in group if target.rank in found)  # at once: it may change
        locked |= found
    why = {target.rank: why_silent(target, target.rank in locked) for target in asked if target.rank not in stacks}
    table = processes.table()
    sockets = by_socket()
    blocked = lock_waiters(table)
    origins = [origin(target.rank, target.pid, table) for target in targets]
    daemons = escaped([one for one in origins if one is not None], table)
    now, ranks = time.monotonic(), {target.pid for target in targets}
    activities: dict[int, Activity] = {}
    locks: dict[int, LockWait] = {}
    for target in targets:
        process = table.get(target.pid)
        if process is None or process.start_ticks != target.start_ticks or not process.alive:
            continue
        lock = blocked.get(target.pid)
        holder = table.get(lock.holder) if lock is not None else None
        if lock is not None:
            words = f"pid {lock.holder} ({sanitize(holder.name, 40)})" if holder is not None else ""
            locks[target.rank] = LockWait(lock.path, holder=words)
        others = [daemon.pid for daemon in daemons.get(target.rank, [])]
        others += [holder.pid] if holder is not None else []
        activities[target.rank] = measure(target.pid, target.dump, table, now, sockets, others, ranks)
    return Inspection(stacks, why, activities, locks)


def answer_look(look: control.Look) -> dict[str, Any]:
    """Inspect ranks of this host; return the data of the answer."""
    seen = inspect_ranks([DumpTarget(*target) for target in look.targets], look.silent)
    texts = {"stacks": seen.stacks, "why": seen.why}
    data: dict[str, Any] = {name: {str(rank): text for rank, text in by.items()} for name, by in texts.items()}
    return data | {"activities": {str(rank): list(found) for rank, found in seen.activities.items()}}


def why_silent(target: DumpTarget, is_locked: bool) -> str:
    """Return why a rank's stacks could not be captured, judged from its process."""
    process = processes.read(target.pid)
    if process is None or process.start_ticks != target.start_ticks or not process.alive:
        return "its process is gone"
    if process.state == "t":
        return "its process is stopped by a debugger; continue it there, or detach"
    if process.state == "T":
        return f"its process is stopped by a signal; 'kill -CONT {target.pid}' lets it go on"
    if process.state == "D":
        return f"its process is {kernel_sleep(wchan(target.pid, target.pid))}: the kernel has to return first"
    if is_locked:
        return "no answer: native code holds Python's lock, and a signal could not be used"
    return "no answer, though its probe does not wait for Python's lock: its host may be busy, or was cut off"
