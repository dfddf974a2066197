"""Evidence about a rank when a stall is suspected: plain facts, without conclusions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from ...code_owner import is_probe, library_of
from ...messages.telemetry import Heartbeat, PhaseRecord, Step
from ...text import sanitize

# Parses Python stacks as ``faulthandler`` writes them, summarises them, and groups ranks with equal ones.
#
# Only file, line and function are used. What a thread does (waits for a batch, is inside a collective) is recognised by
# names in PyTorch and Python that have been stable for years; otherwise the innermost line of the script is shown.


Doing = Literal[
    "collective", "data", "backward", "saving", "device", "compiling", "network", "exiting", "waiting", "code", ""
]
"""Activity of a thread, from its Python frames; empty: it has none."""

_THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-fA-F]+)")
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
    (
        "wrapper",
        "call",
        "decorate_context",
        "_call_impl",
        "_wrapped_call_impl",
        "inner",
        "wrapped_fn",
        "log_wrapper",
        "__enter__",
        "__exit__",
    )
)
_CONTEXT = {"__enter__": "GatheredParameters", "__exit__": "GatheredParameters"}
_FOR_ALL: Mapping[str, Mapping[str, str]] = {
    "/deepspeed/runtime/engine.py": {
        name: name for name in ("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model")
    },
    "/deepspeed/runtime/zero/partition_parameters.py": _CONTEXT,
    "/transformers/trainer.py": {
        "_save_checkpoint": "the Trainer's checkpoint",
        "save_model": "save_model",
        "evaluate": "evaluate",
        "predict": "predict",
    },
    "/transformers/generation/utils.py": {"generate": "generate"},
    "/accelerate/accelerator.py": {
        name: name for name in ("save_state", "load_state", "save_model", "get_state_dict", "wait_for_everyone")
    },
    "/torch/distributed/checkpoint/state_dict.py": {
        f"{verb}_{part}state_dict": f"{verb}_{part}state_dict"
        for verb in ("get", "set")
        for part in ("", "model_", "optimizer_")
    },
    "/torch/distributed/checkpoint/": {"save": "save", "async_save": "async_save", "load": "load"},
}
"""Calls of libraries that contain collectives, so that every rank has to make them: by file, function and name."""
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


class Place(NamedTuple):
    """Position of a thread, as text, and its activity there."""

    doing: Doing
    words: str
    """Innermost known activity or function: ``next() of the dataloader``, ``all_gather``, ``time_step``."""
    at: str
    """Innermost line of the calling code, ``train.py:52 in main``; empty if there is none."""
    call: str = ""
    """What the script has called there: ``save_checkpoint``, ``step``; empty: nothing of a library."""
    line: str = ""
    """The script's innermost line, ``train.py:52``."""
    for_all: bool = False
    """Whether every rank has to make that call, because it contains collectives."""

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
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        if head is not None:
            threads.append((head[1], []))
            continue
        found = _FRAME.match(line)
        if found is not None and threads:
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1][1].append(Frame(sanitize(found[1], 400), number, sanitize(found[3] or "", 120)))
    return [Thread(name, tuple(frames)) for name, frames in threads]


def training_thread(threads: Sequence[Thread], name: str = "") -> Thread | None:
    """Return the training thread: the thread ``name``, else the main thread, which faulthandler writes last."""
    for thread in threads:
        if name and _number(thread.name) == _number(name):
            return thread
    return threads[-1] if threads else None


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
        for file, names in _FOR_ALL.items():
            if frame.function in names and file in _path(frame):
                return found._replace(call=names[frame.function], line=line, for_all=True)
    called = (frame.function for frame in reversed(frames[:index]) if frame.function not in _INNER)
    return found._replace(call=next(called, "").strip("_") if index else "", line=line)


def _activity(frames: Sequence[Frame]) -> Place:
    if not frames:
        return Place("", "", "")
    for index, frame in enumerate(frames):
        name = _path(frame)
        if name.endswith(_COLLECTIVE_FILES) and frame.function not in _INNER:
            return Place("collective", frame.function.lstrip("_"), _at(_caller(frames, index)))
        if name.endswith("/torch/utils/data/dataloader.py") and frame.function in (
            "__next__",
            "_next_data",
            "__iter__",
        ):
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
    return any(
        frame.function == "_try_get_data" and _path(frame).endswith("/torch/utils/data/dataloader.py")
        for frame in frames
    )


