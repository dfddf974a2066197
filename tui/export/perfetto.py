"""Writes a recording as a trace for Perfetto (https://ui.perfetto.dev): steps, phases, memory and alerts by rank.

The format is that of https://perfetto.dev/docs/reference/synthetic-track-event. Each rank is a process with a track of
its steps, one for each phase on the host and one on the device, counters, and its alerts. The recording has one total
for each phase of a step, so a phase of several micro-steps is one slice, from its first start. The start of a phase on
the device is not recorded either: it is the phase's start on the host, or the end of the device phase before it. Calls
of collectives have no times of their own: a flow joins the slices of a phase of all ranks that entered some in it.

Slices and counters, some 20 for each step of a rank, are encoded here: https://protobuf.dev/programming-guides/encoding.
Through the message classes of ``perfetto`` a packet takes four times as long, and the rest uses those.
"""

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeGuard

from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import MAX_RANKS
from ...protocol.recording.reader import Reader
from ...protocol.recording.series import SERIES
from .tables import parts, replacing

Row = tuple[Any, ...]

_PACKETS = 20_000  # written at once
_SEQUENCE = 1
_INTERNED = 2  # TracePacket.SequenceFlags: SEQ_NEEDS_INCREMENTAL_STATE
_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_BYTES = 3  # CounterDescriptor.Unit: UNIT_SIZE_BYTES
_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock; the second is the trace's
_MICROS = 64  # the sequence's own clock, in microseconds: shorter numbers
_EARLIER_US = 3_600_000_000  # reading of that clock when the run began: another host's clock may be behind
_EXPLICIT = 3  # TrackDescriptor.ChildTracksOrdering
_LAST_TIME = 9e9  # seconds since the epoch: its nanoseconds fit 63 bits
_LARGEST = 1 << 63
_NO_RANK = -1
_MOST_FLOWS = 4_096  # whose ranks are remembered
_PEAKS = ("allocated peak", "reserved peak", "resident peak")
_TRACKS = ("steps", "alerts", *_PEAKS, "tokens/s")
_COLUMNS = {
    "phases": ("seq", "step", "started_s", "rank", "phase", "host_us", "device_us", "collectives", "collective_us"),
    "steps": (
        *("started_s", "rank", "step", "host_us", "training_us", "tokens"),
        *("allocated_peak_bytes", "reserved_peak_bytes", "resident_peak_bytes"),
    ),
    "alerts": ("raised_s", "rank", "id", "title", "kind", "severity", "step", "phase", "text"),
}
_HOST, _DEVICE = " on the host", " on the device"


def _varint(value: int) -> bytes:
    """Encode a number from 0 to 2**64 - 1."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _tag(field: int, kind: int = 0) -> bytes:
    """Encode a field's number and wire type: 0 a number, 1 eight bytes, 2 bytes behind their length."""
    return _varint(field << 3 | kind)


