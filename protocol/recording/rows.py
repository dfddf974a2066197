"""Converts every message to a row of its table, and back, without loss.

Columns hold what is queried and drawn, in plain units. ``steps.rest`` is one msgpack array of a step's other figures
(``StepRest``); ``step_from_row_v1`` reads the steps of schema 1.
"""

import json
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import ProtocolError, RecordingError
from ..messages.control import Alert
from ..messages.hosts import Job
from ..messages.telemetry import (
    LAST_TIME,
    STEP_PHASES,
    Closing,
    DeviceSample,
    Hello,
    LogLine,
    PhaseRecord,
    ProcessMemory,
    Signs,
    Span,
    Step,
    Update,
)
from ..messages.wire import Frame, Message, decode_body, encode_body
from .opening import Guard
from .schema import PHASE_COLUMNS, STEP_COLUMNS

Row = tuple[Any, ...]
FIRST_PHASE_COLUMN = len(STEP_COLUMNS)
PHASE_WIDTH = len(PHASE_COLUMNS)
REST_COLUMN = FIRST_PHASE_COLUMN + len(STEP_PHASES) * PHASE_WIDTH
_NO_PHASE = (None,) * PHASE_WIDTH
_POSITIONS = {name: position for position, name in enumerate(STEP_PHASES)}
_NUMBERS = ("loss", "lr", "grad_norm")
_INFINITE, _NAN = float("inf"), float("nan")
_Margin = list[int]
"""How far a span is below another: at the start, and how much more at the end and at the peak; empty: equal."""


class _PhaseRest(msgspec.Struct, array_like=True, gc=False):
    """What a phase in the columns has besides them."""

    position: int
    gap_us: int  # from the end of the phase before it, if that ran without a break, to its start
    count: int
    allocations: int
    frees: int
    allocated_bytes: int
    collective_us: int
    collectives: int
    active: _Margin | None  # below `allocated`, as `requested`
    requested: _Margin | None
    resident: Span | None
    waited_us: int | None
    coarse: bool = False


class _Rare(msgspec.Struct, omit_defaults=True, gc=False):
    """What few steps have, as a map."""

    retries: int = 0
    ooms: int = 0
    dropped: int = 0
    overflow: bool = False
    updates: list[Update] = []
    not_numbers: list[str] = []  # the columns that are NaN, which SQLite stores as NULL
    others: list[PhaseRecord] = []  # phases without columns: of another name, or of a name that the step has twice
    signs: Signs | None = None


class StepRest(msgspec.Struct, array_like=True, gc=False):
    """What a step has besides its columns."""

    micro_steps: int
    samples: int
    padding: int  # padded tokens less tokens
    probe_us: int
    loss_scale: float | None
    batch_shape: list[int]
    label_tokens: int
    cpu_us: int
    flops: float | None
    fetch_us: int | None
    phases: list[_PhaseRest | None]  # all phases in the order they ran; None stands for the next of `rare.others`
    rare: _Rare
    batch_id: int = 0
    memory_every: int = 1


decode_rest = msgspec.msgpack.Decoder(StepRest).decode


def finite(value: float | None) -> int | None:
    """Return the flag of a figure, which SQLite stores as NULL if it is NaN: 1 for a finite number, 0 for none.

    None: it was not measured.
    """
    return None if value is None else int(-_INFINITE < value < _INFINITE)


def with_nan(value: Any, flag: Any) -> Any:
    """Return a figure of a column, NaN if its flag (``finite``) says that it was measured."""
    return _NAN if value is None and flag == 0 else value