def _number(name: str) -> int | str:
    """Return a thread's identifier without leading zeros; unchanged if it is not a number."""
    try:
        return int(name, 16)
    except ValueError:
        return name


def group(stacks: Mapping[int, tuple[str, str]]) -> list[Group]:
    """Group ranks by the stack of their training thread, the largest group first.

    Args:
        stacks: for each rank, its stacks' text and the name of its training thread (may be empty).
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


# Determines whether a process tree worked between two observations: CPU time, reads, writes, network, new processes.
#
# Every figure is a running total, so the difference of two observations is the work in between. Rates have thresholds,
# because library threads wake up and exchange keep-alives in an otherwise idle process.


BUSY_SHARE = 0.03
"""CPU time above this share of one core is work."""
BUSY_SECONDS = 0.03
"""Minimum CPU time that counts as work; the clock has a resolution of 0.01 s."""
CHARS_PER_SECOND = 8192.0
"""Bytes/s through read(2) and write(2) above this are work; a logging service that reads /proc does less."""
TRAFFIC_PER_SECOND = 1024.0
"""Bytes/s sent and received above this are work; keep-alives are less."""
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
    """Totals of one process with all its descendants at one moment."""

    time: float
    """``time.monotonic``."""
    state: str
    """The training thread's state letter of proc(5); empty: gone."""
    wchan: str
    """The kernel function in which the training thread waits; empty: not readable, or it runs."""
    cpu_seconds: float
    """CPU time of the process itself, without threads of the monitor and of communication libraries."""
    io_bytes: int
    """Bytes written to and read from disks."""
    on_disk: bool
    """Whether a thread is in uninterruptible sleep (D), usually waiting for a disk."""
    switches: int = 0
    """Context switches of the training thread."""
    below_seconds: float = 0.0
    """CPU time of the descendants."""
    chars: int = 0
    """Bytes passed to read(2) and write(2), including pipes and files in memory."""
    traffic: int = 0
    """Bytes acknowledged and received on the TCP connections of the tree."""
    processes: int = 1
    """Number of living processes of the tree."""
    newest: int = 0
    """Start time of its youngest process, in ticks since boot."""
    worker_naps: int = 0
    """Context switches of dataloader workers that sleep for a set time."""
    training_seconds: float = 0.0
    """CPU time of the training thread alone."""

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

        Args:
            polls: whether the training thread waits for a dataloader's worker, and wakes up regularly by itself.
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


# Time limits of each phase: the table used by the hub, the tests and the guide.
#
# A rank's limit, in seconds without progress, is ``max(row, LIMIT_FACTOR x usual longest of that phase on that rank)``;
# a phase that only the first step had so far counts with ``FIRST_STEP_FACTOR``.
# The column depends on the activity of the rank's process tree, see ``Row``.


LIMIT_FACTOR = 5.0
"""Multiple of a phase's usual longest duration that exceeds its ordinary variation."""
FIRST_STEP_FACTOR = 2.0
"""The same for a duration of the first step, which may include compilation and warm-up."""
EARLY_STEPS = 3
"""Steps whose durations include compilation, warm-up and the first touch of memory."""
REGULAR_STEPS = 10
"""After this many steps the usual longest duration is known well enough for the short limits of ``asleep_s``."""
UNSETTLED_ASLEEP_S = {"idle": 8.0}
"""Lower bounds of ``asleep_s``, by phase, before ``REGULAR_STEPS`` steps have been seen; 5 s for the others. Between
steps a script's own pauses vary most."""
ALONE_ACTION_S = 300.0
"""No process is ended before its tree was idle for this many seconds if no other rank is known to wait for it, or if it
may go on by itself. Otherwise its phase's limit applies; in every case the verdict must have stood for
``--hang-grace``."""
RESUME_S = 120.0
"""A timed sleep that ends within this many seconds, as between two attempts to reach a server, is not a hang: the rank
counts as working. A longer one is."""


class Row(NamedTuple):
    """Time limits of one phase, in seconds without progress of the training thread."""

    phase: str
    title: str
    """Name of the phase in the guide."""
    computing_s: float
    """Limit if the rank computes, or if its activity is unknown."""
    working_s: float
    """Limit while its process tree reads, writes, sends, receives or compiles, or a child computes."""
    asleep_s: float
    """Limit if it sleeps at one line, its process tree is idle, and other ranks wait for it."""


