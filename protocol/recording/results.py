"""Results of history queries, as structs: the same from a file and, by ``Query``, from the hub of a run."""

from typing import Any

import msgspec

from ..errors import ProtocolError
from ..messages.control import Alert
from ..messages.wire import UNREADABLE, Frame, decode_body
from .phase_peaks import PeakMark

_OPEN_STATES = ("", "starting", "training", "stopping")
"""States of a run whose end is not recorded."""


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
    """When the run was created."""
    first_t: float
    last_t: float
    """The recording's end: the time of the last message, or the latest time before the clock was set back."""
    first_seq: int
    last_seq: int
    steps: int
    """Rank-steps: one for each step of each rank."""
    ranks: list[int]
    schema: int
    complete: bool
    """The recording was closed properly and nothing is missing."""
    missing: str = ""
    """What is missing, as text; empty: nothing, or the run is still being recorded."""
    state: str = ""
    """The run's last known state."""
    exit_code: int | None = None
    last_step: int = 0
    host: str = ""
    kind: str = ""
    live: bool = False
    """A hub on this host is writing it."""
    open_errors: list[str] = []
    """Kinds of the alerts of severity ``error`` that are not resolved."""
    model: str = ""
    """The trained model, as the ranks reported it last."""
    loss: float | None = None
    """Loss of the last step that all ranks recorded, mean over ranks."""
    evaluation_loss: float | None = None
    """Loss of the last evaluation; with several data sets, of the one that is evaluated first."""
    state_text: str = ""
    """Reason of the run's last known state."""
    failure: str = ""
    """Title of the alert that explains why the run failed (``protocol.run.failure``); empty: none."""


class MemoryColumn(msgspec.Struct, frozen=True, omit_defaults=True):
    """Memory of one rank in one column of a graph, pooled by maximum. Columns without a step are omitted."""

    rank: int
    index: int
    """Index of the column; 0 begins at ``t0``."""
    allocated_peak: int
    reserved_peak: int
    resident_peak: int | None = None
    """Highest resident set (CPU only, where it is the true high-water mark)."""
    spike: bool = False
    """A spike alert of this rank falls into the column."""


class StepPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a rank, or several pooled: times are means, peaks maxima, ``t`` and ``step`` those of the last."""

    t: float
    step: int
    host_ms: float
    allocated_peak: int
    reserved_peak: int
    device_ms: float | None = None
    loss: float | None = None
    resident_peak: int | None = None
    phase_ms: dict[str, float] = {}
    """Host time of each ordinary phase."""
    phase_device_ms: dict[str, float] = {}
    max_host_ms: float = 0.0
    """The longest of the pooled steps."""
    count: int = 1
    """Number of pooled steps."""


class TrainingPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Figures of one step of a rank, or of several pooled: counts and times are sums, the rest are means over steps."""

    t: float
    """When the hub received the (last) step."""
    step: int
    """The (last) step."""
    first_step: int
    count: int = 1
    """Number of pooled steps."""
    training_us: int = 0
    """Host time without evaluations and checkpoints."""
    tokens: int = 0
    label_tokens: int = 0
    flops: float = 0.0
    """FLOPs of the model (``ftmon.protocol.messages.throughput``); 0: unknown."""
    loss: float | None = None
    """Weighted by label tokens if they are known. NaN counts as unknown, here and below."""
    low_loss: float | None = None
    high_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    max_grad_norm: float | None = None
    data_us: int = 0
    """Time waiting for the next batch, on the clock of ``whole_us``."""
    whole_us: int = 0
    """The total of which ``data_us`` is a share: device time if it was measured, else host time."""


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
    """Return the result of a history query, checked against its type: a column of the file may hold anything.

    Raises:
        msgspec.ValidationError: it is not of that type.
    """
    return _decoders[name].decode(_encoder.encode(result)) if name in _CHECKED else result


def answer_query(source: Any, name: str, args: dict[str, Any]) -> bytes:
    """Run a ``Query`` on ``source`` (a ``Reader``); return the result encoded for an ``Answer``.

    Raises:
        ProtocolError: unknown query, or invalid arguments.
        RecordingError: the recording cannot answer.
    """
    if name not in RESULTS:
        raise ProtocolError(f"no history query is called {name!r}; there are {', '.join(RESULTS)}")
    try:
        return _encoder.encode(getattr(source, name)(**args))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the history query {name!r} does not take these arguments: {error}") from None


def decode_answer(name: str, data: bytes) -> Any:
    """Decode the ``data`` of an ``Answer`` to the query ``name`` into its type in ``RESULTS``.

    Messages of a type that this version does not know are left out, as in the live stream.

    Raises:
        ProtocolError: the query is unknown, or the data is not of its type.
    """
    decoder = _decoders.get(name)
    if decoder is None:
        raise ProtocolError(f"no history query is called {name!r}")
    try:
        return decoder.decode(data)
    except UNREADABLE as error:
        if RESULTS[name] != list[Frame]:
            raise ProtocolError(f"not an answer to the history query {name!r}: {error}") from None
    try:
        raw = _raw_frames.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"not an answer to the history query {name!r}: {error}") from None
    decoded = ((frame, decode_body(bytes(frame.message))) for frame in raw)
    return [Frame(frame.seq, frame.t, message) for frame, message in decoded if message is not None]