def step_rows(seq: int, t: float, step: Step) -> tuple[Row, list[Row]]:
    """Return a row of ``steps``, and rows of ``extra_phases`` for the phases that have no columns there.

    Raises ``OverflowError`` if an invalid figure does not fit its column.
    """
    if step.started != step.started:
        raise OverflowError("a step that started at no time")
    columns: list[Row] = [_NO_PHASE] * len(STEP_PHASES)
    phases: list[_PhaseRest | None] = []
    others: list[PhaseRecord] = []
    extra: list[Row] = []
    ended = 0
    for phase in step.phases:
        position = _POSITIONS.get(phase.name, -1)
        if position < 0 or columns[position] is not _NO_PHASE:
            extra.append(_extra_row(seq, len(phases), t, step, phase))
            others.append(phase)
            phases.append(None)
            continue
        allocated, reserved = phase.allocated, phase.reserved
        columns[position] = (
            *(phase.host_us, phase.device_us, allocated.start, allocated.end, allocated.peak),
            *(reserved.start, reserved.end, reserved.peak),
        )
        phases.append(_phase_rest(position, phase, ended))
        ended = phase.start_us + phase.host_us
    numbers, spans = (step.loss, step.lr, step.grad_norm), step.phases
    nan = [name for name, value in zip(_NUMBERS, numbers, strict=True) if value != value]
    rare = _Rare(step.retries, step.ooms, step.dropped, step.overflow, step.updates, nan, others, step.signs)
    rest = StepRest(
        *(step.micro_steps, step.samples, step.padded_tokens - step.tokens, step.probe_us, step.loss_scale),
        *(step.batch_shape, step.label_tokens, step.cpu_us, step.flops or None, step.fetch_us, phases, rare),
        batch_id=step.batch_id,
        memory_every=step.memory_every,
    )
    row = (
        *(seq, t, step.rank, step.step, step.started, step.host_us, step.device_us, *numbers, step.tokens),
        max([phase.allocated.peak for phase in spans], default=0),
        max([phase.reserved.peak for phase in spans], default=0),
        max([phase.resident.peak for phase in spans if phase.resident is not None], default=None),
        *(*columns[0], *columns[1], *columns[2], *columns[3]),
        *(_encode(rest), finite(step.loss), finite(step.grad_norm)),
    )
    return row, extra


def _phase_rest(position: int, phase: PhaseRecord, ended: int) -> _PhaseRest:
    allocated = phase.allocated
    return _PhaseRest(
        *(position, phase.start_us - ended, phase.count, phase.allocations, phase.frees, phase.allocated_bytes),
        *(phase.collective_us, phase.collectives),
        None if phase.active is None else _margin(allocated, phase.active),
        None if phase.requested is None else _margin(allocated, phase.requested),
        *(phase.resident, phase.waited_us, phase.coarse),
    )


def _margin(span: Span, lower: Span) -> _Margin:
    if lower == span:
        return []
    first = span.start - lower.start
    return [first, span.end - lower.end - first, span.peak - lower.peak - first]


def _lower(span: Span, margin: _Margin | None) -> Span | None:
    if not margin:
        return None if margin is None else span
    first, end, peak = margin
    return Span(span.start - first, span.end - first - end, span.peak - first - peak)


def _extra_row(seq: int, position: int, t: float, of: Step | Closing, phase: PhaseRecord) -> Row:
    return (
        *(seq, position, t, of.rank, of.step, phase.name, phase.host_us, phase.device_us),
        *(phase.allocated.start, phase.allocated.end, phase.allocated.peak),
        *(phase.reserved.start, phase.reserved.end, phase.reserved.peak),
    )


def closing_rows(seq: int, t: float, closing: Closing) -> list[Row]:
    """Return the rows of ``extra_phases`` for the phases of a rank after its last step."""
    return [_extra_row(seq, position, t, closing, phase) for position, phase in enumerate(closing.phases)]


def update_rows(seq: int, t: float, step: Step) -> list[Row]:
    """Return the rows of ``updates``: one for each of several engines or optimizers; usually none."""
    who = (t, step.rank, step.step)
    return [
        (
            *(seq, position, *who, one.name, one.count, one.micro_steps, one.loss, one.lr, one.grad_norm),
            *(finite(one.loss), finite(one.grad_norm)),
        )
        for position, one in enumerate(step.updates)
    ]


