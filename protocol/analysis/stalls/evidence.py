"""Evidence about a rank when a stall is suspected: plain facts, without conclusions.

Stacks are parsed as ``faulthandler`` writes them; only file, line and function are used. What a thread does (waits for
a batch, is inside a collective) is recognised by names in PyTorch and Python that have been stable for years; otherwise
the innermost line of the script is shown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ...code_owner import is_probe, library_of
from ...messages.telemetry import TakenBy
from ...text import sanitize

Doing = Literal[
    "collective", "data", "backward", "saving", "device", "compiling", "network", "exiting", "waiting", "code", ""
]
"""Activity of a thread, from its Python frames; empty: it has none."""

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[pt_data_worker (\d+)\])?")
_FRAME = re.compile(r'\s+File "(.*)", line (\d+|\?\?\?)(?: in (.*))?$')

_COLLECTIVE_FILES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/_functional_collectives.py")
_BELOW_CALLER = (
    "/torch/distributed/",
    "/deepspeed/comm/",
    "/deepspeed/utils/nvtx.py",
    "/torch/utils/_contextlib.py",
    "/torch/nn/modules/module.py",
)
"""Frames between a collective and the code that called it."""
_INNER = frozenset(
    ("wrapper", "call", "decorate_context", "_call_impl", "_wrapped_call_impl", "inner", "wrapped_fn", "log_wrapper")
) | {"__enter__", "__exit__"}
_FOR_ALL = {
    "/deepspeed/runtime/engine.py": ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"),
    "/deepspeed/runtime/zero/partition_parameters.py": ("__enter__", "__exit__"),
    "/transformers/trainer.py": ("_save_checkpoint", "save_model", "evaluate", "predict"),
    "/transformers/generation/utils.py": ("generate",),
    "/accelerate/accelerator.py": ("save_state", "load_state", "save_model", "get_state_dict", "wait_for_everyone"),
    "/torch/distributed/checkpoint/state_dict.py": tuple(
        f"{verb}_{part}state_dict" for verb in ("get", "set") for part in ("", "model_", "optimizer_")
    ),
    "/torch/distributed/checkpoint/": ("save", "async_save", "load"),
}
"""Calls of libraries that contain collectives, so that every rank has to make them: functions by file."""
_CALLED = {
    "_save_checkpoint": "the Trainer's checkpoint",
    "__enter__": "GatheredParameters",
    "__exit__": "GatheredParameters",
}
"""The names of such calls, where they differ from the function."""
_LOADER = "/torch/utils/data/dataloader.py"
_ENDINGS = (
    ("/threading.py", "_shutdown"),
    ("/concurrent/futures/thread.py", "_python_exit"),
    ("/multiprocessing/util.py", "_exit_function"),
)
"""Functions in which the interpreter waits for threads and children after the script has ended."""

_COMPILERS = (
    "/torch/_dynamo/convert_frame.py",
    "/torch/_dynamo/symbolic_convert.py",
    "/torch/_inductor/",
    "/torch/_functorch/_aot_autograd/graph_capture.py",
    "/triton/compiler/",
)
"""Files that are in the stack only while a function is compiled, not while the compiled one runs."""
_COMPILED = ("/torch/_inductor/output_code.py", "/torch/_inductor/utils.py", "/torch/_inductor/runtime/")
"""Inductor's files in which a compiled function runs."""
_NETWORK = ("/urllib3/", "/http/client.py", "/httpcore/", "/aiohttp/", "/botocore/", "/grpc/", "/paramiko/")
_NETWORK_INNER = ("/socket.py", "/ssl.py")
_NETWORK_FRAMES = 8


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    @property
    def key(self) -> str:
        """File and line: the key of ``Evidence.loops``."""
        return f"{self.file}:{self.line}"

    @property
    def place(self) -> str:
        """``train.py:52``: the file's own name and the line."""
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


class Thread(NamedTuple):
    """One thread; ``frames`` innermost first."""

    name: str
    frames: tuple[Frame, ...]
    worker: int = 0  # the pid, if it is the main thread of a dataloader's worker


