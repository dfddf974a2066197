"""Evidence of a rank about a stall: its collectives, its stacks from outside, locks and sleeps that it waits for.

Read only when a stall is suspected. The loops of the script that a thread is in, from its source, show which rank has
left the training loop.

A rank that waits for a dataloader worker stands in the loader; the fault is in the worker, a fork of the rank. It keeps
a file in memory, and writes the stack of its main thread there when it gets ``SIGNAL``; Python runs the handler between
two instructions, or in an interrupted wait. The rank's publisher sends the signal, only to children that catch it and
have that file, and reads the file in ``/proc``.
"""

import ast
import contextlib
import faulthandler
import json
import math
import os
import platform
import queue
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ....protocol.code_owner import library_of
from ....protocol.messages.telemetry import SelfDump
from ...host import processes
from .. import guard
from ..guard import frame_locals
from ..phases.tracker import Counts

KEPT = 64
READ_SECONDS = 0.25
"""The recorder asks the device whether events have passed. If the driver does not answer, the wait ends after this:
the hub waits half a second for a rank (``hub.stall_probe``), and its other evidence must arrive within that."""

_reader: threading.Thread | None = None
_RAS_ADDRESS = "localhost:28028"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def calls(counts: Counts) -> dict[str, Any]:
    """Return the collectives that were entered, as plain data for a message.

    PyTorch's flight recorder has all of them, including those that DDP issues from C++, and their completion. If it has
    none (it is off, or does not support gloo), the probe's own count of calls is used.

    Returns:
        ``source``: ``recorder`` or ``calls``; ``counted``: the probe's count of each group; ``ranks``: the
        global ranks of each process group, by its name; ``recent``: (group, number within the group, name, elements,
        done) of the last collectives, oldest first, where done is None when it is not known.
    """
    recorded = _in_time()
    recent = recorded or _newest([[group, number, name, size, None] for group, number, name, size in _copy(counts)])
    source = "recorder" if recorded else "calls"
    return {"source": source, "counted": dict(counts.groups), "ranks": members(), "recent": recent}


def members() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this rank, by PyTorch's name for the group."""
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if core is None:
        return {}
    try:
        ranks = core._world.pg_group_ranks
        return {str(name): sorted(ranks.get(group, ())) for group, name in list(core._world.pg_names.items())}
    except Exception:  # a group made or destroyed at this moment, or names that another version does not have
        return {}


def ras_address() -> str:
    """Return where NCCL's RAS service of this process answers (``NCCL_RAS_ADDR``); empty if it does not use NCCL."""
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if core is None or os.environ.get("NCCL_RAS_ENABLE") == "0":
        return ""
    try:
        backends = [str(found[0]) for found in list(core._world.pg_map.values())]
    except Exception:  # names that another version does not have
        return ""
    return os.environ.get("NCCL_RAS_ADDR", _RAS_ADDRESS) if any("nccl" in name for name in backends) else ""


def parse(trace: bytes | str) -> list[list[Any]]:
    """Read the flight recorder's JSON: collectives only, see ``calls``."""
    found: list[list[Any]] = []
    for entry in json.loads(trace).get("entries", []):
        number = int(entry.get("collective_seq_id") or 0)
        if entry.get("is_p2p") or not number:
            continue
        name = str(entry.get("profiling_name", "")).rpartition(":")[2].lstrip("_")
        sizes = entry.get("input_sizes") or []
        size = math.prod(map(int, sizes[0])) if len(sizes) == 1 else 0
        # gloo's entries stay "scheduled" for good; "retired" is valid for both.
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        group: Any = entry.get("process_group") or [""]
        call = [str(group[0]), number, name, size, done]
        if found and found[-1][:2] == call[:2]:
            continue  # one coalesced collective has an entry for each of its tensors
        found.append(call)
    return _newest(found)


