"""Writes a recording as a trace for Perfetto (https://ui.perfetto.dev): steps, phases, memory and alerts by rank.

The format is that of https://perfetto.dev/docs/reference/synthetic-track-event. Each rank is a process with a track of
its steps, one for each phase on the host and one on the device, counters, and its alerts. The recording has one total
for each phase of a step, so a phase of several micro-steps is one slice, from its first start. The start of a phase on
the device is not recorded either: it is the phase's start on the host, or the end of the device phase before it. Calls
of collectives have no times of their own: a flow joins the slices of a phase of all ranks that entered some in it.
"""

from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, TypeGuard

from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import MAX_RANKS
from ...protocol.recording.reader import Reader
from ...protocol.recording.series import SERIES
from .tables import parts, replacing

Row = tuple[Any, ...]

_SEQUENCE = 1
_INTERNED = 2  # TracePacket.SequenceFlags: SEQ_NEEDS_INCREMENTAL_STATE
_CLEARED = 1  # SEQ_INCREMENTAL_STATE_CLEARED
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_BYTES = 3  # CounterDescriptor.Unit: UNIT_SIZE_BYTES
_REALTIME, _BOOTTIME = 1, 6  # BuiltinClock; the second is the trace's, here as far from 1970 as the first
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


def write_trace(reader: Reader, path: Path) -> int:
    """Write a trace; return its number of events.

    Raises ``UsageError`` if the package ``perfetto`` is not installed or the file cannot be written, ``RecordingError``
    if the recording cannot be read.
    """
    try:
        new = import_module("perfetto.protos.perfetto.trace.perfetto_trace_pb2").Trace
    except ImportError:
        raise UsageError("perfetto needs the package perfetto; run: pip install 'ftmon[perfetto]'") from None
    info = reader.info()
    with replacing(path) as temporary, temporary.open("wb") as file:
        trace = _Trace(new(), info.started, joins=len(info.ranks) > 1)
        for series, write in (("phases", trace.phase), ("steps", trace.step), ("alerts", trace.alert)):
            places = [*map(list(SERIES[series]).index, _COLUMNS[series])]
            for part in parts(reader, series):
                for row in zip(*(part.columns[place] for place in places), strict=True):
                    write(row)
                file.write(trace.taken())
        file.write(trace.taken())
    return trace.events


