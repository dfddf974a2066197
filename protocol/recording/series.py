"""Reads a recording as series of typed columns: steps, phases, evaluations, alerts, devices.

Rows are read in the order of the stream, a part at a time, straight from the file's columns: no messages are made of
steps. ``docs/recording.md`` describes the columns.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import msgspec

from ..messages.telemetry import STEP_PHASES, Closing, Evaluation, PhaseRecord, Span
from ..messages.wire import Frame
from .rows import (
    FIRST_PHASE_COLUMN,
    PHASE_WIDTH,
    REST_COLUMN,
    UNBELIEVABLE,
    Row,
    StepRest,
    decode_rest,
    finite,
    step_from_row_v1,
    step_rows,
)
from .schema import STEP_COLUMNS

_SPAN = ("start_bytes", "end_bytes", "peak_bytes")
_ORDER: dict[str, type] = {"seq": int, "time_s": float, "rank": int, "step": int}
_OWN: dict[str, dict[str, type]] = {
    "steps": {
        **_ORDER, "started_s": float, "host_us": int, "device_us": int, "training_us": int, "loss": float,
        "loss_finite": bool, "lr": float, "grad_norm": float, "grad_norm_finite": bool, "loss_scale": float,
        "overflow": bool, "micro_steps": int, "samples": int, "tokens": int, "padded_tokens": int,
        "label_tokens": int, "flops": float, "mfu": float, "fetch_us": int, "cpu_us": int, "probe_us": int,
        "allocated_peak_bytes": int, "reserved_peak_bytes": int, "resident_peak_bytes": int,
    },
    "phases": {
        **_ORDER, "phase": str, "started_s": float, "host_us": int, "device_us": int, "waited_us": int,
        "collective_us": int, "collectives": int, "count": int, "allocations": int, "coarse": bool,
        **{f"{figure}_{part}": int for figure in ("allocated", "reserved", "resident") for part in _SPAN},
    },
    "evaluations": {
        **_ORDER, "ended_s": float, "name": str, "loss": float, "loss_finite": bool, "perplexity": float,
        "label_tokens": int, "duration_s": float, "best": bool, "metrics_json": str,
    },
    "alerts": {
        **_ORDER, "id": int, "kind": str, "severity": str, "raised_s": float, "resolved_s": float, "phase": str,
        "title": str, "text": str, "count": int,
    },
    "devices": {
        "seq": int, "time_s": float, "sampled_s": float, "host": str, "kind": str, "index": int, "name": str,
        "uuid": str, "used_bytes": int, "total_bytes": int, "utilization_percent": float, "power_w": float,
        "power_limit_w": float, "temperature_c": float, "sm_clock_mhz": int, "memory_clock_mhz": int,
        "throttle_reasons": str,
    },
}  # fmt: skip
SERIES = {name: {**own, "job": int} if "step" in own else own for name, own in _OWN.items()}
"""The columns of each series with their types, in order; ``bool`` is written as 0 or 1. A figure that was not measured
is None; NaN and infinite figures are kept, and have 0 in the ``_finite`` column beside them."""


class Part(NamedTuple):
    """Consecutive rows of a series."""

    last_seq: int  # stream number of the last row read; the next part begins after it
    columns: list[list[Any]]  # values by column, in the order of `SERIES`


_TABLES = {
    "steps": f"SELECT {', '.join(STEP_COLUMNS)}, rest, loss_finite, grad_norm_finite, training_us, label_tokens, "
    "flops, mfu FROM steps LEFT JOIN training_steps USING(seq) WHERE seq > ? ORDER BY seq LIMIT ?",
    "phases": "SELECT * FROM steps WHERE seq > ? ORDER BY seq LIMIT ?",
    "evaluations": "SELECT * FROM events WHERE type = 'evaluation' AND seq > ? ORDER BY seq LIMIT ?",
    "alerts": "SELECT seq, t, rank, step, id, kind, severity, time, resolved, phase, title, text, count FROM alerts "
    "WHERE seq > ? ORDER BY seq LIMIT ?",
    "devices": 'SELECT seq, t, time, host, kind, "index", name, uuid, used_bytes, total_bytes, utilization_percent, '
    "power_w, power_limit_w, temperature_c, sm_clock_mhz, memory_clock_mhz, replace(throttle_reasons, char(10), '; ') "
    "FROM device_samples JOIN device_names USING(device) WHERE seq > ? ORDER BY seq LIMIT ?",
}
_STEPS_V1 = (
    "SELECT steps.*, training_us, label_tokens, flops, mfu FROM steps LEFT JOIN training_steps USING(seq) "
    "WHERE seq > ? ORDER BY seq LIMIT ?"
)
_JOB_AT = "SELECT max(number) FROM (SELECT number FROM jobs WHERE shown AND seq <= ? ORDER BY seq DESC LIMIT 64)"
"""Does not read all rows, tens of thousands in a long run: few of an earlier job come after the next has begun."""
_JOBS = "SELECT number, min(seq) FROM jobs WHERE shown AND seq > ? AND seq <= ? GROUP BY number ORDER BY 2"
_CLOSINGS = "SELECT * FROM events WHERE type = 'closing' AND seq > ? AND seq <= ? ORDER BY seq"
_AT = {name: place for place, name in enumerate(STEP_COLUMNS)}
_END, _NAN, _BLOCK = 1 << 62, float("nan"), 256
_MOST_PHASES = 64  # above the phases of any step; a hostile file may name thousands in a few bytes each

Read = Callable[[str, Row], list[Row]]  # runs a query with its values
Decode = Callable[[str, Row], Frame | None]  # decodes a row of a table of messages; None: damaged


def read_part(read: Read, decode: Decode, schema: int, series: str, place: tuple[int, int]) -> Part | None:
    """Return the rows of a series after a stream number, at most a number of rows of its table (``place``).

    None: there are no more. A value of another type than its column's, which no writer writes, is None.
    """
    after = place[0]
    old = schema == 1 and series in ("steps", "phases")
    rows = read(_STEPS_V1 if old else _TABLES[series], place)
    last, full = (rows[-1][0] if rows else after), len(rows) == place[1]
    if old:
        rows = [*_converted(rows, series)]
    if series == "steps":
        columns = _steps(rows)
    elif series == "phases":
        frames = [decode("events", row) for row in read(_CLOSINGS, (after, last if full else _END))]
        closings = [phase for frame in frames if frame is not None for phase in _closing(frame)]
        last = max([last, *(frame.seq for frame in frames if frame is not None)])
        phases = [*(phase for row in rows for phase in _phases(row)), *closings]
        columns = _transposed(sorted(phases, key=itemgetter(0)))
    elif series == "evaluations":
        columns = _transposed([one for row in rows if (one := _evaluation(decode("events", row))) is not None])
    else:
        columns = _transposed(rows)
    if last <= after:  # less in a damaged file
        return None
    kinds = SERIES[series].values()
    if columns and "job" in SERIES[series]:
        columns.append(_jobs(columns[0], read(_JOB_AT, (after,))[0][0], read(_JOBS, (after, last))))
    return Part(last, list(map(_typed, columns, kinds)) if columns else [[] for _ in kinds])


def _jobs(seqs: Sequence[int], number: Any, begins: Sequence[Row]) -> list[int]:
    """Return the number of the job of each row, from that before the first and the rows at which others begin."""
    found: list[int] = []
    current = number if number.__class__ is int else 1
    for following, seq in begins:
        if following.__class__ is int and following > current:
            found += [current] * (bisect_left(seqs, seq) - len(found))
            current = following
    return found + [current] * (len(seqs) - len(found))


def _transposed(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the columns of rows, a block at a time: of all at once, every value would miss the processor's cache."""
    columns: list[list[Any]] = [[] for _ in rows[0]] if rows else []
    for at in range(0, len(rows), _BLOCK):
        for column, values in zip(columns, zip(*rows[at : at + _BLOCK], strict=True), strict=True):
            column += values
    return columns