def step_from_row(row: Sequence[Any]) -> Step:
    """Return the step of a row made by ``step_rows``.

    Raises ``msgspec.MsgspecError``, ``LookupError`` or ``TypeError`` for a row that no writer wrote.
    """
    _, _, rank, number, started, host_us, device_us, loss, lr, grad_norm, tokens = row[:11]
    rest = decode_rest(row[REST_COLUMN])
    rare = rest.rare
    phases: list[PhaseRecord] = []
    ended = 0
    for more in rest.phases:
        if more is None:
            phases.append(rare.others.pop(0))
            continue
        phases.append(_phase_from(row, more, ended))
        ended = phases[-1].start_us + phases[-1].host_us
    if rare.not_numbers:
        numbers = zip(_NUMBERS, (loss, lr, grad_norm), strict=True)
        loss, lr, grad_norm = (float("nan") if name in rare.not_numbers else value for name, value in numbers)
    return Step(
        *(rank, number, started, host_us, phases, device_us, rest.micro_steps, loss, lr, grad_norm, rest.loss_scale),
        *(rare.overflow, rest.batch_shape, rest.samples, tokens, tokens + rest.padding, rare.retries, rare.ooms),
        *(rest.probe_us, rare.dropped, rest.label_tokens, rare.updates, rest.cpu_us, rest.flops or 0.0, rest.fetch_us),
        *(rest.batch_id, rare.signs, rest.memory_every),
    )


def _phase_from(row: Sequence[Any], rest: _PhaseRest, ended: int) -> PhaseRecord:
    at = FIRST_PHASE_COLUMN + rest.position * PHASE_WIDTH
    host_us, device_us, start, end, peak, *reserved = row[at : at + PHASE_WIDTH]
    allocated = Span(start, end, peak)
    return PhaseRecord(
        *(STEP_PHASES[rest.position], ended + rest.gap_us, host_us, allocated, Span(*reserved), device_us),
        *(_lower(allocated, rest.active), _lower(allocated, rest.requested), rest.resident, rest.count),
        *(rest.allocations, rest.frees, rest.allocated_bytes, rest.collective_us, rest.collectives, rest.waited_us),
        rest.coarse,
    )


BODY_COLUMN = {"alerts": 13, "ranks": 11, "events": 4, "jobs": 18}
"""Index of the column with the whole message, by table. It is not always the last: later versions may add columns."""
NO_RANK = -1  # `events.rank` of a message without a rank
_COMPRESS_ABOVE = 512
_ZLIB_MAGIC = 0x78
_LARGEST = 8 * 2**20  # limit of an unpacked message in bytes. Its objects may need ten times as much memory.
_MOST_LISTS = 200_000
"""Limit on the lists and maps of a message: an empty one is 1 byte, and its object takes about 100."""
_LISTS = bytes((*range(0x80, 0xA0), 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xDC, 0xDD, 0xDE, 0xDF))
"""First bytes of maps, lists and short extensions in msgpack; other values may contain these bytes too."""
_COUNTED_ABOVE = 64 * 2**10
_encode = msgspec.msgpack.Encoder().encode
_decode_processes = msgspec.msgpack.Decoder(list[int]).decode


def pack_body(message: Message) -> bytes:
    """Encode a whole message, compressed above ``_COMPRESS_ABOVE`` bytes.

    A msgpack map never begins with zlib's first byte, which therefore marks a compressed message.
    """
    body = encode_body(message)
    return zlib.compress(body, 6) if len(body) > _COMPRESS_ABOVE else body


UNBELIEVABLE = (
    RecordingError, ProtocolError, msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError, RecursionError,
)  # fmt: skip
"""Errors of decoding a message from a row that ftmon did not write."""


def believed(message: Message) -> Message | None:
    """Return a message decoded from columns, or raise ``ProtocolError`` if no sender could have sent it."""
    return decode_body(encode_body(message))