def _in_time() -> list[list[Any]]:
    global _reader
    found: list[list[Any]] = []

    def read() -> None:
        try:
            found.extend(_read())
        except Exception:
            found.clear()

    if _reader is not None and _reader.is_alive():
        return []  # the previous read still waits for the driver
    _reader = threading.Thread(target=read, name="ftmon-flight", daemon=True)
    _reader.start()
    _reader.join(READ_SECONDS)
    return [] if _reader.is_alive() else found


def _read() -> list[list[Any]]:
    core: Any = sys.modules.get("torch._C._distributed_c10d") or getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None
    )
    for name in _DUMPS:
        dump: Any = getattr(core, name, None)
        if dump is not None:
            recorded = parse(dump())
            if recorded:
                return recorded
    return []


def _copy(counts: Counts) -> list[tuple[str, int, str, int]]:
    for _ in range(3):
        try:
            return list(counts.recent)
        except RuntimeError:  # the training thread has added one meanwhile
            continue
    return []


def _newest(found: list[list[Any]]) -> list[list[Any]]:
    left: dict[str, int] = {}
    kept: list[list[Any]] = []
    for call in reversed(found):
        left[call[0]] = left.get(call[0], 0) + 1
        if left[call[0]] <= KEPT:
            kept.append(call)
    return kept[::-1]


_FIRST, _LAST = 9, 24  # Offsets from SIGRTMIN. Some libraries use the lowest.


class Dumper:
    """Lets other processes capture this rank's stacks while native code holds Python's lock; for the publisher.

    faulthandler can write all stacks from within a signal handler, without the lock. Its handler is registered for a
    real-time signal that no library uses. The signal is sent to the publisher's thread alone, so it interrupts no
    system call of the script. A sender first checks that the process still catches the signal and that the file is
    still open (``SelfDump``): by default such a signal ends the process.
    """

    def __init__(self, path: Path, training: int) -> None:
        self._path, self._training = path, training
        self._descriptor, self._signal = -1, 0
        self._given_up = False
        self.prepared: SelfDump | None = None
        """Signal and file for capturing the stacks from outside; None before registration, or if that failed."""

    def install(self, training: int) -> SelfDump | None:
        """Register the handler, again if the script has replaced it; None if that fails."""
        self.prepared = self._install(training)
        return self.prepared

    def _install(self, training: int) -> SelfDump | None:
        self._training = training
        if self._given_up:
            return None
        try:
            if self._descriptor < 0:
                # Append: the hub reads the added bytes, and a restarted rank does not overwrite the file.
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            if not self._signal:
                number = _free_signal()
                faulthandler.register(number, file=self._descriptor, all_threads=True, chain=False)
                self._signal = number
        except (OSError, ValueError, RuntimeError, AttributeError) as error:
            self._given_up = True
            guard.log_error("stacks cannot be had from outside", error)
            return None
        # The main thread's is the process's: Python 3.11 keeps the parent's in a forked one.
        others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
        native = next((thread.native_id for thread in others if thread.ident == training), None)
        return SelfDump(
            signal=self._signal,
            receiver=threading.get_native_id(),
            descriptor=self._descriptor,
            path=str(self._path),
            thread=f"0x{training:016x}",
            training=native or os.getpid(),
        )

    def lost(self, training: int) -> bool:
        """Return whether the result of ``install`` is out of date, so that it must be called and sent again.

        The script may have registered its own handler for the signal, or train in another thread.
        """
        if self._signal and signal.getsignal(self._signal) is not signal.SIG_DFL:
            # Not unregistered: that would restore the handler before faulthandler's, over the script's own.
            self._signal = 0
            return not self._given_up
        return training != self._training


def _free_signal() -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for number in range(signal.SIGRTMIN + _FIRST, min(signal.SIGRTMIN + _LAST, signal.SIGRTMAX)):
        if signal.getsignal(number) is signal.SIG_DFL and number not in blocked and not _is_caught(number):
            return number
    raise OSError("every real-time signal is taken")