class _Trace:
    """Makes tracks and events of rows, in an empty ``Trace``. With ``joins`` flows join the collectives of ranks."""

    def __init__(self, new: Any, started: float, *, joins: bool) -> None:
        self.events = 0
        self._trace = new
        self._joins = joins
        self._names: dict[str, int] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._free: dict[int, int] = {}
        """End of the last slice by track; device tracks of a rank share that of their rank's steps, negative."""
        self._reserved: dict[int, int] = {}
        self._alerts: set[int] = set()
        self._flows: dict[tuple[int, str, int], tuple[int, set[int]]] = {}
        """Number of the flow and its ranks, by step, phase and occurrence in the step."""
        self._last_flow = 0
        self._seq, self._seen = -1, Counter[str]()
        first = self._packet()
        first.sequence_flags = _CLEARED
        for clock in (_BOOTTIME, _REALTIME):
            first.clock_snapshot.clocks.add(clock_id=clock, timestamp=int(max(0.0, min(started, _LAST_TIME)) * 1e9))
        interned = self._packet().interned_data
        for number, name in enumerate(("collectives", "collective_us"), 1):
            interned.debug_annotation_names.add(iid=number, name=name)

    def taken(self) -> bytes:
        """Return the packets made since the last call."""
        found = self._trace.SerializeToString()
        self._trace.Clear()
        return found

    def _packet(self) -> Any:
        return self._trace.packet.add(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_INTERNED)

    def _event(self, us: int, kind: int, track: int) -> Any:
        """Return a new event at a time, microseconds since the epoch."""
        self.events += 1
        packet = self._packet()
        packet.timestamp = us * 1000
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        return event

    def phase(self, row: Row) -> None:
        """Write a row of ``phases`` as slices of the host and of the device."""
        seq, step, started, rank, name, host_us, device_us, collectives, collective_us = row
        begin = _us(started)
        if begin is None or name is None or not _is_rank(rank):
            return
        if seq != self._seq:
            self._seq = seq
            self._seen.clear()
        self._seen[name] += 1
        event = self._slice((rank, name + _HOST), begin, host_us, name)
        if event is not None and collectives:
            for number, value in enumerate((collectives, collective_us), 1):
                if value is not None and 0 <= value < _LARGEST:
                    event.debug_annotations.add(name_iid=number, uint_value=value)
            if self._joins:
                event.flow_ids.append(self._flow((step, name, self._seen[name]), rank))
        self._slice((rank, name + _DEVICE), begin, device_us, name, queue=-1 - rank)

    def step(self, row: Row) -> None:
        """Write a row of ``steps`` as a slice and counters."""
        started, rank, step, host_us, training_us, tokens, allocated, reserved, resident = row
        begin = _us(started)
        if begin is None or not _is_rank(rank):
            return
        event = self._slice((rank, "steps"), begin, host_us)
        if event is not None:
            event.name = f"step {step}"
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
        at = _us(raised)
        if at is None or number in self._alerts:
            return
        self._alerts.add(number)
        event = self._event(at, _INSTANT, self._track((rank if _is_rank(rank) else _NO_RANK, "alerts")))
        event.name = title or "alert"
        for name, value in zip(_COLUMNS["alerts"][4:], more, strict=True):
            if value not in (None, ""):
                event.debug_annotations.add(name=name, string_value=str(value))

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

    def _slice(self, key: tuple[int, str], begin: int, spent_us: int | None, name: str = "", *, queue: int = 0) -> Any:
        """Add a slice, with an interned name if one is given; return the event of its begin, None: without figures.

        It begins at the end of the last one of its track, or ``queue`` of tracks, at the earliest.
        """
        if spent_us is None or not 0 <= spent_us < _LAST_TIME:
            return None
        track = self._track(key)
        begin = max(begin, self._free.get(queue or track, begin))
        end = begin + spent_us
        if end >= _LARGEST // 1000:
            return None
        self._free[queue or track] = end
        name_id = self._names.get(name) or self._intern(name) if name else 0
        event = self._event(begin, _BEGIN, track)
        if name_id:
            event.name_iid = name_id
        self._event(end, _END, track)
        return event

    def _intern(self, name: str) -> int:
        number = self._names[name] = len(self._names) + 1
        self._packet().interned_data.event_names.add(iid=number, name=name)
        return number

    def _count(self, key: tuple[int, str], us: int, value: int | None) -> None:
        if value is not None and -_LARGEST <= value < _LARGEST:
            self._event(us, _COUNTER, self._track(key)).counter_value = value

    def _track(self, key: tuple[int, str]) -> int:
        return self._tracks.get(key) or self._new_track(*key)

    def _new_track(self, rank: int, name: str) -> int:
        parent = 0
        if rank != _NO_RANK:
            parent = self._tracks.get((rank, "")) or self._add_track(rank, "", 0)
        return self._add_track(rank, name, parent)

    def _add_track(self, rank: int, name: str, parent: int) -> int:
        number = self._tracks[rank, name] = len(self._tracks) + 1
        track = self._packet().track_descriptor
        track.uuid = number
        if name:
            self._describe(track, name, parent)
        else:
            track.process.pid = rank + 1  # 0 is the kernel's idle process
            track.process.process_name = f"rank {rank}"
            track.child_ordering = _EXPLICIT
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


def _us(seconds: float | None) -> int | None:
    """Return a time in microseconds; None: it is unknown or beyond the format."""
    return None if seconds is None or not 0 < seconds < _LAST_TIME else round(seconds * 1e6)
