"""The allocator's segments and trace as columns, from what ``torch._C._cuda_memorySnapshot`` returns.

The same columns that a snapshot file is read into, so the same replay serves both; without frames, and taken apart in
slices: thousands of dictionaries freed at once would hold the interpreter as long as making them did.
"""

from array import array
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

from .....protocol.snapshot import model
from .....protocol.snapshot.model import Segment, Snapshot, Trace

_PIECE = 256
_ACTIONS = {name: number for number, name in enumerate(model.ACTIONS)}
_STATES = {"inactive": model.FREE, "active_allocated": model.ALLOCATED}
_of_entry = itemgetter("action", "addr", "size", "time_us")


class PacedBytes(bytes):
    """Bytes that call ``pulse`` between pieces while somebody iterates over them.

    Whoever replays a trace walks its actions, and so rests without knowing it.
    """

    pulse: Callable[[], None]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _PIECE):
            self.pulse()
            yield from self[start : start + _PIECE]


def compact(raw: dict[str, Any], device: int, pulse: Callable[[], None]) -> Snapshot:
    """Turn one device's part of a raw snapshot into columns; ``raw`` is used up on the way.

    Args:
        raw: what PyTorch returned: ``segments``, ``device_traces``, ``allocator_settings``.
        device: the device's index.
        pulse: called between slices of work.
    """
    traces = raw.pop("device_traces")
    entries = traces[device] if device < len(traces) else []
    del traces
    trace = _trace(entries, device, pulse)
    addresses, sizes, requested, states = array("Q"), array("q"), array("q"), array("B")
    segments: list[Segment] = []
    for segment in raw.pop("segments"):
        if segment["device"] != device:
            continue
        first, at = len(sizes), segment["address"]
        for block in segment["blocks"]:
            addresses.append(block.get("address", at))
            sizes.append(block["size"])
            state = _STATES.get(block["state"], model.PENDING)
            states.append(state)
            requested.append(block.get("requested_size", block["size"]) if state != model.FREE else 0)
            at += block["size"]
        segments.append(
            Segment(
                device,
                segment["address"],
                segment["total_size"],
                segment.get("stream") or 0,
                segment.get("segment_type") == "small",
                bool(segment.get("is_expandable")),
                "",
                0,
                first,
                len(sizes) - first,
            )
        )
        pulse()
    settings = raw.get("allocator_settings") or {}
    divisions = settings.get("roundup_power2_divisions") or {}
    return Snapshot(
        "",
        segments,
        addresses.tobytes(),
        sizes.tobytes(),
        requested.tobytes(),
        states.tobytes(),
        bytes(4 * len(sizes)),
        [trace],
        [],
        [[]],
        [""],
        divisions=[int(divisions.get(str(2**power), 0)) for power in range(16)],
        max_split_size=int(settings.get("max_split_size", -1)),
    )


def _trace(entries: list[dict[str, Any]], device: int, pulse: Callable[[], None]) -> Trace:
    actions, addresses, sizes, times = bytearray(), array("Q"), array("q"), array("q")
    device_free: dict[int, int] = {}
    entries.reverse()  # pieces are cut off the end, oldest first
    while entries:
        piece = entries[-_PIECE:][::-1]
        del entries[-_PIECE:]
        try:
            rows = [_of_entry(entry) for entry in piece]
        except KeyError:  # an entry for an allocation that failed has no address; before PyTorch 2.2 none has a time
            rows = [(e["action"], e.get("addr") or 0, e.get("size") or 0, e.get("time_us") or 0) for e in piece]
            for place, entry in enumerate(piece, len(actions)):
                if entry["action"] == "oom":
                    device_free[place] = entry.get("device_free") or 0
        names, places, asked, moments = zip(*rows, strict=True)
        actions.extend(_ACTIONS.get(name, 0) for name in names)
        addresses.extend(places)
        sizes.extend(asked)
        times.extend(moments)
        del piece, rows, names, places, asked, moments
        pulse()
    none = bytes(4 * len(actions))
    paced = PacedBytes(actions)
    paced.pulse = pulse
    return Trace(
        device,
        paced,
        addresses.tobytes(),
        sizes.tobytes(),
        bytes(8 * len(actions)),
        times.tobytes(),
        none,
        none,
        device_free,
    )