def unpack_body(body: bytes, charge: Callable[[int], None] | None = None) -> Message | None:
    """Decode the result of ``pack_body``; None for a type that a newer version added.

    ``charge`` is called with the unpacked size and may raise to refuse it; a damaged body raises ``RecordingError``.
    """
    try:
        if body[:1] == bytes([_ZLIB_MAGIC]):
            inflater = zlib.decompressobj()
            body = inflater.decompress(body, _LARGEST)  # a few bytes of a hostile file may inflate to gigabytes
            if not inflater.eof:
                raise RecordingError("a message in the recording is cut off, or larger than any that is sent")
        if len(body) > _LARGEST:
            raise RecordingError("a message in the recording is larger than any that is sent")
        if len(body) > _COUNTED_ABOVE and len(body) - len(body.translate(None, _LISTS)) > _MOST_LISTS:
            raise RecordingError("a message in the recording has more lists than any that is sent")
        if charge is not None:
            charge(len(body))
        return decode_body(body)
    except (zlib.error, TypeError, ProtocolError) as error:
        raise RecordingError(f"a damaged message in the recording: {error}") from None


def alert_row(seq: int, t: float, alert: Alert) -> Row:
    """Return a row of ``alerts``."""
    return (
        *(seq, t, alert.id, alert.kind, alert.severity, alert.time, alert.rank, alert.step, alert.phase),
        *(alert.title, alert.text, alert.resolved, alert.count, pack_body(alert)),
    )


def hello_row(seq: int, t: float, hello: Hello) -> Row:
    """Return a row of ``ranks``."""
    return (
        *(seq, t, hello.rank, hello.local_rank, hello.host, hello.pid, hello.device.name),
        *(hello.device.capacity_bytes, hello.memory_measure, hello.model, hello.zero_stage, pack_body(hello)),
    )


def event_row(seq: int, t: float, message: Message) -> Row:
    """Return a row of ``events``, the table for all types without their own table."""
    rank = getattr(message, "rank", None)
    return (seq, t, message.__struct_config__.tag, NO_RANK if rank is None else rank, pack_body(message))


class NameNumbers:
    """Numbers, from ``first`` on, the devices and processes that device samples repeat, so that each is stored once."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._numbers: dict[Row, int] = {}

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the names and numbers of an earlier writer of this file."""
        for table in ("device_names", "process_names"):
            for number, *key in connection.execute(f"SELECT * FROM {table}"):
                self._numbers[tuple(key)] = number
                self._next = max(self._next, number + 1)

    def sample_row(self, seq: int, t: float, sample: DeviceSample, note: Callable[[str, Row], None]) -> Row:
        """Return a row of ``device_samples``; ``note(table, row)`` is called for each new name."""
        key = (
            *(sample.host, sample.kind, sample.index, sample.name, sample.uuid),
            *(sample.total_bytes, sample.power_limit_w),
        )
        device = self._number("device_names", key, note)
        flat: list[int] = []
        for process in sample.processes:
            identity = (process.pid, process.rank, process.name)
            flat += (self._number("process_names", identity, note), process.used_bytes)
        return (
            *(seq, t, device, sample.time, sample.used_bytes, sample.utilization_percent, sample.power_w),
            *(sample.temperature_c, sample.sm_clock_mhz, sample.memory_clock_mhz),
            *("\n".join(sample.throttle_reasons) or None, _encode(flat) if flat else None),
        )

    def _number(self, table: str, key: Row, note: Callable[[str, Row], None]) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
            note(table, (number, *key))
        return number


def sample_from_row(row: Sequence[Any], device: Row, processes: dict[int, Row]) -> DeviceSample:
    """Return the device sample of a row, its device's row of ``device_names`` (less its number) and all processes."""
    host, kind, index, name, uuid, total_bytes, power_limit_w = device
    time, used_bytes, utilization, power_w, temperature_c, sm_clock, memory_clock, reasons, packed = row[3:12]
    flat = _decode_processes(packed) if packed else []
    holders = [
        ProcessMemory(pid, used, rank, process)
        for number, used in zip(flat[::2], flat[1::2], strict=True)
        for pid, rank, process in [processes[number]]
    ]
    return DeviceSample(
        *(host, kind, index, name, time, used_bytes, total_bytes, uuid, utilization, power_w, power_limit_w),
        *(temperature_c, sm_clock, memory_clock, reasons.split("\n") if reasons else [], holders),
    )


