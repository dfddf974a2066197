"""Observes ranks without a probe: their stacks by py-spy, read from their memory without a pause, and their progress.

py-spy's ``--nonblocking`` reads the interpreter's structures while the process runs (process_vm_readv(2)). A stack
read while it changes may be inconsistent: py-spy then fails, or shows a place that the thread has left, which is
progress as well. The stack of a thread that stands is exact.

A rank has moved if its stack differs from the one before, or if its training thread has gone to sleep since the last
look (voluntary context switches). The latter does not count once ``SAME_STACKS`` stacks in a row were equal: a loop
that waits for a file, or for a lock of ``filelock``, wakes up regularly. A wait for other ranks does neither: gloo's
sleeps, NCCL's spins.
"""

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from ....protocol.analysis.stalls import evidence
from ....protocol.analysis.stalls.evidence import NOWHERE, Frame, Place
from ....protocol.host.process import proc_text
from .. import processes
from . import inspect
from .inspect import DumpTarget

STACKS_SECONDS = 5.0  # Interval at which the stack of a rank that moves is read
SAME_STACKS = 3
_READ_SECONDS = 5.0
_READ_AT_ONCE = 4
_PAGE = 4096
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
INSTALL = "py-spy is not installed here: pip install 'ftmon[watch]'"


class Observed(NamedTuple):
    """One look at a rank."""

    rank: int
    progress: int  # Number of looks at which it had moved
    place: Place
    phase: str
    since: float  # Start of the phase, seconds since the epoch: when it was first seen
    resident: int  # Bytes


@dataclass
class _Rank:
    key: tuple[int, int]
    progress: int = 0
    voluntary: int = -1
    switches: int = -1  # Of the training thread when its stack was read
    frames: tuple[Frame, ...] = ()
    text: str = ""
    why: str = ""
    read_at: float = float("-inf")
    same: int = 0  # Equal stacks in a row
    phase: str = "init"
    since: float = 0.0