def _typed(values: list[Any], kind: type) -> list[Any]:
    """Return values of one type, or None; 0 and 1 for ``bool``."""
    kinds = {*map(type, values)}
    if kinds <= {kind, type(None)} and kind is not bool:
        return values
    if kind is bool:
        plain = kinds <= {int, type(None)} and {*values} <= {0, 1, None}
        return values if plain else [int(value) if value in (0, 1) else None for value in values]
    wider = (int, float) if kind is float else kind
    return [kind(value) if isinstance(value, wider) else None for value in values]


def _converted(rows: Sequence[Row], series: str) -> Iterator[Row]:
    """Convert rows of schema 1, which has differences in its columns, to those that the queries of schema 2 give."""
    for row in rows:
        try:
            new, _ = step_rows(row[0], row[1], step_from_row_v1(row))
        except UNBELIEVABLE:
            continue
        yield (*new[:FIRST_PHASE_COLUMN], *new[REST_COLUMN:], *row[-4:]) if series == "steps" else new


def _rest(packed: Any) -> StepRest | None:
    try:
        return decode_rest(packed)
    except (msgspec.MsgspecError, TypeError):
        return None


def _finite(value: Any) -> int | None:
    return finite(value) if value.__class__ is float else None


_FIELDS = (
    "micro_steps", "samples", "padding", "probe_us", "loss_scale", "label_tokens", "cpu_us", "flops", "fetch_us",
    "rare",
)  # fmt: skip
_fields = attrgetter(*_FIELDS)