class RowDecoder:
    """Decodes rows of the stream's tables.

    ``names`` returns all rows of ``device_names`` or ``process_names``; ``guard`` bounds the cost of unpacking.
    """

    def __init__(self, schema: int, names: Callable[[str], list[Row]], guard: Guard) -> None:
        self._step_from_row = step_from_row_v1 if schema == 1 else step_from_row
        self._names = names
        self._guard = guard
        self._devices: dict[int, Row] = {}
        self._processes: dict[int, Row] = {}

    def frame(self, table: str, row: Row) -> Frame | None:
        """Return the frame of a row; None if it is damaged, or of a type that a newer version added."""
        seq, t = row[0], row[1]
        if seq.__class__ is not int or t.__class__ not in (float, int) or not 0 <= t < LAST_TIME:
            return None
        try:
            message = self._message(table, row)
        except UNBELIEVABLE:
            return None
        return None if message is None else Frame(seq, float(t), message)

    def _message(self, table: str, row: Row) -> Message | None:
        if table == "steps":
            return believed(self._step_from_row(row))
        if table == "device_samples":
            return believed(self._sample(row))
        if table == "logs":
            return believed(LogLine(*row[2:6]))
        return self._guard.unpack(lambda: unpack_body(row[BODY_COLUMN[table]], self._guard.charge))

    def _sample(self, row: Row) -> DeviceSample:
        try:
            return sample_from_row(row, self._devices[row[2]], self._processes)
        except KeyError:
            self._devices = {number: tuple(rest) for number, *rest in self._names("device_names")}
            self._processes = {number: tuple(rest) for number, *rest in self._names("process_names")}
            return sample_from_row(row, self._devices[row[2]], self._processes)


def job_row(seq: int, t: float, job: Job) -> Row:
    """Return a row of ``jobs``."""
    resident = max((phase.resident_peak or 0 for rank in job.ranks for phase in rank.phases), default=0)
    return (
        *(seq, t, job.number, job.state, job.started, job.ended, job.text, job.world_size, job.restart),
        *(json.dumps(job.argv), int(job.shown), job.steps, job.step, job.loss, job.step_us),
        *(job.allocated_peak, job.reserved_peak, resident or None, pack_body(job)),
    )


def job_seqs(connection: sqlite3.Connection, seq: int) -> list[int]:
    """Return the numbers, up to ``seq``, of each job's first row, first row as the stream's job, and last row."""
    query = """SELECT min(seq), min(CASE WHEN shown THEN seq END), max(seq) FROM jobs WHERE seq <= ? GROUP BY number"""
    return sorted({found for row in connection.execute(query, (seq,)) for found in row if found is not None})


def shown_since(connection: sqlite3.Connection, seq: int) -> int:
    """Return the number of the row at which the stream's job at ``seq`` began; 0 before any job, or with one job."""
    query = "SELECT min(seq) FROM jobs WHERE shown AND seq <= ? GROUP BY number ORDER BY 1 DESC LIMIT 2"
    rows = connection.execute(query, (seq,)).fetchall()
    return rows[0][0] if len(rows) > 1 else 0


def training_since(connection: sqlite3.Connection) -> int:
    """Return the same for the last training: its job was not started again by ``torchrun --max-restarts``."""
    query = "SELECT min(seq) FROM jobs WHERE shown AND restart = 0 GROUP BY number ORDER BY 1 DESC LIMIT 2"
    rows = connection.execute(query).fetchall()
    return rows[0][0] if len(rows) > 1 else 0


_V1_FIRST_COLUMN, _V1_WIDTH = 14, 8
_DETAIL_COLUMN = _V1_FIRST_COLUMN + len(STEP_PHASES) * _V1_WIDTH
_BLOCK = 512
"""``allocated_bytes`` is in blocks of 512 bytes; -1 less the bytes if it is no multiple."""