ROWS = (
    Row("data", "data", 8.0, 60.0, 6.0),
    Row("forward", "forward", 8.0, 60.0, 4.0),
    Row("backward", "backward", 8.0, 60.0, 4.0),
    Row("optimizer", "optimizer", 8.0, 60.0, 4.0),
    Row("within step", "Python code within a step", 8.0, 60.0, 4.0),
    Row("idle", "Python code between steps", 300.0, 300.0, 6.0),
    Row("eval", "evaluation", 300.0, 300.0, 8.0),
    Row("generate", "generation", 300.0, 300.0, 8.0),
    Row("checkpoint", "checkpoint", 600.0, 600.0, 8.0),
    Row("early", "second and third step", 60.0, 60.0, 8.0),
    Row("first", "first step", 300.0, 300.0, 8.0),
    Row("init", "start-up", 300.0, 300.0, 20.0),
)
"""Lower bounds of the limits. ``early`` and ``first`` apply to every phase of those steps; ``init`` applies until the
first phase of the first step, also between phases before that, where scripts sleep to start ranks in turn."""

_BY_PHASE = {row.phase: row for row in ROWS}
_UNKNOWN = Row("", "", 60.0, 300.0, 10.0)


def row_of(phase: str, *, within_step: bool, steps_seen: int, has_stepped: bool) -> Row:
    """Return the applicable row: the phase's own, raised to the lower bounds of the first steps.

    Args:
        within_step: whether it is ``idle`` between the phases of one step.
        has_stepped: whether it has finished a step, received or not.
    """
    row = _BY_PHASE.get("within step" if phase == "idle" and within_step else phase, _UNKNOWN)
    unsettled = UNSETTLED_ASLEEP_S.get(row.phase, 5.0) if steps_seen < REGULAR_STEPS else 0.0
    asleep = max(row.asleep_s, unsettled)
    row = row._replace(asleep_s=asleep)
    if not has_stepped:
        in_step = within_step or phase not in ("init", "idle")
        return _at_least(row, _BY_PHASE["first" if in_step else "init"])
    return _at_least(row, _BY_PHASE["early"]) if steps_seen < EARLY_STEPS else row


def action_patience(computing_s: float, *, awaited: bool, may_resume: bool) -> float:
    """Return for how many seconds a rank's process tree must have been idle before the run may be ended.

    Args:
        may_resume: whether it waits for an answer from the network, or sleeps for a set time.
    """
    return computing_s if awaited and not may_resume else max(computing_s, ALONE_ACTION_S)


