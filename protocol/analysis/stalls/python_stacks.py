"""Parses Python stacks as ``faulthandler`` writes them, summarises them, and groups ranks with equal ones.

Only file, line and function are used. What a thread does (waits for a batch, is inside a collective) is recognised by
names in PyTorch and Python that have been stable for years; otherwise the innermost line of the script is shown.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ...code_owner import is_probe, library_of
from ...text import sanitize

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
