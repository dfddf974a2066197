"""Holds a rank at an out-of-memory error, with a Python console in the frame of the failed allocation.

The failing thread waits, and runs the console's code meanwhile, so that CUDA's device and stream are those of the
failure. The wait releases the interpreter's lock, so the publisher goes on: heartbeats, commands, logs.
"""

import ast
import ctypes
import gc
import io
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple, TextIO

import torch

from ....protocol.code_owner import library_of
from ....protocol.run.rundir import RunOptions
from ....protocol.text import duration, gib
from .. import guard
from ..memory.composition import Storages
from ..memory.snapshots import Answer


class _Row(NamedTuple):
    bytes: int
    shape: str
    dtype: str
    device: str
    names: list[str]


class TensorTable(NamedTuple):
    """The largest tensors by size, and the bytes and number of all storages; prints as a table."""

    rows: list[_Row]
    total: int
    storages: int
    allocated: int

    def __repr__(self) -> str:
        lines = [
            f"{gib(row.bytes):>12}  {row.shape:<20} {row.dtype:<10} {row.device:<8} {', '.join(row.names)}".rstrip()
            for row in self.rows
        ]
        lines.append(f"{gib(self.total):>12}  in {self.storages:,} storages that Python knows")
        rest = self.allocated - self.total
        if rest > 0:
            lines.append(f"{gib(rest):>12}  held by autograd's graph or native code, out of Python's sight")
        return "\n".join(lines)


def find_tensors(frames: Sequence[FrameType], device: Any, most: int, allocated: int) -> TensorTable:
    """Find the largest tensors on a device; each storage counts once."""
    named, storages = _names(frames), Storages((device.index or 0) if device.type == "cuda" else None)
    found: dict[int, tuple[int, Any, list[str]]] = {}
    for value in gc.get_objects():
        place = storages.place(value) if issubclass(type(value), torch.Tensor) else None
        if place is None:  # also the fake tensors of torch.compile, which use no memory
            continue
        address, size = place
        names = named.get(id(value), [])
        known = found.get(address)
        if known is None:
            found[address] = (size, value, list(names))
        else:
            known[2].extend(name for name in names if name not in known[2])
    order = sorted(found.values(), key=lambda entry: -entry[0])
    rows = [
        _Row(size, str(tuple(value.shape)), str(value.dtype).removeprefix("torch."), str(value.device), names[:4])
        for size, value, names in order[:most]
    ]
    return TensorTable(rows, sum(entry[0] for entry in order), len(order), allocated)