def _steps(rows: Sequence[Row]) -> list[list[Any]]:
    """Return the columns of ``steps``."""
    if not rows:
        return []
    seq, t, rank, step, started, host_us, device_us, loss, lr, grad_norm, tokens, *more = _transposed(rows)
    peaks, (packed, *flags, training_us, labels, flops, mfu) = more[:-7], more[-7:]
    rests = [(None,) * len(_FIELDS) if one is None else _fields(one) for one in map(_rest, packed)]
    micro_steps, samples, padding, probe_us, loss_scale, own_labels, cpu_us, own_flops, fetch_us, rare = _transposed(
        rests
    )
    numbers = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
    finites = {"loss": flags[0], "grad_norm": flags[1]}
    lost = [(place, one.not_numbers) for place, one in enumerate(rare) if one is not None and one.not_numbers]
    for name in {name for _, names in lost for name in names} & numbers.keys():
        changed = list(numbers[name])
        for place, names in lost:
            changed[place] = _NAN if name in names else changed[place]
            if name in names and name in finites:  # earlier schemas have no flags
                finites[name][place] = 0
        numbers[name] = changed
    pairs = zip(tokens, padding, strict=True)
    return [
        *(seq, t, rank, step, started, host_us, device_us),
        [host if own is None else own for own, host in zip(training_us, host_us, strict=True)],
        *(numbers["loss"], flags[0], numbers["lr"], numbers["grad_norm"], flags[1]),
        *(loss_scale, [None if one is None else int(one.overflow) for one in rare], micro_steps, samples, tokens),
        [known + pad if known.__class__ is int and pad is not None else None for known, pad in pairs],
        [known or own or None for known, own in zip(labels, own_labels, strict=True)],
        [known or own for known, own in zip(flops, own_flops, strict=True)],
        *(mfu, fetch_us, [us or None for us in cpu_us], probe_us, *peaks),
    ]


def _phases(row: Row) -> Iterator[Row]:
    rest = _rest(row[REST_COLUMN])
    started = row[_AT["started"]]
    if rest is None or started.__class__ is not float or len(rest.phases) > _MOST_PHASES:
        return
    others = iter(rest.rare.others)
    ended = 0
    for phase in rest.phases:
        if phase is None:
            record = next(others, None)
            if record is None:
                return
            yield _phase(row[:4], started, record)
        elif 0 <= phase.position < len(STEP_PHASES):
            at = FIRST_PHASE_COLUMN + phase.position * PHASE_WIDTH
            host_us, device_us, *memory = row[at : at + PHASE_WIDTH]
            if host_us.__class__ is not int:
                return
            begin = ended + phase.gap_us
            yield (
                *(*row[:4], STEP_PHASES[phase.position], started + begin / 1e6, host_us, device_us, phase.waited_us),
                *(phase.collective_us, phase.collectives, phase.count, phase.allocations, phase.coarse),
                *(*memory, *_span(phase.resident)),
            )
            ended = begin + host_us


def _phase(place: Row, started: float, phase: PhaseRecord) -> Row:
    return (
        *(*place, phase.name, started + phase.start_us / 1e6, phase.host_us, phase.device_us, phase.waited_us),
        *(phase.collective_us, phase.collectives, phase.count, phase.allocations, phase.coarse),
        *(*_span(phase.allocated), *_span(phase.reserved), *_span(phase.resident)),
    )


def _span(span: Span | None) -> Row:
    return (None, None, None) if span is None else (span.start, span.end, span.peak)


def _closing(frame: Frame) -> Iterator[Row]:
    closing = frame.message
    if isinstance(closing, Closing):
        place = (frame.seq, frame.t, closing.rank, closing.step)
        yield from (_phase(place, closing.started, phase) for phase in closing.phases)


def _evaluation(frame: Frame | None) -> Row | None:
    if frame is None or not isinstance(one := frame.message, Evaluation):
        return None
    metrics = msgspec.json.encode(one.metrics).decode() if one.metrics else None
    return (
        *(frame.seq, frame.t, one.rank, one.step, one.time, one.name, one.loss, _finite(one.loss), one.perplexity),
        *(one.label_tokens or None, one.seconds, one.best, metrics),
    )