class Observer:
    """Observes ranks of this host. Its methods block; any thread."""

    def __init__(self, read: Callable[[int], tuple[str, str]] | None = None) -> None:
        self._read = read or read_stacks
        self._lock = threading.Lock()
        self._ranks: dict[int, _Rank] = {}

    def look(self, targets: Iterable[DumpTarget]) -> list[Observed]:
        """Look at ranks; read the stacks of those that stand at a place not read yet, and of all now and then."""
        with self._lock:
            living = [(target, rank) for target in targets if (rank := self._of(target)) is not None]
            now = time.monotonic()
            due = [each for each in living if self._is_due(each[0].pid, each[1], now)]
            self._read_all(due)
            return [self._observe(target, rank) for target, rank in living]

    def stacks(self, targets: Iterable[DumpTarget]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the ranks' stacks as faulthandler writes them, or the reasons why there are none, by rank."""
        with self._lock:
            living = [(target, rank) for target in targets if (rank := self._of(target)) is not None]
            self._read_all([each for each in living if not each[1].text or self._has_run(each[0].pid, each[1])])
            texts = {target.rank: rank.text for target, rank in living if rank.text}
            return texts, {target.rank: rank.why for target, rank in living if not rank.text}

    def forgive(self) -> None:
        """Do not count what the ranks' threads did until now as progress: they were paused to be read."""
        with self._lock:
            for rank in self._ranks.values():
                rank.voluntary = -1

    def _of(self, target: DumpTarget) -> _Rank | None:
        process = processes.read(target.pid)
        if process is None or process.start_ticks != target.start_ticks or not process.alive:
            return None
        key = (target.pid, target.start_ticks)
        known = self._ranks.get(target.rank)
        if known is None or known.key != key:
            known = self._ranks[target.rank] = _Rank(key, since=time.time())
        return known

    def _has_run(self, pid: int, rank: _Rank) -> bool:
        sleeps = processes.status(pid, pid).get("State", "").startswith(("S", "D"))
        return not sleeps or inspect.switches(pid, pid) != rank.switches

    def _is_due(self, pid: int, rank: _Rank, now: float) -> bool:
        if now - rank.read_at >= STACKS_SECONDS:
            return not rank.text or self._has_run(pid, rank)
        return _voluntary(pid) == rank.voluntary and self._has_run(pid, rank)

    def _read_all(self, due: list[tuple[DumpTarget, _Rank]]) -> None:
        if not due:
            return
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            list(pool.map(lambda each: self._read_one(*each), due))

    def _read_one(self, target: DumpTarget, rank: _Rank) -> None:
        switches = inspect.switches(target.pid, target.pid)
        text, rank.why = self._read(target.pid)
        rank.read_at = time.monotonic()
        rank.text, rank.switches = text or rank.text, switches if text else -1
        if not text:
            return
        thread = evidence.training_thread(evidence.parse(text))
        frames = thread.frames if thread is not None else ()
        rank.same = rank.same + 1 if frames == rank.frames else 0
        rank.progress += frames != rank.frames
        rank.frames = frames

    def _observe(self, target: DumpTarget, rank: _Rank) -> Observed:
        voluntary = _voluntary(target.pid)
        if rank.voluntary >= 0 and rank.same < SAME_STACKS:
            rank.progress += voluntary != rank.voluntary
        rank.voluntary = voluntary
        place = evidence.where(rank.frames) if rank.frames else NOWHERE
        phase = phase_of(rank.frames, place)
        if phase != rank.phase:
            rank.phase, rank.since = phase, time.time()
        resident = int((proc_text(f"/proc/{target.pid}/statm").split() or ["0"] * 2)[1]) * _PAGE
        return Observed(target.rank, rank.progress, place, phase, rank.since, resident)


def phase_of(frames: Iterable[Frame], place: Place) -> str:
    """Return the phase of a training thread, from its stack."""
    if (place.for_all and "save" in place.call) or place.doing == "saving":
        return "checkpoint"
    if place.call in ("evaluate", "predict"):
        return "eval"
    if place.doing in ("data", "backward"):
        return place.doing
    for frame in frames:
        if "/torch/optim/" in frame.file and frame.function.endswith("step"):
            return "optimizer"
        if frame.function.endswith("backward"):
            return "backward"
        if frame.file.endswith("/torch/nn/modules/module.py") and frame.function.endswith("_call_impl"):
            return "forward"
        if frame.file.startswith("<frozen importlib"):
            return "init"
    return "idle"


def read_stacks(pid: int) -> tuple[str, str]:
    """Return the Python stacks of a process, as faulthandler writes them, or an empty text and the reason.

    The process is not paused.
    """
    program = inspect.py_spy()
    if not program:
        return "", INSTALL
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_READ_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"py-spy: {error}"
    try:
        return as_faulthandler(json.loads(done.stdout), pid), ""
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return "", f"py-spy: {last}"[:300]


def as_faulthandler(threads: list[dict[str, Any]], pid: int) -> str:
    """Return py-spy's JSON in the form of faulthandler: the main thread last, frames innermost first."""
    parts: list[str] = []
    for thread in sorted(threads, key=lambda each: each["os_thread_id"] == pid):
        parts.append(f"Thread 0x{thread['thread_id']:016x} (most recent call first):")
        for frame in thread["frames"]:
            function = str(frame["name"]).rpartition(".")[2]  # of Tensor.backward, faulthandler writes backward
            parts.append(f'  File "{frame["filename"]}", line {frame["line"]} in {function}')
        parts.append("")
    return "\n".join(parts)


def why_no_stacks(pid: int) -> str:
    """Return why a process's stacks cannot be read; empty if they can."""
    text, why = read_stacks(pid)
    if text:
        return ""
    if inspect.py_spy() and proc_text(_YAMA).strip() not in ("", "0"):
        return f"the kernel lets no process read another's memory (kernel.yama.ptrace_scope); with sudo it does ({why})"
    return why


def _voluntary(pid: int) -> int:
    return int(processes.status(pid, pid).get("voluntary_ctxt_switches", 0))
