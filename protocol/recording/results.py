"""Results of history queries, as structs: the same from a file and, by ``Query``, from the hub of a run."""

import contextlib
import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from math import log2, prod
from typing import Any

import msgspec

from ..errors import ProtocolError
from ..messages.control import Alert
from ..messages.hosts import Job
from ..messages.memory import Cause, Composition
from ..messages.telemetry import MAX_RANKS, Step
from ..messages.wire import UNREADABLE, Frame, Message, decode_body
from .rows import shown_since

RISE_SHARE = 0.002
RISE_BYTES = 2**20
"""A mark is set by a peak higher than the last mark by both of these: a run of a million steps has some dozens."""
BUCKETS_AN_OCTAVE = 16  # batches whose sizes differ by less than a sixteenth of an octave (4 %) count as one size


class PeakMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase reached a new highest peak with batches of this size.

    ``ftmon.tui.model.peaks`` derives from the marks which phase makes the peak, at which lengths, since when.
    """

    rank: int
    step: int
    phase: str
    bytes: int  # peak of `allocated`, or of the resident set on a CPU
    shape: list[int] = []  # shape of the step's largest micro-batch; empty: unknown

    @property
    def size(self) -> int:
        """Elements of that batch; 0: unknown."""
        return size_of(self.shape)


def size_of(shape: list[int]) -> int:
    """Return the number of elements of a batch; 0 for an unknown or invalid shape."""
    return max(0, prod(shape)) if shape else 0


def bucket_of(shape: list[int]) -> int:
    """Return the bucket number of a batch's size, which similar sizes share; -1: unknown."""
    size = size_of(shape)
    return int(log2(size) * BUCKETS_AN_OCTAVE) if size > 0 else -1


class PhasePeaks:
    """The marks of one rank. Steps are added in order; a later mark of a size and phase replaces the earlier ones."""

    __slots__ = ("_highest", "_of_shape", "_shape", "marks")

    def __init__(self) -> None:
        self.marks: list[PeakMark] = []  # in the order they were set
        self._highest: dict[int, dict[str, int]] = {}  # the bytes that the next mark must exceed, by bucket and phase
        self._shape: list[int] | None = None
        self._of_shape: dict[str, int] = {}

    def see(self, step: Step) -> list[PeakMark]:
        """Add a step; return the marks it sets, usually none."""
        if step.batch_shape != self._shape:
            self._shape, self._of_shape = step.batch_shape, self._highest_of(step.batch_shape)
        found = [
            PeakMark(step.rank, step.step, record.name, record.peak_span.peak, step.batch_shape)
            for record in step.phases
            if record.peak_span.peak > self._of_shape.get(record.name, 0)
            and step.owns_peak(record, max(self._of_shape.values(), default=0))
        ]
        for mark in found:
            self.put(mark)
        return found

    def put(self, mark: PeakMark) -> None:
        """Add a mark that was set elsewhere."""
        highest = self._highest_of(mark.shape)
        limit = max(int(mark.bytes * (1 + RISE_SHARE)), mark.bytes + RISE_BYTES)
        highest[mark.phase] = max(highest.get(mark.phase, 0), limit)
        self.marks.append(mark)

    def _highest_of(self, shape: list[int]) -> dict[str, int]:
        return self._highest.setdefault(bucket_of(shape), {})


_OPEN_STATES = ("", "starting", "training", "stopping")  # states of a run whose end is not recorded


def run_state(recorded: str, live: bool) -> str:
    """Return the state of a run whose recording ends with the state ``recorded``: ``lost`` if it never ended."""
    if recorded not in _OPEN_STATES:
        return recorded
    return (recorded or "starting") if live else "lost"


class RecordingInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Contents of a recording. Times are seconds since the epoch; an empty recording has zeros."""

    run_id: str
    name: str
    command: list[str]
    started: float
    first_t: float
    last_t: float  # the recording's end: the time of the last message, or the latest time before the clock was set back
    first_seq: int
    last_seq: int
    steps: int  # rank-steps: one for each step of each rank
    ranks: list[int]
    schema: int
    complete: bool  # the recording was closed properly and nothing is missing
    missing: str = ""  # what is missing, as text; empty: nothing, or the run is still being recorded
    state: str = ""
    exit_code: int | None = None
    last_step: int = 0
    host: str = ""
    kind: str = ""
    live: bool = False  # a hub on this host is writing it
    open_errors: list[str] = []  # kinds of the alerts of severity `error` that are not resolved
    model: str = ""  # the trained model, as the ranks reported it last
    loss: float | None = None  # loss of the last step that all ranks recorded, mean over ranks
    evaluation_loss: float | None = None
    """Loss of the last evaluation; with several data sets, of the one that is evaluated first."""
    state_text: str = ""  # reason of the run's last known state
    failure: str = ""  # title of the alert that explains why the run failed (`protocol.run.failure`); empty: none


class MemoryColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of one rank in one column of a graph, pooled by maximum. Columns without a step are omitted."""

    rank: int
    index: int  # index of the column; 0 begins at `t0`
    allocated_peak: int
    reserved_peak: int
    resident_peak: int | None = None  # highest resident set (CPU only, where it is the true high-water mark)
    spike: bool = False  # a spike alert of this rank falls into the column


class StepPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a rank, or several pooled: times are means, peaks maxima, ``t`` and ``step`` those of the last."""

    t: float
    step: int
    host_ms: float
    allocated_peak: int
    reserved_peak: int
    resident_peak: int | None = None
    count: int = 1


class TrainingPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures of one step of a rank, or of several pooled: counts and times are sums, the rest are means over steps."""

    t: float  # when the hub received the (last) step
    step: int  # the (last) step
    first_step: int
    count: int = 1
    training_us: int = 0  # host time without evaluations and checkpoints
    tokens: int = 0
    label_tokens: int = 0
    flops: float = 0.0  # FLOPs of the model (`ftmon.protocol.host.machine`); 0: unknown
    loss: float | None = None  # weighted by label tokens if they are known. NaN counts as unknown, here and below.
    low_loss: float | None = None
    high_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    max_grad_norm: float | None = None
    data_us: int = 0  # time waiting for the next batch, on the clock of `whole_us`
    whole_us: int = 0  # the total of which `data_us` is a share: device time if it was measured, else host time
    loss_not_finite: int = 0  # steps whose loss was NaN or infinite; before schema 3 only the infinite ones are known
    grad_norm_not_finite: int = 0  # the same of the gradient norm


RESULTS: dict[str, Any] = {
    "info": RecordingInfo,
    "frames": list[Frame],
    "state_at": list[Frame],
    "memory": list[MemoryColumn],
    "series": list[StepPoint],
    "training": list[TrainingPoint],
    "alerts": list[Alert],
    "logs": list[Frame],
    "marks": list[PeakMark],
    "sampled": list[Frame],
    "jobs": list[Frame],
    "step_time": float | None,
    "seq_at": int,
}
"""The history queries: methods of ``Reader`` by name, with the types of their results."""


class _RawFrame(msgspec.Struct):
    seq: int
    t: float
    message: msgspec.Raw


_raw_frames = msgspec.msgpack.Decoder(list[_RawFrame])
_decoders = {name: msgspec.msgpack.Decoder(kind) for name, kind in RESULTS.items()}
_encoder = msgspec.msgpack.Encoder()
_CHECKED = ("info", "memory", "series", "training", "marks")
"""Queries whose results are read from columns; frames and alerts were checked message by message."""


def held_to_type(name: str, result: Any) -> Any:
    """Return the result of a query, or raise ``msgspec.ValidationError``: a column of the file may hold anything."""
    return _decoders[name].decode(_encoder.encode(result)) if name in _CHECKED else result


def answer_query(source: Any, name: str, args: dict[str, Any]) -> bytes:
    """Run a ``Query`` on ``source`` (a ``Reader``); return the result encoded for an ``Answer``.

    Raises ``ProtocolError`` for an unknown query or invalid arguments, ``RecordingError`` if there is no answer.
    """
    if name not in RESULTS:
        raise ProtocolError(f"no history query is called {name!r}; there are {', '.join(RESULTS)}")
    try:
        return _encoder.encode(getattr(source, name)(**args))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the history query {name!r} does not take these arguments: {error}") from None


