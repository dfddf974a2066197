"""Runs every rank of a job that can differ, each in a process forked from one that has imported the libraries."""

import contextlib
import gc
import importlib
import os
import selectors
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from ...protocol.analysis.estimates.time import Work
from ...protocol.errors import ConfigError, FtmonError
from ...protocol.host.machine import ModelFlops
from ...protocol.run.end import signal_name
from ..host.processes import end_with_parent
from . import record
from .dry import DryRun
from .result import Made, Rank

_TOGETHER = 2
_MOST_RANKS = 8
"""Maximum number of ranks run; others get the figures of the nearest one."""
_TRACEBACK = 113
"""Exit status of a forked process that has printed a traceback; scripts rarely use it."""


class Outcome(msgspec.Struct, frozen=True):
    """One rank's memory at one length."""

    sequence_length: int
    rank: Rank
    fails_in: str = ""
    """The phase whose allocation does not fit the capacity; empty: all fit, or no capacity was given."""
    tight: bool = False
    """Whether every allocation happens to succeed with the capacity or less, and fails with more."""
    seconds: float = 0.0
    """Processor seconds of this length; the first one includes the start of the run."""
    work: Work = Work([], [])
    """Work of a step, from which its time is predicted."""
    micro_step: Work = Work([], [])
    """Of that, a micro-step between the first and the last; empty if there is none."""


class RankRun(msgspec.Struct):
    """Result of one rank's process."""

    parameters: int = 0
    trainable: int = 0
    flops: ModelFlops | None = None
    """FLOPs of the model, forward and backward; None: not known."""
    made: Made | None = None
    positions: int = 0
    """The model's maximum sequence length in tokens; 0: not known."""
    notes: list[str] = []
    outcomes: list[Outcome] = []


def differing(stage: int, ranks: int) -> list[int]:
    """Return the ranks to run; the other ranks have the figures of the nearest one.

    ZeRO-1 and ZeRO-2 cut one flat buffer of all parameters into a partition for each rank, so ranks hold different
    layers, whose gradients become available at different times of the backward pass. ZeRO-3 cuts each parameter into
    equal shares, padded, and without ZeRO every rank holds everything: there all ranks are like rank 0.
    """
    if stage not in (1, 2):
        return [0]
    if ranks <= _MOST_RANKS:
        return list(range(ranks))
    return [round(index * (ranks - 1) / (_MOST_RANKS - 1)) for index in range(_MOST_RANKS)]


def every(run: dict[int, Rank], ranks: int) -> list[Rank]:
    """Return all ranks of a job; those that were not run have the figures of the nearest one."""
    return [msgspec.structs.replace(run[nearest(run, rank)], rank=rank) for rank in range(ranks)]


def nearest(run: Iterable[int], rank: int) -> int:
    """Return the nearest of the ranks that were run."""
    return min(run, key=lambda one: abs(one - rank))


_IMPORTED = (
    "torch",
    "torch._dynamo",
    "torch._inductor.lowering",
    "transformers",
    "transformers.generation",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "deepspeed",
)


def warm(modules: Iterable[str] = ()) -> None:
    """Import what every rank needs, and those of ``modules`` that exist, once: forked processes need not.

    DeepSpeed queries the GPU at import: none is visible meanwhile, so that this process makes no CUDA context.
    """
    os.environ.update({"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cuda"})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # imported objects are kept
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    if visible is None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible


