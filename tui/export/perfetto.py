"""Writes a recording as a trace for Perfetto (https://ui.perfetto.dev): steps, phases, memory and alerts by rank.

The format is that of https://perfetto.dev/docs/reference/synthetic-track-event. Each rank is a process with a track of
its steps, one for each phase on the host and one on the device, counters, and its alerts. The recording has one total
for each phase of a step, so a phase of several micro-steps is one slice, from its first start. The start of a phase on
the device is not recorded either: it is the phase's start on the host, or the end of the device phase before it.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeGuard

from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import MAX_RANKS
from ...protocol.recording.reader import Reader
from ...protocol.recording.series import SERIES
from .tables import parts, replacing

Row = tuple[Any, ...]

_PACKETS = 5_000  # encoded at once
_SEQUENCE = 1
_INTERNED = 2  # TracePacket.SequenceFlags: SEQ_NEEDS_INCREMENTAL_STATE
_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_BYTES = 3  # CounterDescriptor.Unit: UNIT_SIZE_BYTES
_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock; that of packets is the second
_EXPLICIT = 3  # TrackDescriptor.ChildTracksOrdering
_LAST_TIME = 9e9  # seconds since the epoch: its nanoseconds fit 63 bits
_LARGEST = 1 << 63
_NO_RANK = -1
_PEAKS = ("allocated peak", "reserved peak", "resident peak")
_TRACKS = ("steps", "alerts", *_PEAKS, "tokens/s")
_COLUMNS = {
    "phases": ("started_s", "rank", "phase", "host_us", "device_us"),
    "steps": (
        *("started_s", "rank", "step", "host_us", "training_us", "tokens"),
        *("allocated_peak_bytes", "reserved_peak_bytes", "resident_peak_bytes"),
    ),
    "alerts": ("raised_s", "rank", "id", "title", "kind", "severity", "step", "phase", "text"),
}
_HOST, _DEVICE = " on the host", " on the device"


def write_trace(reader: Reader, path: Path) -> int:
    """Write a trace; return its number of events.

    Raises:
        UsageError: the package ``perfetto`` is not installed, or the file cannot be written.
        RecordingError: the recording cannot be read.
    """
    try:
        builder = import_module("perfetto.trace_builder.proto_builder").TraceProtoBuilder
    except ImportError:
        raise UsageError("perfetto needs the package perfetto; run: pip install 'ftmon[perfetto]'") from None
    with replacing(path) as temporary, temporary.open("wb") as file:
        trace = _Trace(file, builder, _ns(reader.info().started) or 1)
        for series, write in (("phases", trace.phase), ("steps", trace.step), ("alerts", trace.alert)):
            for row in _rows(reader, series):
                write(row)
        trace.flush()
    return trace.events


def _rows(reader: Reader, series: str) -> Iterator[Row]:
    places = [*map(list(SERIES[series]).index, _COLUMNS[series])]
    for part in parts(reader, series):
        yield from zip(*(part.columns[place] for place in places), strict=True)


class _Trace:
    """Encodes packets in parts: a trace is its parts one after the other."""

    def __init__(self, file: IO[bytes], builder: Callable[[], Any], started: int) -> None:
        self.events = 0
        self._file, self._new_builder = file, builder
        self._names: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._free: dict[int, int] = {}
        """End of the last slice, ns, by track; device tracks of a rank share that of their rank's steps, negative."""
        self._reserved: dict[int, int] = {}
        self._alerts: set[int] = set()
        self._begin_part()
        first = self._packet(started)
        first.sequence_flags = _CLEARED
        for clock in (_BOOTTIME, _REALTIME):
            first.clock_snapshot.clocks.add(clock_id=clock, timestamp=started)

    def phase(self, row: Row) -> None:
        """Write a row of ``phases`` as slices of the host and of the device."""
        started, rank, name, host_us, device_us = row
        begin = _ns(started)
        if begin is None or name is None or not _is_rank(rank):
            return
        self._slice((rank, name + _HOST), begin, host_us, name)
        self._slice((rank, name + _DEVICE), begin, device_us, name, queue=-1 - rank)

    def step(self, row: Row) -> None:
        """Write a row of ``steps`` as a slice and counters."""
        started, rank, step, host_us, training_us, tokens, allocated, reserved, resident = row
        begin = _ns(started)
        if begin is None or not _is_rank(rank):
            return
        self._slice((rank, "steps"), begin, host_us, f"step {step}", intern=False)
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
        at = _ns(raised)
        if at is None or number in self._alerts:
            return
        self._alerts.add(number)
        event = self._event(at, _INSTANT, self._track((rank if _is_rank(rank) else _NO_RANK, "alerts")))
        event.name = title or "alert"
        for name, value in zip(_COLUMNS["alerts"][4:], more, strict=True):
            if value not in (None, ""):
                event.debug_annotations.add(name=name, string_value=str(value))

    def flush(self) -> None:
        """Write the last packets."""
        self._file.write(self._builder.serialize())

    def _begin_part(self) -> None:
        self._builder = self._new_builder()
        self._add = self._builder.trace.packet.add
        self._left = _PACKETS

    def _packet(self, ns: int | None) -> Any:
        if self._left == 0:
            self.flush()
            self._begin_part()
        self._left -= 1
        packet = self._add()
        if ns is not None:
            packet.timestamp = ns
        packet.trusted_packet_sequence_id = _SEQUENCE
        return packet

    def _event(self, ns: int, kind: int, track: int) -> Any:
        self.events += 1
        event = self._packet(ns).track_event
        event.type = kind
        event.track_uuid = track
        return event

    def _slice(
        self, key: tuple[int, str], begin: int, spent_us: int | None, name: str, *, queue: int = 0, intern: bool = True
    ) -> None:
        """Write a slice; it begins at the end of the last one of its track, or ``queue`` of tracks, at the earliest."""
        if spent_us is None or not 0 <= spent_us < _LAST_TIME:
            return
        track = self._track(key)
        begin = max(begin, self._free.get(queue or track, 0))
        end = begin + spent_us * 1_000
        if end >= _LARGEST:
            return
        self._free[queue or track] = end
        self.events += 1
        packet = self._packet(begin)
        event = packet.track_event
        event.type = _BEGIN
        event.track_uuid = track
        if intern:
            packet.sequence_flags = _INTERNED
            event.name_iid = self._names.get(name) or self._intern(packet, name)
        else:
            event.name = name
        self._event(end, _END, track)

    def _intern(self, packet: Any, name: str) -> int:
        number = self._names[name] = len(self._names) + 1
        packet.interned_data.event_names.add(iid=number, name=name)
        return number

    def _count(self, key: tuple[int, str], ns: int, value: int | None) -> None:
        if value is not None and -_LARGEST <= value < _LARGEST:
            self._event(ns, _COUNTER, self._track(key)).counter_value = value

    def _track(self, key: tuple[int, str]) -> int:
        return self._tracks.get(key) or self._new_track(*key)

    def _new_track(self, rank: int, name: str) -> int:
        parent = 0
        if rank != _NO_RANK:
            parent = self._tracks.get((rank, "")) or self._add_track(rank, "", 0)
        return self._add_track(rank, name, parent)

    def _add_track(self, rank: int, name: str, parent: int) -> int:
        number = self._tracks[rank, name] = len(self._tracks) + 1
        track = self._packet(None).track_descriptor
        track.uuid = number
        if not name:
            track.process.pid = rank + 1  # 0 is the kernel's idle process
            track.process.process_name = f"rank {rank}"
            track.child_ordering = _EXPLICIT
            return number
        if parent:
            track.parent_uuid = parent
        track.name = name
        track.sibling_order_rank = _TRACKS.index(name) if name in _TRACKS else len(_TRACKS) + name.endswith(_DEVICE)
        if name in _PEAKS:
            track.counter.unit = _BYTES
        elif name == "tokens/s":
            track.counter.unit_name = name
        return number


def _is_rank(rank: int | None) -> TypeGuard[int]:
    return rank is not None and _NO_RANK <= rank < MAX_RANKS


def _ns(seconds: float | None) -> int | None:
    return round(seconds * 1e9) if seconds is not None and 0 < seconds < _LAST_TIME else None