def decode_answer(name: str, data: bytes) -> Any:
    """Decode the ``data`` of an ``Answer`` to the query ``name`` by ``RESULTS``, or raise ``ProtocolError``.

    Messages of a type that this version does not know are left out, as in the live stream.
    """
    decoder = _decoders.get(name)
    if decoder is None:
        raise ProtocolError(f"no history query is called {name!r}")
    try:
        with contextlib.suppress(*UNREADABLE if RESULTS[name] == list[Frame] else ()):
            return decoder.decode(data)
        raw = _raw_frames.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"not an answer to the history query {name!r}: {error}") from None
    decoded = ((frame, decode_body(bytes(frame.message))) for frame in raw)
    return [Frame(frame.seq, frame.t, message) for frame, message in decoded if message is not None]


Row = tuple[Any, ...]
MARK_LIMIT = 100_000


class Marks:
    """Derives the rows of two tables from the stream; ``emit(table, row)`` is called for each row.

    ``marks`` has the steps in which a phase reached a new highest peak with batches of that size. ``explained`` has the
    stream numbers of the compositions with a rank's highest peak so far, and of the causes of transients. Both are made
    again if they were lost.
    """

    def __init__(self, emit: Callable[[str, Row], None]) -> None:
        self._emit = emit
        self._peaks: defaultdict[int, PhasePeaks] = defaultdict(PhasePeaks)
        self._composed: dict[int, int] = {}  # highest analysed peak of each rank, bytes
        self._job = 0

    def load(self, connection: sqlite3.Connection) -> None:
        """Continue where an earlier writer of this file ended."""
        since = shown_since(connection, 1 << 62)
        for mark in read_marks(connection, since):
            self._peaks[mark.rank].put(mark)
        highest = "SELECT rank, max(bytes) FROM explained WHERE kind = 'composition' AND seq >= ? GROUP BY rank"
        self._composed = dict(connection.execute(highest, (since,)).fetchall())
        last = "SELECT number FROM jobs WHERE shown ORDER BY seq DESC LIMIT 1"
        self._job = next((number for (number,) in connection.execute(last)), 0)

    def step(self, seq: int, step: Step) -> None:
        """Add a step."""
        for mark in self._peaks[step.rank].see(step):
            shape = json.dumps(mark.shape) if mark.shape else None
            self._emit("marks", (mark.rank, seq, mark.step, mark.phase, mark.bytes, shape))

    def message(self, seq: int, message: Message) -> None:
        """Add any other message; most are ignored."""
        if isinstance(message, Cause):
            found = (seq, "cause", message.rank, message.step, message.phase, message.transient_bytes)
            self._emit("explained", found)
        elif isinstance(message, Composition):
            top = message.peak_phase
            if top is not None and top.peak_bytes > self._composed.get(message.rank, 0):
                self._composed[message.rank] = top.peak_bytes
                row = (seq, "composition", message.rank, message.step, top.name, top.peak_bytes)
                self._emit("explained", row)

    def job(self, job: Job) -> None:
        """Reset with each new job in the stream: its peaks are compared only with its own."""
        if job.shown and not job.is_over and job.number != self._job:
            self._job = job.number
            self._peaks.clear()
            self._composed.clear()


def read_marks(connection: sqlite3.Connection, first: int) -> list[PeakMark]:
    """Read the marks set since a stream number, by rank and then in the order they were set."""
    query = f"""SELECT rank, step, phase, bytes, shape FROM marks WHERE seq >= ?
        ORDER BY rank, seq LIMIT {MARK_LIMIT}"""
    return [
        PeakMark(rank, step, phase, size, _shape(shape))
        for rank, step, phase, size, shape in connection.execute(query, (first,))
        if rank.__class__ is int and 0 <= rank < MAX_RANKS
    ]


def explained_seqs(connection: sqlite3.Connection, seq: int, first: int = 0) -> list[int]:
    """Return the numbers of each rank's composition with the highest peak and of the last cause of each of its phases.

    Only the numbers from ``first`` to ``seq`` are searched.
    """
    query = """SELECT max(seq) FROM explained WHERE seq BETWEEN ? AND ?
        GROUP BY kind, rank, CASE kind WHEN 'cause' THEN phase END"""
    return [found for (found,) in connection.execute(query, (first, seq))]


def _shape(text: str | None) -> list[int]:
    try:
        return msgspec.json.decode(text, type=list[int]) if text else []
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return []