def as_markdown() -> list[str]:
    """Return the lines of the guide's table."""
    lines = [
        "| phase | computes, or not known | reads, writes, sends, compiles | asleep, others wait for it "
        "| `--on-hang`: nothing done for | the same, if alone, or if it may go on by itself |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in ROWS:
        action = action_patience(row.computing_s, awaited=True, may_resume=False)
        longer = action_patience(row.computing_s, awaited=True, may_resume=True)
        limits = (row.computing_s, row.working_s, row.asleep_s, action, longer)
        lines.append(" | ".join([f"| {row.title}", *(f"{seconds:g} s" for seconds in limits)]) + " |")
    return lines


def _at_least(row: Row, floor: Row) -> Row:
    return row._replace(
        computing_s=max(row.computing_s, floor.computing_s),
        working_s=max(row.working_s, floor.working_s),
        asleep_s=max(row.asleep_s, floor.asleep_s),
    )


ASLEEP_S = 2.0
"""A thread found asleep at the same line for this many seconds, in an idle process, counts as asleep."""

NOWHERE = Place("", "", "")


class Call(NamedTuple):
    """One collective that a rank has entered."""

    group: str
    """PyTorch's name for the process group."""
    number: int
    """Its sequence number within the group, equal on all ranks of the group."""
    name: str
    size: int
    """Elements of its tensor; 0: none, or unknown."""
    done: bool | None
    """None: unknown."""


class Collective(NamedTuple):
    """A collective that a verdict is about."""

    name: str
    """Empty: its name differs between ranks."""
    number: int | None
    """None: unknown."""
    ranks: tuple[int, ...] = ()
    """Ranks of its group; empty: all, or unknown."""
    group: str = ""
    """PyTorch's name for the group, if there are several."""


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one rank."""

    source: str = ""
    """``recorder``: PyTorch's flight recorder; ``nccl``: NCCL's own count; ``calls``: the probe's count. Their numbers
    cannot be compared with each other."""
    recent: tuple[Call, ...] = ()
    """The latest calls of each group, oldest first."""
    counted: Mapping[str, int] = field(default_factory=dict[str, int])
    """Number of calls counted by the probe, by group."""
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    """The ranks of each group."""

    def last(self, group: str) -> int:
        """Return the number of the last collective entered in a group; 0: none."""
        return max((call.number for call in self.recent if call.group == group), default=0)


@dataclass(frozen=True, slots=True)
class LockWait:
    """A file lock that a rank waits for."""

    path: str
    build: bool = False
    """Whether it is PyTorch's lock for the build of an extension."""
    compiler: bool = False
    """For a build lock: whether a compiler runs on that host."""
    idle_s: float = 0.0
    """For a build lock: seconds since a file in its directory changed."""
    holder: str = ""
    """The process that holds it, in words; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of one rank at one moment."""

    taken: float
    """Seconds since the epoch on the hub's clock."""
    by: Literal["", "probe", "signal"] = ""
    """Source of its stacks: its probe's answer; or a signal, because native code held the GIL; empty: no stacks."""
    frames: tuple[Frame, ...] = ()
    """The training thread, innermost first."""
    place: Place = NOWHERE
    asleep: float = 0.0
    """Seconds for which the training thread is known to have slept at this line while the process did nothing."""
    stands: float = 0.0
    """Seconds for which the training thread has stood in these frames, asleep or spinning, while the rest of its
    process tree did nothing. Under NCCL a wait for the device or for other ranks spins: it takes a whole core."""
    restless: bool = False
    """Whether it has woken up since its last progress and not slept much longer since, as in a loop of retries."""
    work: Work = ""
    """Recent work of its process tree."""
    quiet: float | None = None
    """Seconds for which its process tree is known to have been idle; None: unknown."""
    timed: bool = False
    """Whether its training thread, or a dataloader worker that it waits for, sleeps for a set time."""
    wakes: float | None = None
    """Seconds until that sleep ends by itself; None: not asleep for a set time, or unknown."""
    loops: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict[str, tuple[tuple[int, int], ...]])
    """The loops around each line of the script that the training thread is in (``Frame.key``), as first and last line,
    innermost first."""
    gathers: int = 0
    """Number of times that it has entered DeepSpeed's ``GatheredParameters``."""
    threads: bool = False
    """Whether the script runs other Python threads in it, which may enter collectives too."""
    lock: "LockWait | None" = None
    """The file lock it waits for."""
    process: str = ""
    """The training thread's state in /proc: R, S, D, T ...; empty: not on this host."""
    wchan: str = ""
    """The kernel function in which it waits, if readable."""
    utilization: float | None = None
    """Recent share of time in which its device ran a kernel, percent; None: no device, or unknown."""
    calls: Calls = field(default_factory=Calls)
    nccl: Calls = field(default_factory=Calls)
    """The collectives that it has launched by NCCL's own count (RAS), by communicator; empty: unknown."""
    steps: int = 0
    """Optimizer steps that the hub had received from it at that time."""

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
    try:
        answer = msgspec.convert(data or {}, _Answer)
    except msgspec.ValidationError:
        return Calls()
    members = {group: tuple(ranks) for group, ranks in answer.ranks.items()}
    return Calls(answer.source, tuple(Call(*call) for call in answer.recent), answer.counted, members)


def all_members(evidences: Iterable[Evidence | None]) -> dict[str, tuple[int, ...]]:
    """Merge the ranks' information about their process groups."""
    found: dict[str, tuple[int, ...]] = {}
    for evidence in evidences:
        if evidence is not None:
            found.update(evidence.calls.members)
    return found


class _Answer(msgspec.Struct):
    source: str = ""
    recent: list[tuple[str, int, str, int, bool | None]] = []
    counted: dict[str, int] = {}
    ranks: dict[str, list[int]] = {}