class Place(NamedTuple):
    """Position of a thread, as text, and its activity there."""

    doing: Doing
    words: str  # innermost known activity or function: `next() of the dataloader`, `all_gather`, `time_step`
    at: str  # innermost line of the calling code, `train.py:52 in main`; empty if there is none
    call: str = ""  # what the script has called there: `save_checkpoint`, `step`; empty: nothing of a library
    line: str = ""  # the script's innermost line, `train.py:52`
    for_all: bool = False  # whether every rank has to make that call, because it contains collectives

    @property
    def text(self) -> str:
        """Both: ``all_gather in stage3.py:582``."""
        return f"{self.words} in {self.at}" if self.at and self.words else self.words or self.at


class Group(NamedTuple):
    """Ranks whose training threads have the same stack."""

    ranks: list[int]
    place: Place
    frames: tuple[Frame, ...]


def parse(text: str) -> list[Thread]:
    """Parse the stacks of all threads, as ``faulthandler.dump_traceback`` writes them; other lines are ignored."""
    threads: list[tuple[str, list[Frame], int]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[1], [], int(head[2] or 0)))
        elif (found := _FRAME.match(line)) and threads:
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1][1].append(Frame(sanitize(found[1], 400), number, sanitize(found[3] or "", 120)))
    return [Thread(name, tuple(frames), worker) for name, frames, worker in threads]


def training_thread(threads: Sequence[Thread], name: str = "") -> Thread | None:
    """Return the training thread: the thread ``name``, else the main thread, which faulthandler writes last."""
    wanted = _identifier(name)
    named = (thread for thread in threads if wanted and _identifier(thread.name) == wanted)
    own = [thread for thread in threads if not thread.worker]
    return next(named, own[-1] if own else None)


def is_of_script(thread: Thread) -> bool:
    """Return whether a thread runs code of the script: neither a library's own thread nor the monitor's."""
    return any(not library_of(frame.file) for frame in visible(thread.frames))


