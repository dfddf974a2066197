"""Makes the message of one captured step on a GPU, from which the hub derives compositions and events."""

import time
from array import array
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from .....protocol.messages.memory import PARTS
from .....protocol.messages.step_trace import Sightings, StepMark, StepTrace
from .....protocol.snapshot.columns import Compactor
from .....protocol.snapshot.model import Snapshot
from ...device.reading import Reading
from ...phases.readings import first_of_step, readings
from .step_capture import StepCapture

_PART = {name: number for number, name in enumerate(PARTS)}


def step_trace(
    capture: StepCapture,
    take: Callable[[], dict[str, Any]],
    device: int,
    rank: int,
    read: Callable[[Any], Reading],
    room: int,
    reserved_before: int,
) -> StepTrace:
    """Return the message of a step on a GPU."""
    start = time.perf_counter_ns()
    snapshot = _columns(take(), device)
    return StepTrace(
        rank=rank,
        step=capture.step,
        time=time.time(),
        device=device,
        marks=step_marks(capture, readings(capture.marks, read)),
        first=first_of_step(capture.marks),
        snapshot=snapshot,
        room=room,
        sightings=_sightings(capture),
        recomputed=[(_us(capture, begin), _us(capture, end)) for begin, end in capture.recomputed],
        reason=capture.reason,
        hooked=capture.hooked,
        known=capture.known(),
        reserved_before=reserved_before,
        walk_us=capture.walk_ns // 1000,
        read_us=(time.perf_counter_ns() - start) // 1000,
    )


def step_marks(capture: StepCapture, figures: list[Reading]) -> list[StepMark]:
    """Return a capture's marks with their figures."""
    return [
        StepMark(
            mark.phase,
            _us(capture, mark.ns),
            figure.allocated,
            figure.allocated_peak,
            figure.retries,
            mark.memory is not None,
        )
        for mark, figure in zip(capture.marks, figures, strict=True)
    ]


def _us(capture: StepCapture, ns: int) -> int:
    """Return a moment of ``time.perf_counter_ns`` in microseconds since the epoch."""
    return (ns + capture.offset_ns) // 1000


def _columns(raw: dict[str, Any], device: int) -> Snapshot:
    """Return one device's part of PyTorch's snapshot as columns, without fields that are not used."""
    raw["segments"] = [segment for segment in raw["segments"] if segment["device"] == device]
    raw["device_traces"] = [
        entries if index == device else [] for index, entries in enumerate(raw.pop("device_traces"))
    ]
    raw.pop("external_annotations", None)
    found = Compactor("").snapshot(raw)
    own = found.trace(device)
    return replace(found, traces=[] if own is None else [replace(own, streams=b"", notes=b"")], notes=[])


def _sightings(capture: StepCapture) -> list[Sightings]:
    found = [
        _at(
            _us(capture, capture.marks[walk.mark].ns),
            walk.mark,
            [(address, held.part) for address, held in walk.held.items()],
        )
        for walk in capture.walks
    ]
    for ns, seen in groupby(capture.sightings, attrgetter("ns")):
        found.append(_at(_us(capture, ns), -1, [(one.address, one.part) for one in seen]))
    return found


def _at(us: int, mark: int, seen: list[tuple[int, str]]) -> Sightings:
    addresses = array("Q", [address for address, _ in seen])
    return Sightings(us, mark, addresses.tobytes(), bytes([_PART[part] for _, part in seen]))
