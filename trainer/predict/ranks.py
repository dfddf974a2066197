"""Runs every rank of a job that can differ, each in a process forked from one that has imported the libraries."""

import contextlib
import gc
import importlib
import os
import selectors
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.time import Work
from ...protocol.errors import ConfigError, FtmonError
from ...protocol.host.machine import ModelFlops
from ...protocol.run.end import signal_name
from ..host.processes import end_with_parent
from ..recipe.hardware import cores
from .result import Made, Phase, Rank

if TYPE_CHECKING:
    from .dry import DryRun
    from .record import Event

_MOST_TOGETHER = 8  # Maximum number of dry runs at a time; each uses one core, and one of an 8B some 150 MB of its own
_MOST_RANKS = 8  # Maximum number of ranks run; others get the figures of the nearest one
_TRACEBACK = 113  # Exit status of a forked process that has printed a traceback; scripts rarely use it


class Outcome(msgspec.Struct, frozen=True):
    """One rank's memory at one length."""

    sequence_length: int
    rank: Rank
    fails_in: str = ""
    """The phase whose allocation does not fit the capacity; empty: all fit, or no capacity was given."""
    tight: bool = False  # Whether every allocation happens to succeed with the capacity or less, and fails with more
    seconds: float = 0.0  # Processor seconds of this length; the first one includes the start of the run
    work: Work = Work([], [])  # Work of a step, from which its time is predicted
    micro_step: Work = Work([], [])  # Of that, a micro-step between the first and the last; empty if there is none
    other: "Outcome | None" = None  # The same with other settings of the allocator, if they were given


class RankRun(msgspec.Struct):
    """Result of one rank's process."""

    parameters: int = 0
    trainable: int = 0
    flops: ModelFlops | None = None  # FLOPs of the model, forward and backward; None: not known
    made: Made | None = None
    positions: int = 0  # The model's maximum sequence length in tokens; 0: not known
    notes: list[str] = []
    outcomes: list[Outcome] = []
    after: dict[str, list["RankRun"]] = {}
    """Results of the calls made after it in its process, if they were given; without refused calls."""


Calls = Mapping[str, Callable[[], Sequence[RankRun]]]  # Dry runs by any names