def _sized(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


# Numbers of fields, by message.
_TRACE_PACKET = _tag(1, 2)
_PACKET_TIMESTAMP, _PACKET_CLOCK = _tag(8), _tag(58)
_PACKET_SEQUENCE = _tag(10) + _varint(_SEQUENCE) + _tag(13) + _varint(_INTERNED)  # and sequence_flags
_PACKET_EVENT = _tag(11, 2)
_EVENT_TYPE, _EVENT_TRACK, _EVENT_NAME_ID, _EVENT_COUNTER, _EVENT_FLOW = (*map(_tag, (9, 11, 10, 30)), _tag(47, 1))
_EVENT_ANNOTATION, _EVENT_NAME = _tag(4, 2), _tag(23, 2)
_ANNOTATION_NAME_ID, _ANNOTATION_NUMBER = _tag(1), _tag(3)


def write_trace(reader: Reader, path: Path) -> int:
    """Write a trace; return its number of events.

    Raises:
        UsageError: the package ``perfetto`` is not installed, or the file cannot be written.
        RecordingError: the recording cannot be read.
    """
    try:
        packet = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2").TracePacket
    except ImportError:
        raise UsageError("perfetto needs the package perfetto; run: pip install 'ftmon[perfetto]'") from None
    info = reader.info()
    with replacing(path) as temporary, temporary.open("wb") as file:
        trace = _Trace(_Packets(file, packet, info.started), joins=len(info.ranks) > 1)
        for series, write in (("phases", trace.phase), ("steps", trace.step), ("alerts", trace.alert)):
            for row in _rows(reader, series):
                write(row)
        trace.packets.flush()
    return trace.events


def _rows(reader: Reader, series: str) -> Iterator[Row]:
    places = [*map(list(SERIES[series]).index, _COLUMNS[series])]
    for part in parts(reader, series):
        yield from zip(*(part.columns[place] for place in places), strict=True)


class _Packets:
    """Writes packets: whole messages of ``perfetto``, and events as bytes. Times are those of the clock ``_MICROS``."""

    def __init__(self, file: IO[bytes], new: Any, started: float) -> None:
        began = int(started * 1e6) if 0 < started < _LAST_TIME else _EARLIER_US
        self._file, self._new = file, new
        self._first_us = began - _EARLIER_US
        """Since the epoch, where the clock is 0."""
        self._out: list[bytes] = []
        first = self.message()
        first.sequence_flags = _CLEARED
        first.trace_packet_defaults.timestamp_clock_id = _MICROS
        self.write(first)
        clocks = self.message()
        clocks.clock_snapshot.clocks.add(clock_id=_MICROS, timestamp=_EARLIER_US, unit_multiplier_ns=1000)
        for clock in (_BOOTTIME, _REALTIME):
            clocks.clock_snapshot.clocks.add(clock_id=clock, timestamp=began * 1000)
        self.write(clocks)

    def message(self) -> Any:
        """Return a new ``TracePacket`` of the sequence."""
        return self._new(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_INTERNED)

    def write(self, message: Any, us: int | None = None) -> None:
        """Write a message, of a time if it has one."""
        packet = message.SerializeToString()
        self._out.append(_sized(_TRACE_PACKET, packet if us is None else packet + self._time(us)))

    def event(self, us: int, event: bytes) -> None:
        """Write an event, a ``track_event`` with its number, at a time."""
        self._out.append(_sized(_TRACE_PACKET, event + _PACKET_SEQUENCE + self._time(us)))
        if len(self._out) >= _PACKETS:
            self.flush()

    def at(self, seconds: float | None) -> int | None:
        """Return a time since the epoch on the clock; None: it is unknown or beyond the format."""
        if seconds is None or not 0 < seconds < _LAST_TIME:
            return None
        return round(seconds * 1e6) - self._first_us

    def flush(self) -> None:
        """Write what was collected."""
        self._file.write(b"".join(self._out))
        self._out.clear()

    def _time(self, us: int) -> bytes:
        if us < 0:  # of a clock more than an hour behind
            return _PACKET_TIMESTAMP + _varint((us + self._first_us) * 1000) + _PACKET_CLOCK + _varint(_BOOTTIME)
        return _PACKET_TIMESTAMP + _varint(us)


class _Trace:
    """Makes tracks and events of rows. With ``joins`` flows join the collectives of ranks."""

    def __init__(self, packets: _Packets, *, joins: bool) -> None:
        self.events = 0
        self.packets = packets
        self._joins = joins
        self._names: dict[str, int] = {}
        self._begins: dict[tuple[int, str], bytes] = {}
        """Start of the event of a slice's begin, by track and name."""
        self._ends: dict[int, bytes] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._free: dict[int, int] = {}
        """End of the last slice by track; device tracks of a rank share that of their rank's steps, negative."""
        self._reserved: dict[int, int] = {}
        self._alerts: set[int] = set()
        self._flows: dict[tuple[int, str, int], tuple[int, set[int]]] = {}
        """Number of the flow and its ranks, by step, phase and occurrence in the step."""
        self._last_flow = 0
        self._seq, self._seen = -1, Counter[str]()
        annotations = packets.message()
        for number, name in enumerate(("collectives", "collective_us"), 1):
            annotations.interned_data.debug_annotation_names.add(iid=number, name=name)
        packets.write(annotations)

    def phase(self, row: Row) -> None:
        """Write a row of ``phases`` as slices of the host and of the device."""
        seq, step, started, rank, name, host_us, device_us, collectives, collective_us = row
        begin = self.packets.at(started)
        if begin is None or name is None or not _is_rank(rank):
            return
        if seq != self._seq:
            self._seq = seq
            self._seen.clear()
        self._seen[name] += 1
        more = self._calls(collectives, collective_us) if collectives else b""
        if more and self._joins:
            more += _EVENT_FLOW + self._flow((step, name, self._seen[name]), rank).to_bytes(8, "little")
        self._slice((rank, name + _HOST), begin, host_us, name, more=more)
        self._slice((rank, name + _DEVICE), begin, device_us, name, queue=-1 - rank)

    def step(self, row: Row) -> None:
        """Write a row of ``steps`` as a slice and counters."""
        started, rank, step, host_us, training_us, tokens, allocated, reserved, resident = row
        begin = self.packets.at(started)
        if begin is None or not _is_rank(rank):
            return
        self._slice((rank, "steps"), begin, host_us, "", more=_sized(_EVENT_NAME, f"step {step}".encode()))
        self._count((rank, "allocated peak"), begin, allocated)
        self._count((rank, "resident peak"), begin, resident)
        if self._reserved.get(rank) != reserved:
            self._reserved[rank] = reserved
            self._count((rank, "reserved peak"), begin, reserved)
        if training_us and tokens:
            self._count((rank, "tokens/s"), begin, round(tokens / (training_us / 1e6)))

    def alert(self, row: Row) -> None:
        """Write a row of ``alerts``, when it is raised, as an instant event; later changes of an alert are left out."""
        raised, rank, number, title, *more = row
        at = self.packets.at(raised)
        if at is None or number in self._alerts:
            return
        self._alerts.add(number)
        self.events += 1
        packet = self.packets.message()
        event = packet.track_event
        event.type = _INSTANT
        event.track_uuid = self._track((rank if _is_rank(rank) else _NO_RANK, "alerts"))
        event.name = title or "alert"
        for name, value in zip(_COLUMNS["alerts"][4:], more, strict=True):
            if value not in (None, ""):
                event.debug_annotations.add(name=name, string_value=str(value))
        self.packets.write(packet, at)

    def _flow(self, key: tuple[int, str, int], rank: int) -> int:
        """Return the number of the flow that joins the ranks' collectives of a phase."""
        number, ranks = self._flows.get(key, (0, set[int]()))
        if not number or rank in ranks:  # a resumed job repeats steps
            self._last_flow += 1
            number, ranks = self._flows[key] = self._last_flow, set()
            if len(self._flows) > _MOST_FLOWS:
                del self._flows[next(iter(self._flows))]
        ranks.add(rank)
        return number

    def _calls(self, collectives: int, collective_us: int | None) -> bytes:
        found = b""
        for number, value in enumerate((collectives, collective_us), 1):
            if value is not None and 0 <= value < _LARGEST:
                pair = _ANNOTATION_NAME_ID + _varint(number) + _ANNOTATION_NUMBER + _varint(value)
                found += _sized(_EVENT_ANNOTATION, pair)
        return found

    def _slice(
        self, key: tuple[int, str], begin: int, spent_us: int | None, name: str, *, queue: int = 0, more: bytes = b""
    ) -> None:
        """Write a slice; it begins at the end of the last one of its track, or ``queue`` of tracks, at the earliest.

        ``name``: interned; empty: it is in ``more``, further fields of its begin.
        """
        if spent_us is None or not 0 <= spent_us < _LAST_TIME:
            return
        track = self._tracks.get(key) or self._track(key)
        free = self._free.get(queue or track)
        if free is not None and free > begin:
            begin = free
        end = begin + spent_us
        if end >= _LARGEST // 1_000_000:
            return
        self._free[queue or track] = end
        self.events += 2
        event = (self._begins.get((track, name)) or self._begin(track, name)) + more
        self.packets.event(begin, _sized(_PACKET_EVENT, event))
        self.packets.event(end, self._ends[track])

    def _begin(self, track: int, name: str) -> bytes:
        place = _EVENT_TRACK + _varint(track)
        event = _EVENT_TYPE + _varint(_BEGIN) + place
        if name:
            event += _EVENT_NAME_ID + _varint(self._names.get(name) or self._intern(name))
        self._ends[track] = _sized(_PACKET_EVENT, _EVENT_TYPE + _varint(_END) + place)
        self._begins[track, name] = event
        return event

    def _intern(self, name: str) -> int:
        number = self._names[name] = len(self._names) + 1
        packet = self.packets.message()
        packet.interned_data.event_names.add(iid=number, name=name)
        self.packets.write(packet)
        return number

    def _count(self, key: tuple[int, str], us: int, value: int | None) -> None:
        if value is None or not -_LARGEST <= value < _LARGEST:
            return
        track = self._tracks.get(key) or self._track(key)
        event = _EVENT_TYPE + _varint(_COUNTER) + _EVENT_TRACK + _varint(track) + _EVENT_COUNTER
        self.events += 1
        self.packets.event(us, _sized(_PACKET_EVENT, event + _varint(value & (1 << 64) - 1)))

    def _track(self, key: tuple[int, str]) -> int:
        return self._tracks.get(key) or self._new_track(*key)

    def _new_track(self, rank: int, name: str) -> int:
        parent = 0
        if rank != _NO_RANK:
            parent = self._tracks.get((rank, "")) or self._add_track(rank, "", 0)
        return self._add_track(rank, name, parent)

    def _add_track(self, rank: int, name: str, parent: int) -> int:
        number = self._tracks[rank, name] = len(self._tracks) + 1
        packet = self.packets.message()
        track = packet.track_descriptor
        track.uuid = number
        if name:
            self._describe(track, name, parent)
        else:
            track.process.pid = rank + 1  # 0 is the kernel's idle process
            track.process.process_name = f"rank {rank}"
            track.child_ordering = _EXPLICIT
        self.packets.write(packet)
        return number

    def _describe(self, track: Any, name: str, parent: int) -> None:
        if parent:
            track.parent_uuid = parent
        track.name = name
        track.sibling_order_rank = _TRACKS.index(name) if name in _TRACKS else len(_TRACKS) + name.endswith(_DEVICE)
        if name in _PEAKS:
            track.counter.unit = _BYTES
        elif name == "tokens/s":
            track.counter.unit_name = name


def _is_rank(rank: int | None) -> TypeGuard[int]:
    return rank is not None and _NO_RANK <= rank < MAX_RANKS