def run(
    make: Callable[[int], DryRun],
    ranks: Sequence[int],
    lengths: Sequence[int],
    capacity_bytes: int | None = None,
    in_turn: bool = False,
    refused: dict[int, ConfigError] | None = None,
    began: Callable[[int], None] = lambda rank: None,
) -> dict[int, RankRun]:
    """Run some ranks at some lengths, in this order, two ranks at a time, in forked processes.

    ``in_turn``: as in a process that measures one length after the other (``DryRun.measure``). ``refused`` receives the
    errors of ranks; without it the first one is raised. ``began`` is called with a rank before it runs.

    Raises:
        ConfigError: a rank was refused, or its process ended.
    """
    waiting = list(ranks)
    found: dict[int, RankRun] = {}
    with selectors.DefaultSelector() as selector:
        children: dict[int, tuple[int, int, bytearray]] = {}
        try:
            while waiting or children:
                while waiting and len(children) < _TOGETHER:
                    rank = waiting.pop(0)
                    began(rank)
                    reading, child = _fork(partial(_measure, make, rank, lengths, capacity_bytes, in_turn))
                    children[reading] = (rank, child, bytearray())
                    selector.register(reading, selectors.EVENT_READ)
                for key, _ in selector.select():
                    rank, child, text = children[key.fd]
                    part = os.read(key.fd, 1 << 16)
                    text += part
                    if not part:
                        selector.unregister(key.fd)
                        del children[key.fd]
                        os.close(key.fd)
                        try:
                            found[rank] = _result(child, bytes(text), RankRun, f"the dry run of rank {rank}")
                        except ConfigError as error:
                            if refused is None:
                                raise
                            refused[rank] = error
        finally:
            for reading, (_, child, _) in children.items():
                os.close(reading)
                os.kill(child, 9)
                os.waitpid(child, 0)
    return found


T = TypeVar("T")


def once(call: Callable[[], Any], kind: type[T]) -> T:
    """Return the result of a call in a forked process, sent as JSON.

    Raises:
        ConfigError: the call was refused, or its process ended.
    """
    reading, child = _fork(call)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    return _result(child, text, kind, "the dry run")


def _result(child: int, text: bytes, kind: type[T], what: str) -> T:
    """Return the result that an ended process has sent.

    Raises:
        ConfigError: the call was refused, or the process ended without a result.
    """
    _, status = os.waitpid(child, 0)
    if not text:
        raise ConfigError(f"{what} {_how(status)}")
    if text[:1] == b"-":
        raise ConfigError(text[1:].decode())
    return msgspec.json.decode(text[1:], type=kind)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    if code == _TRACEBACK:
        return "failed; its traceback is above"
    return f"ended with exit status {code}, without a result"


def _fork(call: Callable[[], Any]) -> tuple[int, int]:
    """Run a call in a forked process; return the read end of a pipe for its result or refusal, and the process id."""
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child:
        os.close(writing)
        return reading, child
    try:
        end_with_parent(parent)
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            try:
                pipe.write(b"+" + msgspec.json.encode(call()))
            except FtmonError as error:
                pipe.write(b"-" + str(error).encode())
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
        os._exit(_TRACEBACK)
    finally:
        os._exit(0)


def _measure(
    make: Callable[[int], DryRun], rank: int, lengths: Sequence[int], capacity: int | None, in_turn: bool
) -> RankRun:
    dry: Any = make(rank)
    result = RankRun(dry.parameters, dry.trainable, dry.flops, dry.made, dry.positions, list(getattr(dry, "notes", [])))
    before = 0.0
    for number, length in enumerate(lengths, 1):
        outcome = partial(_outcome, dry, length, capacity, in_turn)
        # Each length starts from an engine before its first step.
        found = outcome() if in_turn or number == len(lengths) else once(outcome, Outcome)
        used = sum(os.times()[:4])
        result.outcomes.append(msgspec.structs.replace(found, seconds=round(used - before, 2)))
        before = used
    return result


def _outcome(dry: DryRun, length: int, capacity: int | None, in_turn: bool) -> Outcome:
    measured = dry.measure(length, in_turn)
    allocator = dry.job.allocator
    rank = measured.rank
    limits = record.limits(measured.events, allocator)
    fails = "" if capacity is None else record.failing_phase(measured.events, allocator, limits, capacity)
    tight = False
    if capacity is not None and fails:
        low = rank.allocated_peak_bytes
        tight = capacity >= record.least_that_fits(measured.events, allocator, limits, low)
    rank = msgspec.structs.replace(rank, needed_bytes=limits.needed_bytes)
    return Outcome(length, rank, fails, tight, work=measured.work, micro_step=measured.micro_step)