def _is_caught(number: int, pid: int | str = "self") -> bool:
    """Return whether a process has a handler for a signal, be it of native code and unknown to Python."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name in ("SigCgt", "SigIgn") and int(mask, 16) >> (number - 1) & 1:
            return True
    return False


COMPILERS = frozenset(
    (
        *("ninja", "nvcc", "cicc", "ptxas", "fatbinary", "cc1plus", "cc1", "hipcc", "icpx"),
        *("c++", "g++", "gcc", "cc", "clang", "clang++", "ld", "ld.lld", "collect2", "as", "make", "cmake"),
    )
)
_FRAMES = 64


def waits_for(thread: int) -> dict[str, Any]:
    """Return the lock file of PyTorch's extension builds or of ``filelock`` that a thread waits for, as plain data.

    Returns:
        Empty if it waits for none. ``path``; ``build``: whether it is the lock of a build, and then ``compiler``:
        whether a compiler runs in its folder on this host, and ``idle_s``: seconds since the last change of another
        file there.
    """
    for frame in _frames(thread, _FRAMES):
        path, build = _lock_of(frame)
        if path:
            return {"path": path, "build": build, **(_builder(path) if build else {})}
    return {}


def _frames(thread: int, most: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None and most:
        yield frame
        frame, most = frame.f_back, most - 1


def _lock_of(frame: FrameType) -> tuple[str, bool]:
    file, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
    if file.endswith("/torch/utils/file_baton.py") and name == "wait":
        return str(getattr(frame.f_locals.get("self"), "lock_file_path", "")), True
    if "/filelock/" in file and name == "acquire":
        return str(getattr(frame.f_locals.get("self"), "lock_file", "")), False
    return "", False


def _works_in(pid: int, folder: str) -> bool:
    """Return whether a compiler may build there: PyTorch starts them in the build's own folder."""
    try:
        return os.path.samefile(f"/proc/{pid}/cwd", folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's: its folder may not be read


def _builder(path: str) -> dict[str, Any]:
    table = processes.table()
    compiler = any(p.alive and p.name in COMPILERS and _works_in(p.pid, os.path.dirname(path)) for p in table.values())
    newest = 0.0
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(path)) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime)
    return {"compiler": compiler, "idle_s": max(0.0, time.time() - newest) if newest else 0.0}


_FILES = frozenset((threading.__file__, queue.__file__))
_CALLS = {"x86_64": (230, 202), "aarch64": (115, 98)}  # clock_nanosleep(2), futex(2)
_ABSOLUTE = 1  # TIMER_ABSTIME of clock_nanosleep(2)
_WAIT_BITSET, _OF_COMMAND, _REAL_TIME = 9, 0x7F, 256
"""FUTEX_WAIT_BITSET, whose deadline is absolute; the bits of the command; FUTEX_CLOCK_REALTIME."""
_LOADER_WORKER = "pt_data_worker"  # PyTorch's name for the process


def waits_for_a_time(thread: int) -> bool:
    """Return whether a thread is in a wait of the standard library with a time limit, by its innermost frames."""
    for frame in _frames(thread, _FRAMES):
        if frame.f_code.co_filename not in _FILES:
            break
        # Condition.wait, Event.wait, Thread.join, Barrier.wait, Queue.get; a Semaphore's is in Condition.wait.
        limit = frame_locals(frame).get("timeout")
        if isinstance(limit, float | int) and limit > 0:
            return True
    return False