def differing(stage: int, ranks: int) -> list[int]:
    """Return the ranks to run; the other ranks have the figures of the nearest one.

    ZeRO-1 and ZeRO-2 cut one flat buffer of all parameters into a partition for each rank, so ranks hold different
    layers, whose gradients become available at different times of the backward pass. ZeRO-3 cuts each parameter into
    equal shares, padded, and without ZeRO every rank holds everything: there all ranks are like rank 0, and so they are
    in ``BF16_Optimizer`` (``jobs.Prepared.different``).
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
    *("torch", "torch._dynamo", "transformers", "transformers.generation", "transformers.modeling_layers"),
    *("transformers.modeling_utils", "deepspeed"),
)


COMPILER = "torch._inductor.compile_fx"


def import_transformers() -> None:
    """Import transformers so that it reads the sources of all its models once, not twice (0.3 s each).

    It lists what they export when it is imported, and again for ``transformers.models``; its cache of folders is too
    small for both.
    """
    if "transformers.models" in sys.modules:
        return
    folder = Path(importlib.import_module("transformers").__file__ or "").parent / "models"
    utils: Any = importlib.import_module("transformers.utils.import_utils")
    plain = utils.define_import_structure

    def define(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != folder / "__init__.py":
            return plain(module_path, prefix)
        return {
            backends: {name.removeprefix("models."): of for name, of in names.items() if name.startswith("models.")}
            for backends, names in plain(folder, prefix="models").items()
        }

    if hasattr(plain, "cache_info"):
        utils.define_import_structure = define


def warm(modules: Collection[str] = ()) -> None:
    """Import what every rank needs, and those of ``modules`` that exist, once: forked processes need not.

    DeepSpeed queries the GPU at import: none is visible meanwhile, so that this process makes no CUDA context.
    """
    os.environ.update({"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cuda"})
    with without_gpus():
        gc.disable()  # imported objects are kept
        import_transformers()
        if COMPILER in modules:
            # As without jinja2: Inductor parses the templates of its kernels at import, and no dry run makes kernels.
            templates: Any = importlib.import_module("torch._inductor.codegen.common")
            templates.jinja2_env = lambda: None
        for name in (f"{__package__}.dry", *_IMPORTED):
            importlib.import_module(name)
        for name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def without_gpus() -> Generator[None]:
    """Hide the GPUs from this process and those that it starts, in the body."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _together() -> int:
    """Return how many dry runs are run at a time: one for two cores, as others use the host, and two on few."""
    return max(2, min(_MOST_TOGETHER, cores() // 2))


def run(
    make: Callable[[int], "DryRun"],
    ranks: Sequence[int],
    lengths: Sequence[int],
    capacity_bytes: int | None = None,
    in_turn: bool = False,
    refused: dict[int, ConfigError] | None = None,
    began: Callable[[int], None] = lambda rank: None,
    other: Settings | None = None,
    after: Calls | None = None,
) -> dict[int, RankRun]:
    """Run some ranks at some lengths, in this order, in forked processes: several ranks, or lengths of one, at a time.

    ``in_turn``: as in a process that measures one length after the other (``DryRun.measure``). ``refused`` receives the
    errors of ranks; without it the first one is raised. ``began`` is called with a rank before it runs. With ``other``
    settings of the allocator, each outcome also has the rank with these: what a step allocates is the same. The first
    rank's process makes the calls ``after`` its run. Raises ``ConfigError`` if a rank was refused, or its process
    ended.
    """
    most = _together()
    together = 1 if len(ranks) > 1 else most
    measure = partial(_measure, make, lengths, capacity_bytes, in_turn, together, other)
    found: dict[int, RankRun] = {}
    calls = {rank: partial(measure, rank) for rank in ranks}
    if after:
        calls[ranks[0]] = partial(_followed, calls[ranks[0]], after)
    with contextlib.closing(_each(calls, most, RankRun, "the dry run of rank {}", began)) as results:
        for rank, result in results:
            if isinstance(result, RankRun):
                found[rank] = result
            elif refused is None:
                raise result
            else:
                refused[rank] = result
    return found


def _followed(call: Callable[[], RankRun], after: Calls) -> RankRun:
    result = call()
    for name, further in after.items():
        try:
            result.after[name] = list(further())
        except Exception:  # as the process of the call alone would end
            continue
    return result


T = TypeVar("T")
K = TypeVar("K")


def _each(
    calls: Mapping[K, Callable[[], Any]],
    most: int,
    kind: type[T],
    what: str = "the dry run",
    began: Callable[[K], None] = lambda key: None,
) -> Generator[tuple[K, T | ConfigError]]:
    """Yield each call's result or refusal as they end, of forked processes, so many of which run at a time."""
    waiting = deque(calls)
    with selectors.DefaultSelector() as selector:
        children: dict[int, tuple[K, int, bytearray]] = {}
        try:
            while waiting or children:
                while waiting and len(children) < most:
                    began(waiting[0])
                    reading, child = _fork(calls[waiting[0]])
                    children[reading] = (waiting.popleft(), child, bytearray())
                    selector.register(reading, selectors.EVENT_READ)
                for key, _ in selector.select():
                    of, child, text = children[key.fd]
                    part = os.read(key.fd, 1 << 16)
                    text += part
                    if not part:
                        selector.unregister(key.fd)
                        del children[key.fd]
                        os.close(key.fd)
                        try:
                            yield of, _result(child, bytes(text), kind, what.format(of))
                        except ConfigError as error:
                            yield of, error
        finally:
            for reading, (_, child, _) in children.items():
                os.close(reading)
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def once(call: Callable[[], Any], kind: type[T]) -> T:
    """Return the result of a call in a forked process, sent as JSON.

    Raises ``ConfigError`` if the call was refused, or its process ended.
    """
    return _received(*_fork(call), kind)


class Beside:
    """Calls in forked processes beside dry runs that are made meanwhile, as many at a time as other dry runs.

    Used as a context, at whose end they end.
    """

    def __init__(self, calls: Calls) -> None:
        self._names = ", ".join(calls)
        self._child = _fork(partial(_completed, calls, _together())) if calls else None

    def __enter__(self) -> Self:
        return self

    def results(self, tell: Callable[[str], None]) -> dict[str, list[RankRun]]:
        """Return the results, without refused calls; ``tell`` is called with the calls before they are waited for."""
        if self._child is None:
            return {}
        tell(self._names)
        child, self._child = self._child, None
        return _received(*child, dict[str, list[RankRun]])

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            reading, child = self._child
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _completed(calls: Calls, most: int) -> dict[str, list[RankRun]]:
    results = _each(calls, most, list[RankRun])
    return {name: result for name, result in results if not isinstance(result, ConfigError)}


DEPTHS = (1, 2)  # Numbers of layers of shallow dry runs, whose difference is a layer's part


def whole(make: Callable[[int], "DryRun"], length: int, capacity: int | None, rank: int) -> list[RankRun]:
    """Return a rank's dry run in this process."""
    return [_measure(make, [length], capacity, False, 1, None, rank)]


def shallow(make: Callable[[int, int], "DryRun"], length: int, rank: int) -> list[RankRun]:
    """Return a rank's dry runs with ``DEPTHS`` of the layers, one after the other in this process."""
    return [_measure(partial(make, layers), [length], None, False, 1, None, rank) for layers in DEPTHS]


def _received(reading: int, child: int, kind: type[T]) -> T:
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    return _result(child, text, kind, "the dry run")


def _result(child: int, text: bytes, kind: type[T], what: str) -> T:
    """Return the result that an ended process has sent.

    Raises ``ConfigError`` if the call was refused, or the process ended without a result.
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
    make: Callable[[int], "DryRun"],
    lengths: Sequence[int],
    capacity: int | None,
    in_turn: bool,
    together: int,
    other: Settings | None,
    rank: int,
) -> RankRun:
    """Run one rank; of its lengths, each from an engine before its first step, so many are run ``together``."""
    dry: Any = make(rank)
    result = RankRun(dry.parameters, dry.trainable, dry.flops, dry.made, dry.positions, list(getattr(dry, "notes", [])))
    made = sum(os.times()[:4])
    outcome = partial(_outcome, dry, capacity, in_turn, other)
    children: deque[tuple[int, int]] = deque()

    def receive(most: int) -> None:
        while len(children) > most:
            result.outcomes.append(_received(*children.popleft(), Outcome))

    for length in lengths[:-1]:
        if in_turn:
            result.outcomes.append(outcome(length))
        else:
            receive(together - 1)
            children.append(_fork(partial(outcome, length)))
    receive(together - 1)
    last = outcome(lengths[-1])
    receive(0)
    result.outcomes.append(last)
    first = result.outcomes[0]
    result.outcomes[0] = msgspec.structs.replace(first, seconds=round(first.seconds + made, 2))
    return result


def _outcome(dry: "DryRun", capacity: int | None, in_turn: bool, other: Settings | None, length: int) -> Outcome:
    from .record import peaks

    before = sum(os.times()[:4])
    measured = dry.measure(length, in_turn)
    allocator, events = dry.job.allocator, measured.events
    found = _needs(Outcome(length, measured.rank), events, allocator, capacity)
    found = msgspec.structs.replace(found, work=measured.work, micro_step=measured.micro_step)
    if other is not None:
        highest = peaks(events, measured.start, other)
        highest["init"] = max(highest["init"][0], dry.making_bytes), max(highest["init"][1], dry.making_bytes)
        rank = msgspec.structs.replace(found.rank, phases={name: Phase(*sizes) for name, sizes in highest.items()})
        again = _needs(msgspec.structs.replace(found, rank=rank, fails_in="", tight=False), events, other, capacity)
        found = msgspec.structs.replace(found, other=again)
    return msgspec.structs.replace(found, seconds=round(sum(os.times()[:4]) - before, 2))


def _needs(found: Outcome, events: "Sequence[Event]", settings: Settings, capacity: int | None) -> Outcome:
    """Return an outcome with the memory that its rank needs, and whether it fits the capacity."""
    from . import record

    limits, rank = record.limits(events, settings), found.rank
    fails = "" if capacity is None else record.failing_phase(events, settings, limits, capacity)
    tight = False
    if capacity is not None and fails:
        tight = capacity >= record.least_that_fits(events, settings, limits, rank.allocated_peak_bytes)
    rank = msgspec.structs.replace(rank, needed_bytes=limits.needed_bytes)
    return msgspec.structs.replace(found, rank=rank, fails_in=fails, tight=tight)