def visible(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return the frames without ftmon's own: its wrappers are in every stack."""
    return tuple(frame for frame in frames if not is_probe(frame.file))


def where(frames: Sequence[Frame]) -> Place:
    """Return the position of a thread, from its frames (innermost first)."""
    frames = visible(frames)
    index = next((i for i, frame in enumerate(frames) if not library_of(frame.file)), None)
    line = frames[index].place if index is not None else ""
    found = _activity(frames)
    for frame in reversed(frames[:index]):  # the outermost: a save of the Trainer calls DeepSpeed's
        if any(frame.function in names and file in _path(frame) for file, names in _FOR_ALL.items()):
            return found._replace(call=_CALLED.get(frame.function, frame.function), line=line, for_all=True)
    called = (frame.function for frame in reversed(frames[:index]) if frame.function not in _INNER)
    return found._replace(call=next(called, "").strip("_") if index else "", line=line)


def _activity(frames: Sequence[Frame]) -> Place:
    if not frames:
        return Place("", "", "")
    for index, frame in enumerate(frames):
        name = _path(frame)
        if name.endswith(_COLLECTIVE_FILES) and frame.function not in _INNER:
            return Place("collective", frame.function.lstrip("_"), _at(_caller(frames, index)))
        if name.endswith(_LOADER) and frame.function in ("__next__", "_next_data", "__iter__"):
            inside = next((inner for inner in frames[:index] if not library_of(inner.file)), None)
            words = "next() of the dataloader" + (f" ({_at(inside)})" if inside is not None else "")
            return Place("data", words, _at(_script(frames, index)))
        if frame.function == "backward" and name.endswith(("/torch/_tensor.py", "/torch/autograd/__init__.py")):
            return Place("backward", "backward", _at(_script(frames, index)))
        if name.endswith("/torch/serialization.py"):
            return Place("saving", f"torch.{frame.function.lstrip('_')}", _at(_script(frames, index)))
        if any(name.endswith(file) and frame.function == function for file, function in _ENDINGS):
            return Place("exiting", "the end of the script: waits for a thread or a child", "")
        if name.endswith("/torch/utils/file_baton.py") and frame.function == "wait":
            words = "a wait for another process to build a PyTorch extension, or for the lock file that one left behind"
            return Place("waiting", words, _at(_script(frames, index)))
        if "/torch/cuda/" in name and "synchronize" in frame.function:
            return Place("device", "a wait for the device", _at(_script(frames, index)))
    inner, script = frames[0], _script(frames, -1)
    paths = [_path(frame) for frame in frames]
    if any(part in path for path in paths for part in _COMPILERS if not any(one in path for one in _COMPILED)):
        return Place("compiling", "torch.compile", _at(script))
    if paths[0].endswith(_NETWORK_INNER) or any(part in path for path in paths[:_NETWORK_FRAMES] for part in _NETWORK):
        return Place("network", f"{inner.function} ({inner.place})", _at(script))
    if script is None or script is inner:
        return Place("code", "", _at(inner))
    waits = _path(inner).endswith(("/threading.py", "/queue.py", "/selectors.py", "/subprocess.py", "/socket.py"))
    return Place("waiting" if waits else "code", f"{inner.function} ({inner.place})", _at(script))


def waits_for_loader_worker(frames: Iterable[Frame]) -> bool:
    """Return whether a thread waits for a worker of PyTorch's dataloader, and wakes up to see whether it lives."""
    return any(frame.function == "_try_get_data" and _path(frame).endswith(_LOADER) for frame in frames)


def with_worker(place: Place, threads: Iterable[Thread]) -> Place:
    """Return a place in a dataloader with the one of its first worker that is in code of the script."""
    for thread in threads:
        if thread.worker and (script := next((one for one in thread.frames if not library_of(one.file)), None)):
            return place._replace(words=f"{place.words}, whose worker (pid {thread.worker}) is at {_at(script)}")
    return place


def _identifier(name: str) -> str:
    return name.lower().removeprefix("0x").lstrip("0")


def group(stacks: Mapping[int, tuple[str, str]]) -> list[Group]:
    """Group ranks by the stack of their training thread, the largest group first.

    ``stacks`` has each rank's text and the name of its training thread, which may be empty.
    """
    found: dict[tuple[Frame, ...], list[int]] = {}
    for rank in sorted(stacks):
        text, name = stacks[rank]
        thread = training_thread(parse(text), name)
        found.setdefault(visible(thread.frames) if thread is not None else (), []).append(rank)
    groups = [Group(ranks, where(frames), frames) for frames, ranks in found.items()]
    return sorted(groups, key=lambda one: (-len(one.ranks), one.ranks))


def _path(frame: Frame) -> str:
    return frame.file.replace("\\", "/")


def _caller(frames: Sequence[Frame], index: int) -> Frame | None:
    """Return the caller of a collective: the first frame outside PyTorch's and DeepSpeed's communication layers."""
    for frame in frames[index + 1 :]:
        if not any(part in _path(frame) for part in _BELOW_CALLER) and frame.function not in _INNER:
            return frame
    return None


def _script(frames: Sequence[Frame], index: int) -> Frame | None:
    """Return the innermost frame of the script; without one, the innermost frame outside PyTorch."""
    rest = frames[index + 1 :]
    return next((frame for frame in rest if not library_of(frame.file)), rest[0] if rest else None)


def _at(frame: Frame | None) -> str:
    return "" if frame is None else f"{frame.place} in {frame.function}" if frame.function else frame.place


BUSY_SHARE = 0.03  # CPU time above this share of one core is work
BUSY_SECONDS = 0.03  # minimum CPU time that counts as work; the clock has a resolution of 0.01 s
CHARS_PER_SECOND = 8192.0
"""Bytes/s through read(2) and write(2) above this are work; a logging service that reads /proc does less."""
TRAFFIC_PER_SECOND = 1024.0  # bytes/s sent and received above this are work; keep-alives are less
SPARE_BYTES = 4096.0
SPARE_WAKES = 0.5
POLLS_PER_SECOND, SPARE_POLLS = 0.4, 3.5
"""Wake-ups up to this are not work while PyTorch's dataloader waits: every five seconds it checks whether its worker
lives, which takes a thread off the processor once or twice."""

Work = Literal["", "computes", "device", "disk", "works"]
"""Empty: no work. ``computes``: only the rank's own CPU time. ``device``: its device computes, for no collective.
``disk``: a thread waits for a disk that transfers nothing. ``works``: reads, writes, network, child processes, or
wake-ups of the training thread."""


class Activity(NamedTuple):
    """Running totals of one process with all its descendants at one moment: two of them show the work in between.

    Rates have thresholds, because library threads wake up and exchange keep-alives in an otherwise idle process.
    """

    time: float  # `time.monotonic`
    state: str  # the training thread's state letter of proc(5); empty: gone
    wchan: str  # the kernel function in which the training thread waits; empty: not readable, or it runs
    cpu_seconds: float  # CPU time of the process itself, without threads of the monitor and of communication libraries
    io_bytes: int  # bytes written to and read from disks
    on_disk: bool  # whether a thread is in uninterruptible sleep (D), usually waiting for a disk
    switches: int = 0  # context switches of the training thread
    below_seconds: float = 0.0  # CPU time of the descendants
    chars: int = 0  # bytes passed to read(2) and write(2), including pipes and files in memory
    traffic: int = 0  # bytes acknowledged and received on the TCP connections of the tree
    processes: int = 1  # number of living processes of the tree
    newest: int = 0  # start time of its youngest process, in ticks since boot
    worker_naps: int = 0  # context switches of dataloader workers that sleep for a set time
    training_seconds: float = 0.0  # CPU time of the training thread alone

    @property
    def naps(self) -> bool:
        """Whether the training thread sleeps for a set time, as in ``time.sleep``."""
        return "nanosleep" in self.wchan

    def computes_besides(self, before: "Activity") -> bool:
        """Return whether threads other than the training thread computed since an earlier observation.

        A wait for a CUDA device, and for other ranks under NCCL, spins in the training thread and uses nothing else.
        """
        busy = max(BUSY_SECONDS, BUSY_SHARE * max(0.0, self.time - before.time))
        spent = self.cpu_seconds - before.cpu_seconds
        return spent - (self.training_seconds - before.training_seconds) > busy

    def work_since(self, before: "Activity", *, polls: bool = False) -> Work:
        """Return the kind of work done between an earlier observation and this one.

        With ``polls`` the training thread waits for a dataloader's worker, and wakes up regularly by itself.
        """
        passed = max(0.0, self.time - before.time)
        wakes = self.switches - before.switches
        busy = max(BUSY_SECONDS, BUSY_SHARE * passed)
        if (
            self.io_bytes != before.io_bytes
            or self.chars - before.chars > CHARS_PER_SECOND * passed + SPARE_BYTES
            or self.traffic - before.traffic > TRAFFIC_PER_SECOND * passed + SPARE_BYTES
            or self.below_seconds - before.below_seconds > busy
            or (self.processes, self.newest) != (before.processes, before.newest)
            or self.worker_naps != before.worker_naps
        ):
            return "works"
        if self.cpu_seconds - before.cpu_seconds > busy:
            return "computes"
        if self.on_disk or before.on_disk:
            return "disk"
        return "works" if wakes > (SPARE_POLLS + POLLS_PER_SECOND * passed if polls else SPARE_WAKES) else ""


RESUME_S = 120.0
"""A timed sleep that ends within this many seconds, as between two attempts to reach a server, is not a hang: the rank
counts as working. A longer one is."""
ASLEEP_S = 2.0  # a thread found asleep at the same line for this many seconds, in an idle process, counts as asleep

NOWHERE = Place("", "", "")


class Call(NamedTuple):
    """One collective that a rank has entered."""

    group: str  # PyTorch's name for the process group
    number: int  # its sequence number within the group, equal on all ranks of the group
    name: str
    size: int  # elements of its tensor; 0: none, or unknown
    done: bool | None  # none: unknown


class Collective(NamedTuple):
    """A collective that a verdict is about."""

    name: str  # empty: its name differs between ranks
    number: int | None  # none: unknown
    ranks: tuple[int, ...] = ()  # ranks of its group; empty: all, or unknown
    group: str = ""  # PyTorch's name for the group, if there are several


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one rank."""

    source: str = ""
    """``recorder``: PyTorch's flight recorder; ``nccl``: NCCL's own count; ``calls``: the probe's count. Their numbers
    cannot be compared with each other."""
    recent: tuple[Call, ...] = ()  # the latest calls of each group, oldest first
    counted: Mapping[str, int] = field(default_factory=dict[str, int])  # number of calls counted by the probe, by group
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])  # by group

    def last(self, group: str) -> int:
        """Return the number of the last collective entered in a group; 0: none."""
        return max((call.number for call in self.recent if call.group == group), default=0)


@dataclass(frozen=True, slots=True)
class LockWait:
    """A file lock that a rank waits for."""

    path: str
    build: bool = False  # whether it is PyTorch's lock for the build of an extension
    compiler: bool = False  # for a build lock: whether a compiler runs on that host
    idle_s: float = 0.0  # for a build lock: seconds since a file in its directory changed
    holder: str = ""  # the process that holds it, in words; empty: unknown


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one rank at one moment."""

    taken: float  # seconds since the epoch on the hub's clock
    by: TakenBy = ""
    """Source of its stacks: its probe's answer; a signal, because native code held the GIL; its memory, read from
    outside; empty: no stacks."""
    frames: tuple[Frame, ...] = ()  # the training thread, innermost first
    place: Place = NOWHERE
    asleep: float = 0.0  # seconds that the training thread has slept at this line while the process did nothing
    stands: float = 0.0
    """Seconds for which the training thread has stood in these frames, asleep or spinning, while the rest of its
    process tree did nothing. Under NCCL a wait for the device or for other ranks spins: it takes a whole core."""
    restless: bool = False
    """Whether it has woken up since its last progress and not slept much longer since, as in a loop of retries."""
    work: Work = ""
    quiet: float | None = None  # seconds for which its process tree is known to have been idle; None: unknown
    timed: bool = False  # whether its training thread, or a dataloader worker that it waits for, sleeps for a set time
    wakes: float | None = None  # seconds until that sleep ends by itself; None: not asleep for a set time, or unknown
    loops: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict[str, tuple[tuple[int, int], ...]])
    """The loops around each line of the script that the training thread is in (``Frame.key``), as first and last line,
    innermost first."""
    gathers: int = 0  # number of times that it has entered DeepSpeed's `GatheredParameters`
    threads: bool = False  # whether the script runs other Python threads in it, which may enter collectives too
    lock: LockWait | None = None
    process: str = ""  # the training thread's state in /proc: R, S, D, T ...; empty: not on this host
    wchan: str = ""  # the kernel function in which it waits, if readable
    utilization: float | None = None  # recent share of time with a kernel on its device, percent; None: unknown
    calls: Calls = field(default_factory=Calls)
    nccl: Calls = field(default_factory=Calls)
    """The collectives that it has launched by NCCL's own count (RAS), by communicator; empty: unknown."""
    steps: int = 0  # optimizer steps that the hub had received from it at that time

    @property
    def is_asleep(self) -> bool:
        """Whether it slept at one line for ``ASLEEP_S``, its process tree did not work, and it does not wake soon."""
        return self.asleep >= ASLEEP_S and not self.restless and self.work != "works" and not self.resumes

    @property
    def resumes(self) -> bool:
        """Whether its sleep ends by itself within ``RESUME_S``."""
        return self.wakes is not None and self.wakes <= RESUME_S

    @property
    def may_resume(self) -> bool:
        """Whether its sleep ends by itself, at a time that is soon or unknown."""
        return self.resumes or (self.timed and self.wakes is None)

    @property
    def unfinished(self) -> bool:
        """Whether it has entered a collective that its device has not completed."""
        return any(call.done is False for call in self.calls.recent)


def read_calls(data: Any) -> Calls:
    """Decode a rank's answer about its collectives; return an empty one if it is invalid."""
    answer = data if isinstance(data, dict) else {}
    try:
        return msgspec.convert({**answer, "members": answer.get("ranks", {})}, Calls)
    except msgspec.ValidationError:
        return Calls()


def all_members(evidences: Iterable[Evidence | None]) -> dict[str, tuple[int, ...]]:
    """Merge the ranks' information about their process groups."""
    found: dict[str, tuple[int, ...]] = {}
    for evidence in evidences:
        if evidence is not None:
            found.update(evidence.calls.members)
    return found