# Tracks each rank's progress, and how long its current phase may last before a stall is suspected.
#
# A rank is *stuck* if the hub has received no progress of its training thread (a step, a phase change, a collective)
# for longer than ``limit``::
#
# limit(phase) = max(floor(phase), 5 x usual longest of that phase on that rank)
#
# - The usual longest is a decaying maximum: ``m = max(min(d, max(2 m, 1 s)), 0.98 m)`` for each new duration ``d``, and
# ``m = d`` for the first. A single outlier at most doubles it, so a resolved stall does not disable the rule, and a few
# long durations in a row raise the limit.
# - The first step does not count, because it compiles and warms up. Only until a later step has had a phase, twice its
# duration in the first step counts: an optimizer that computes for minutes does so in the second step too. This does
# not extend the short limit of a rank that sleeps.
# - The floors are the table of ``protocol.analysis.stalls.patience``: one column if the rank computes or its activity
#   is
# unknown, a longer one while its process tree reads, writes, sends, receives or compiles (``working_limit``), and a
# short one if its training thread sleeps at one line and its process tree is idle (``asleep_limit``), which applies
# only while other ranks wait for it.
#
# A stall is *suspected* after ``suspect_after`` seconds: then the ranks' stacks, processes and collectives are
# inspected, without a verdict yet.
#
# Time in which the hub itself did not run is discounted for all ranks (``shift``), except if a rank's heartbeats of
# that time report no progress. A hub that is interrupted repeatedly thus still finds hung ranks, and no rank is
# blamed after its whole host was suspended.
#
# Durations of ordinary phases come from steps (mean of a phase's occurrences); those of eval, checkpoint, idle and data
# also from heartbeats, as the time between the starts of two phases without a step in between.


SUSPECT_S = 1.5
SUSPECT_LONG_S = 4.0
SUSPECT_FACTOR = 2.0
FORGET = 0.98
OUTLIER_FACTOR = 2.0
OUTLIER_FLOOR_S = 1.0
LONG_PHASES = ("init", "eval", "generate", "checkpoint")
"""Phases that may take long in native code that holds the GIL."""
WITNESS_S = 2.0
"""Maximum seconds without progress that two consecutive heartbeats prove; they are sent every second."""
SILENT_S = 5.0
"""A rank without messages for this many seconds is silent: its outdated figures alone are no evidence."""


def _clipped(seconds: float, known: float) -> float:
    return min(seconds, max(OUTLIER_FACTOR * known, OUTLIER_FLOOR_S)) if known else seconds