# Bits of detail[0].
_OVERFLOW, _LOSS_NAN, _LR_NAN, _NORM_NAN, _ACTIVE, _REQUESTED, _RESIDENT = (1 << bit for bit in range(7))
_HEAD = 11
"""Entries of ``detail`` before those of the phases, which a map of the rarer figures follows, if there are any."""
_decode = msgspec.msgpack.Decoder().decode


def step_from_row_v1(row: Sequence[Any]) -> Step:
    """Return the step of a row of schema 1, in which most figures are differences from a close figure."""
    detail: list[Any] = _decode(row[_DETAIL_COLUMN])
    bits, micro_steps, samples, padding, retries, ooms, probe_us, dropped, loss_scale, shape, order = detail[:_HEAD]
    nan = float("nan")
    _, _, rank, number, started, host_us, device_us, loss, lr, grad_norm, tokens = row[:11]
    rest: dict[str, Any] = detail[-1] if len(detail) > _HEAD and isinstance(detail[-1], dict) else {}
    phases = _phases_from_row_v1(row, detail, bits, micro_steps, rest.get("waited", {}))
    if order is not None:
        by_position = {STEP_PHASES.index(phase.name): phase for phase in phases}
        phases = [
            by_position[place] if isinstance(place, int) else msgspec.convert(place, PhaseRecord) for place in order
        ]
    return Step(
        *(rank, number, started, host_us, phases, device_us, micro_steps),
        *(nan if bits & _LOSS_NAN else loss, nan if bits & _LR_NAN else lr, nan if bits & _NORM_NAN else grad_norm),
        *(loss_scale, bool(bits & _OVERFLOW), shape or [], samples, tokens, tokens + padding, retries, ooms),
        *(probe_us, dropped),
        label_tokens=rest.get("labels", 0),
        updates=msgspec.convert(rest.get("updates", []), list[Update]),
        cpu_us=rest.get("cpu", 0),
        flops=rest.get("flops", 0.0),
        fetch_us=rest.get("fetch"),
    )


def _phases_from_row_v1(
    row: Sequence[Any], detail: list[Any], bits: int, micro_steps: int, waited: dict[str, int]
) -> list[PhaseRecord]:
    allocated_top, reserved_top, resident_top = row[11], row[12], row[13] or 0
    allocated_end, reserved_end, resident_end = allocated_top, reserved_top, resident_top
    at, column = _HEAD, _V1_FIRST_COLUMN
    ended = slack = 0
    phases: list[PhaseRecord] = []
    for name in STEP_PHASES:
        host_us, device_us, a_from, a_growth, a_below, r_from, r_growth, r_below = row[column : column + _V1_WIDTH]
        column += _V1_WIDTH
        if host_us is None:
            continue
        start = allocated_end + a_from
        end, peak = start + a_growth, allocated_top - a_below
        reserved_start = reserved_end + r_from
        reserved = Span(reserved_start, reserved_start + r_growth, reserved_top - r_below)
        allocated_end, reserved_end = end, reserved.end
        start_us, count, allocations, kept, size, collective_us, collectives = detail[at : at + 7]
        at += 7
        start_us += ended
        ended = start_us + host_us
        active = requested = resident = None
        if bits & _ACTIVE:
            active = Span(start + detail[at], end + detail[at + 1], peak + detail[at + 2])
            at += 3
        if bits & _REQUESTED:
            rounding = slack + detail[at]
            slack = rounding + detail[at + 1]
            requested = Span(start - rounding, end - slack, peak - rounding - detail[at + 2])
            at += 3
        if bits & _RESIDENT:
            first = resident_end + detail[at]
            resident_end = first + detail[at + 1]
            resident = Span(first, resident_end, resident_top - detail[at + 2])
            at += 3
        phases.append(
            PhaseRecord(
                *(name, start_us, host_us, Span(start, end, peak), reserved, device_us, active, requested, resident),
                count=count + micro_steps,
                allocations=allocations,
                frees=allocations - kept,
                allocated_bytes=-1 - size if size < 0 else size * _BLOCK,
                collective_us=collective_us,
                collectives=collectives,
                waited_us=waited.get(name),
            )
        )
    return phases