def _names(frames: Sequence[FrameType]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    modules: list[tuple[str, Any]] = []
    for frame in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            if issubclass(type(value), torch.Tensor):
                found.setdefault(id(value), []).append(f"{name} ({frame.f_code.co_name})")
            elif issubclass(type(value), torch.nn.Module) and all(value is not module for _, module in modules):
                modules.append((name, value))
    for owner, module in reversed(modules):
        for name, value in module.named_parameters():
            if id(value) not in found:
                found[id(value)] = [f"{owner}.{name}"]
            if value.grad is not None:
                found.setdefault(id(value.grad), [f"{owner}.{name}.grad"])
    return found


OUTPUT_LIMIT = 64 * 1024
_CUT = "\n... (cut)"

HELP = """\
frame             where this console is; up() and down() move along the stack, own() goes to your own innermost code
tensors(n=20)     the largest live tensors that Python knows, with their names in the frames
memory()          what is allocated, reserved, free, and the largest free piece
free('name')      set a name of this frame to None, in every frame that has that object, and say what that freed;
                  storage=True empties the tensor's storage under whoever else holds it
retry()           try the failed allocation again, and say whether it fits now (nothing is kept)
Any other Python runs in the frame: an expression is shown, names that are assigned stay in it."""


class Console:
    """Runs code in frames; for the frames' own thread, or a thread that works for it."""

    def __init__(self, frames: list[FrameType], requested: int, device: Any) -> None:
        self._frames, self._requested, self._device = frames, requested, device
        self._at = len(frames) - 1
        self._running: list[dict[str, Any]] = []  # Namespaces of running code, which keep their values alive

    @property
    def place(self) -> str:
        """The console's present frame, as ``model.py:40 forward``."""
        if not self._frames:
            return "no Python frame"
        frame = self._frames[self._at]
        return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"

    def run(self, text: str) -> tuple[str, str]:
        """Run code in the present frame; return its output and value, and the error in one line (or empty)."""
        output = _Output()
        failed = ""
        with output:
            try:
                self._execute(text, output)
            except KeyboardInterrupt:
                failed = "interrupted"
            except BaseException as error:
                failed = f"{type(error).__name__}: {error}"[:2000]
                lines = traceback.format_exception(error)
                start = next((n for n, line in enumerate(lines) if "<console>" in line), 1)
                output.write("".join(lines[start:]))
                error.__traceback__ = None  # it would keep tensors of the failed code alive
        return output.text(), failed

    def _execute(self, text: str, output: "_Output") -> None:
        tree = ast.parse(text, "<console>")
        last: CodeType | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = compile(ast.Expression(tree.body.pop().value), "<console>", "eval")  # type: ignore[attr-defined]
        code = compile(tree, "<console>", "exec")
        frame = self._frames[self._at] if self._frames else None
        local: Any = frame.f_locals if frame is not None else {}
        # One dictionary for globals and locals, so that functions and comprehensions in the code see the frame's names.
        helpers = self._helpers()
        names: dict[str, Any] = {**(frame.f_globals if frame is not None else {}), **helpers, **local}
        before = dict(names)
        self._running = [names, before]
        try:
            exec(code, names)
            if last is not None:
                value = eval(last, names)
                if value is not None:
                    output.write(f"{value!r}\n")
                del value
        finally:
            for name, value in names.items():
                if name != "__builtins__" and (name not in before or before[name] is not value):
                    local[name] = value
            for name in [name for name in before if name not in names and name in local]:
                local[name] = None
            names.clear()
            before.clear()
            self._running = []
            if frame is not None:
                _write_back(frame)

    def _helpers(self) -> dict[str, Any]:
        names = ("up", "down", "own", "tensors", "memory", "retry", "free")
        functions = {name: getattr(self, f"_{name}") for name in names}
        return {"frame": self.place, **functions, "help": lambda: print(HELP)}

    def _up(self, count: int = 1) -> None:
        self._at = min(max(0, self._at - count), len(self._frames) - 1)
        print(self.place)

    def _down(self, count: int = 1) -> None:
        self._up(-count)

    def _own(self) -> None:
        own = [at for at, frame in enumerate(self._frames) if not library_of(frame.f_code.co_filename)]
        self._at = own[-1] if own else self._at
        print(self.place)

    def _tensors(self, most: int = 20) -> TensorTable:
        return find_tensors(self._frames, self._device, most, self._allocated())

    def _allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) if self._device.type == "cuda" else 0

    def _memory(self) -> None:
        if self._device.type != "cuda":
            from ....protocol.host.machine import available_memory, memory_limit

            print(f"host: {gib(available_memory())} of {gib(memory_limit())} available; {gib(self._requested)} failed")
            return
        free, total = torch.cuda.mem_get_info(self._device)
        core: Any = torch._C
        index = self._device.index or 0
        blocks = [
            block["size"]
            for segment in core._cuda_memorySnapshot(None)["segments"]
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
        print(
            f"allocated {gib(self._allocated())}, reserved {gib(torch.cuda.memory_reserved(self._device))}, of it free "
            f"{gib(sum(blocks))} in {len(blocks):,} pieces, the largest {gib(max(blocks, default=0))}; the device has "
            f"{gib(free)} of {gib(total)} free; {gib(self._requested)} failed"
        )

    def _retry(self) -> None:
        try:
            found = torch.empty(max(1, self._requested), dtype=torch.uint8, device=self._device)
        except (RuntimeError, MemoryError) as error:
            print(f"still does not fit: {str(error).splitlines()[0][:300]}")
            return
        del found
        print(f"{gib(self._requested)} fit now (and were given back)")

    def _free(self, name: str, storage: bool = False) -> None:
        frame = self._frames[self._at]
        place: Any = frame.f_locals if name in frame.f_locals else frame.f_globals
        if name not in place:
            raise NameError(f"this frame has no name {name!r}; tensors() lists names with their frames")
        before = self._allocated()
        found = place[name]
        size = 0
        if storage:
            size = found.untyped_storage().nbytes()
            found.untyped_storage().resize_(0)
        place[name] = None
        _write_back(frame)
        for other in self._frames:  # callers often keep references to their arguments
            names: Any = other.f_locals
            same = [known for known, value in list(names.items()) if value is found]
            for known in same:
                names[known] = None
            if same:
                _write_back(other)
        for names in self._running:
            for known in [known for known, value in names.items() if value is found]:
                names[known] = None
        del found, place
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            freed = before - self._allocated()
            nothing = "nothing was freed: another reference holds it (autograd, a list)"
            print(f"freed {gib(freed)}" if freed > 0 else nothing)
        else:
            print(f"freed {gib(size)}" if storage else f"{name} is None now")


def _write_back(frame: FrameType) -> None:
    """Make values written to ``f_locals`` the frame's own variables; Python 3.13 does so by itself (PEP 667)."""
    if sys.version_info < (3, 13):
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


class _Output(io.TextIOBase):
    """Captures this thread's output, up to a limit; other threads print as before."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._room = OUTPUT_LIMIT
        self._thread = get_ident()
        self._before: list[TextIO] = []

    def __enter__(self) -> "_Output":
        self._before = [sys.stdout, sys.stderr]
        sys.stdout = sys.stderr = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self._before

    def write(self, text: str) -> int:
        if get_ident() != self._thread:
            return self._before[0].write(text)
        if self._room > 0:
            self._parts.append(text[: self._room] + (_CUT if len(text) > self._room else ""))
            self._room -= len(text)
        return len(text)

    def text(self) -> str:
        return "".join(self._parts)


_RELEASED = "console: the rank was released"
_Job = tuple[str, Answer]


class Hold:
    """The rank's hold. ``wait`` is for the failing thread, the rest for the publisher."""

    def __init__(self, options: RunOptions) -> None:
        self.wanted = options.on_oom == "hold"
        self.console_allowed = self.wanted and options.allow_console
        self.seconds = max(0.0, options.hold_timeout)  # The hold ends by itself after this long; 0: never
        self.since = 0.0  # Time at which the hold began, seconds since the epoch; 0: the rank is not held
        self._thread = 0
        self._busy = self._leaving = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._answers: deque[tuple[Answer, bool, str, dict[str, Any]]] = deque()
        self._entering = threading.Lock()
        self._lock = threading.Lock()

    @property
    def here(self) -> bool:
        """Whether the calling thread is the held one, so that its allocations are the console's."""
        return bool(self.since) and self._thread == get_ident()

    def wait(self, frames: list[FrameType], requested: int, device: Any) -> None:
        """Wait in the failing frame until released, interrupted or timed out; one thread at a time."""
        if not self.wanted or not self._entering.acquire(blocking=False):
            return
        try:
            console = Console(frames, requested, device) if self.console_allowed else None
            self._jobs = queue.SimpleQueue()
            self._thread = get_ident()
            self._leaving = False
            self.since = time.time()
            self._serve(console)
        except KeyboardInterrupt:
            if not self._leaving:
                raise
        finally:
            self.since, self._thread, self._busy = 0.0, 0, False
            while not self._jobs.empty():
                job = self._jobs.get()
                if job is not None:
                    self._answers.append((job[1], False, _RELEASED, {}))
            frames.clear()
            self._entering.release()

    def _serve(self, console: Console | None) -> None:
        deadline = time.monotonic() + self.seconds if self.seconds else None
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, deadline - time.monotonic()) if deadline else None)
            except queue.Empty:
                guard.log(f"held for {duration(self.seconds)} (--hold-timeout): released")
                return
            if job is None or console is None:
                return
            code, answer = job
            with self._lock:
                if self._leaving:
                    self._answers.append((answer, False, _RELEASED, {}))
                    return
                self._busy = True
            try:
                output, failed = console.run(code)
            except KeyboardInterrupt:
                output, failed = "", "interrupted"
            with self._lock:
                self._busy = False
            self._answers.append((answer, True, "", {"output": output, "error": failed, "place": console.place}))

    def run(self, code: str, answer: Answer) -> str:
        """Run ``code`` in the held thread; return the refusal, or an empty string."""
        if not self.console_allowed:
            return "console: this run was not started with --on-oom hold --allow-console"
        if not self.since:
            return "console: this rank is not held"
        if self._busy or not self._jobs.empty():
            return "console: what was asked before is still running; 'ftmon release' interrupts it"
        self._jobs.put((code, answer))
        return ""

    def release(self) -> bool:
        """Release the rank, interrupting running code of a console; return False if it is not held."""
        if not self.since:
            return False
        with self._lock:
            self._leaving = True
            if self._busy:
                kind = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), kind)
        self._jobs.put(None)
        return True

    def tick(self) -> None:
        """Deliver the pending answers."""
        while self._answers:
            answer, ok, text, data = self._answers.popleft()
            answer(ok, text, data)