class RankProgress:
    """One rank's progress as received by the hub. Times are seconds on the hub's clock."""

    def __init__(self, now: float) -> None:
        self.last_message_at = now
        self.moved_at = now
        self.progress = -1
        self.step = 1
        """Number of the unfinished step."""
        self.steps_seen = 0
        self.step_seconds = 0.0
        """Host time of the last finished step; 0 before the first."""
        self.has_stepped = False
        self.peer_steps = 0
        """Lower bound of the finished steps of a silent rank, from collectives of later steps in which other ranks met
        it; 0 for a rank that reports itself."""
        self.phase = "init"
        self.phase_started = 0.0
        """Start of the phase in the latest heartbeat; 0 after a later step, since then its end is unknown."""
        self.micro_step = 0
        self.collective = ""
        self.last_collective = ""
        self.collectives = 0
        self.step_collectives = 0
        self.group = ""
        self.group_sequence = 0
        self.size = 0
        self.per_step_collectives = -1
        """Collectives of the last finished step; -1 before one was seen."""
        self.usual_max: dict[str, float] = {}
        """Usual longest duration of each phase in seconds, without the first step's."""
        self.first_step: dict[str, float] = {}
        """Duration of each phase in the first step that the hub received, in seconds."""
        self._last_beat = 0.0
        """When the latest heartbeat was sent, on the rank's clock."""
        self._stood = 0.0
        """Seconds without progress since the last progress, as proven by the rank's own heartbeats."""
        self._unforgiven = 0.0
        """Time of its last progress before any time was discounted; 0: none was discounted since."""

    def step_done(self, t: float, step: Step) -> None:
        """Process a finished step that the hub received at ``t``."""
        self.moved(t)
        self.has_stepped = True
        self.steps_seen += 1
        self.phase_started = 0.0
        self.step_seconds = step.host_us * 1e-6
        if step.step >= self.step:
            self.step = step.step + 1
        entered = 0
        usual = self.usual_max if self.steps_seen > 1 else self.first_step
        phase: PhaseRecord
        for phase in step.phases:
            entered += phase.collectives
            name = phase.name
            seconds = phase.host_us * 1e-6
            if phase.count > 1:
                seconds /= phase.count
            known = usual.get(name, 0.0)
            # The ordinary cases, a duration below the decaying maximum or a short one, cost a few comparisons.
            decayed = known * FORGET
            if seconds <= decayed:
                usual[name] = decayed
            elif seconds <= known or seconds <= OUTLIER_FLOOR_S:
                usual[name] = seconds
            else:
                usual[name] = _clipped(seconds, known)
        self.per_step_collectives = entered

    def beat(self, t: float, beat: Heartbeat) -> None:
        """Process a heartbeat that the hub received at ``t``."""
        self.last_message_at = t
        if beat.progress != self.progress:
            if beat.phase_started > self.phase_started > 0.0:
                self._learn(self.phase, beat.phase_started - self.phase_started)
            self.progress = beat.progress
            self.moved(t)
        else:
            self._stands(t, beat.time)
        self._last_beat = beat.time
        self.step = beat.step
        self.phase = beat.phase
        self.phase_started = beat.phase_started
        self.micro_step = beat.micro_step
        self.collective = beat.collective
        self.last_collective = beat.last_collective
        self.collectives = beat.collectives
        self.step_collectives = beat.step_collectives
        self.group = beat.group
        self.group_sequence = beat.group_sequence
        self.size = beat.size

    def _learn(self, phase: str, seconds: float) -> None:
        # Heartbeats are sampled, so the difference may include short phases; for long phases, which only
        # heartbeats report, and for gaps between steps, that is precise enough and makes the limit longer.
        if phase in ("forward", "backward", "optimizer", "init") or not self.has_stepped:
            return
        known = self.usual_max.get(phase, 0.0)
        self.usual_max[phase] = max(_clipped(seconds, known), known * FORGET)

    def _row(self) -> Row:
        return row_of(
            "" if self._phase_is_stale() else self.phase,
            within_step=bool(self.micro_step),
            steps_seen=max(self.steps_seen, self.peer_steps),
            has_stepped=self.has_stepped or self.peer_steps > 0,
        )

    def _phase_is_stale(self) -> bool:
        """Return whether the rank became silent, and has left the phase with a long limit that it last reported.

        Native code that holds the GIL right after the start keeps the rank from sending its finished steps.
        """
        if not self.peer_steps or self.micro_step or self.phase not in ("init", "idle"):
            return False
        return self.phase_started == 0.0 or self.peer_steps > self.steps_seen

    def _learned(self) -> float:
        return LIMIT_FACTOR * self.usual_max.get(self.phase, 0.0)

    def _expected(self) -> float:
        return self._learned() or FIRST_STEP_FACTOR * self.first_step.get(self.phase, 0.0)

    def limit(self) -> float:
        """Return the limit of this rank's current phase, in seconds without progress (see this module's docstring)."""
        return max(self._row().computing_s, self._expected())

    def working_limit(self) -> float:
        """Return the limit for a rank whose process tree works, in seconds."""
        return max(self._row().working_s, self._expected())

    def asleep_limit(self) -> float:
        """Return the limit for a rank found asleep while others wait for it, in seconds."""
        return max(self._row().asleep_s, self._learned())

    def suspect_after(self) -> float:
        """Return the seconds without progress after which the ranks are inspected."""
        ordinary = self.steps_seen >= EARLY_STEPS and self.phase not in LONG_PHASES
        floor = SUSPECT_S if ordinary else SUSPECT_LONG_S
        return max(floor, SUSPECT_FACTOR * self.usual_max.get(self.phase, 0.0))

    def age(self, now: float) -> float:
        """Return the seconds since its last progress; never negative."""
        return max(0.0, now - self.moved_at)

    def silence(self, now: float) -> float:
        """Return the seconds since its last message; never negative."""
        return max(0.0, now - self.last_message_at)

    def moved(self, t: float) -> None:
        """Record progress at ``t``, or discount the time before it."""
        self.last_message_at = self.moved_at = t
        self._stood = self._unforgiven = 0.0
        self.peer_steps = 0

    def shift(self, seconds: float, now: float) -> None:
        """Discount ``seconds`` up to ``now`` during which the hub did not run (it was frozen, or the clock jumped)."""
        self.last_message_at = min(now, self.last_message_at + seconds)
        if seconds < 0.0:
            self.moved_at += seconds
            return
        self._unforgiven = self._unforgiven or self.moved_at
        self.moved_at = max(self.moved_at, min(self.moved_at + seconds, now - self._stood))

    def _stands(self, t: float, sent: float) -> None:
        """Record that the rank had made no progress when it sent a heartbeat, at ``sent`` on its clock."""
        self._stood += min(max(0.0, sent - self._last_beat), WITNESS_S) if self._last_beat else 0.0
        if self._unforgiven:
            self.moved_at = max(self._unforgiven, min(self.moved_at, t - self._stood))