def seconds_until_awake(pid: int, thread: int) -> float | None:
    """Return the seconds until a thread's sleep ends by itself; None: it is not asleep for a set time, or unknown.

    /proc/PID/task/TID/syscall has the arguments of a thread's system call, among them the address of the deadline
    (clock_nanosleep(2), futex(2); both absolute, as glibc and Python 3.11 use them). A rank may read its own threads
    and its children's, also where Yama forbids others to (``ptrace_scope=1``). Known on x86-64 and arm64.
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
    found = (seconds_until_awake(child, child) for child in _workers(pid))
    return min((seconds for seconds in found if seconds is not None), default=None)


SIGNAL = signal.SIGRTMAX - 9  # A real-time signal that no library of this field uses
_WORKER_FILE = "ftmon-worker"
_WORKER_SECONDS = 0.1  # A worker that has not answered after this is in native code
_MOST_WORKERS = 8


def answer_signals() -> None:
    """Make this process, a fork of a rank, write its stack on ``SIGNAL``; nothing if it uses the signal itself."""
    with contextlib.suppress(OSError, ValueError):
        if signal.getsignal(SIGNAL) is signal.SIG_DFL:
            file = os.memfd_create(_WORKER_FILE)
            signal.signal(SIGNAL, lambda _, frame: _write_stack(file, frame))


def _write_stack(file: int, frame: FrameType | None) -> None:
    found = traceback.extract_stack(frame)
    lines = [f'  File "{each.filename}", line {each.lineno} in {each.name}' for each in reversed(found)]
    os.pwrite(file, "\n".join(lines).encode(errors="replace"), 0)


def stacks_of_workers(pid: int) -> str:
    """Return the stacks of a process's dataloader workers as ``faulthandler`` writes them; empty: none answered."""
    files = {child: file for child in list(_workers(pid))[:_MOST_WORKERS] if (file := _file_of(child)) is not None}
    for child in files:
        with contextlib.suppress(OSError):
            os.kill(child, SIGNAL)
    deadline = time.monotonic() + _WORKER_SECONDS
    found: dict[int, str] = {}
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(0.005)
        for child, file in files.items():
            with contextlib.suppress(OSError):
                if child not in found and (text := file.read_text(errors="replace")):
                    found[child] = text
    return "".join(f"\nThread 0x{child:016x} [{_LOADER_WORKER} {child}]:\n{text}\n" for child, text in found.items())


def _workers(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                if Path(f"/proc/{child}/comm").read_text().strip() == _LOADER_WORKER:
                    yield child


def _file_of(child: int) -> Path | None:
    """Return the file of a worker that answers the signal."""
    with contextlib.suppress(OSError, StopIteration):
        if _is_caught(SIGNAL, child):
            files = Path(f"/proc/{child}/fd").iterdir()
            return next(file for file in files if f"memfd:{_WORKER_FILE}" in os.readlink(file))
    return None


_DEEPEST = 200
SOURCE_LOOPS_READ_SECONDS = 0.2  # Wait for a source: its disk may be what the rank hangs on, and the stacks must arrive
_Loops = tuple[tuple[int, int], ...]
_source_loops_read: dict[str, "_Loops | None"] = {}
"""First and last line of every loop of a file; None: it is being read, or cannot be read."""


def around(thread: int) -> dict[str, list[tuple[int, int]]]:
    """Return the loops around each line of the script on a thread's stack: first and last line, innermost first.

    The key is the file and the line, as ``Frame.key``. Lines outside any loop have an empty list; those of libraries,
    and of files that cannot be read, are left out.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for frame in _frames(thread, _DEEPEST):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not library_of(file) and (loops := _loops(file)) is not None:
            inside = [loop for loop in loops if loop[0] <= line <= loop[1]]
            found[f"{file}:{line}"] = sorted(inside, key=lambda loop: loop[1] - loop[0])
    return found


def _loops(file: str) -> _Loops | None:
    """Return first and last line of every loop of a file; None if it cannot be read in time."""
    if file not in _source_loops_read:
        _source_loops_read[file] = None
        reader = threading.Thread(target=_parse, args=(file,), name="ftmon-source", daemon=True)
        reader.start()
        reader.join(SOURCE_LOOPS_READ_SECONDS)
    return _source_loops_read[file]


def _parse(file: str) -> None:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor))
    _source_loops_read[file] = tuple((node.lineno, node.body[-1].end_lineno or node.lineno) for node in loops)
