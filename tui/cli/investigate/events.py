"""``ftmon events RUN``: prints the allocator statistics of a run, one line per phase of each sampled step."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec

from ....protocol.errors import FtmonError
from ....protocol.messages.telemetry import AllocatorEvents
from ....protocol.run import exits, run_store
from ....protocol.run.rundir import RunDir
from ....protocol.text import gib, sanitize
from ...model.events import phase_rates, segment_bytes
from ...model.run import RunModel
from ...source.find import find_recording
from ..access.recordings import check_rank, opened
from ..foreground.follow import POLL_SECONDS, counted_interrupts
from ..foreground.outcome import exit_status
from ..output.printable import print_json

_WHOLE = 1 << 30
"""So many that none of a rank's samples is left out."""

_DRAIN_SECONDS = 5.0
"""How long the stream may lag behind the end of the run before it is no longer waited for."""


def show_events(arguments: Namespace) -> int:
    """Print the sampled steps of a run, and with ``--follow`` those to come, until it ends."""
    path = find_recording(arguments.run)
    with opened(path) as reader:
        known = reader.info().ranks
        if known or not arguments.follow:  # those of a run that has just begun are to come
            check_rank(known, arguments.rank)
        ranks = known if arguments.rank is None else [arguments.rank]
        frames = [frame for rank in ranks for frame in reader.sampled("events", rank, _WHOLE)]
        left_out = reader.left_out
    printed: dict[int, int] = {}
    for frame in sorted(frames, key=lambda frame: frame.seq):
        if isinstance(frame.message, AllocatorEvents):
            printed[frame.message.rank] = frame.message.step
            _print_events(frame.message, arguments.json)
    sys.stdout.flush()
    ended = _has_ended(arguments.run)
    if not frames and not left_out and (ended or not arguments.follow):
        print(f"no step of this run was sampled{'' if ended else ' yet (--follow waits for it)'}", file=sys.stderr)
    if not arguments.follow:
        return 0
    run = run_store.find(arguments.run)
    end = run.read_exit()
    return 0 if end is not None else _follow(run, arguments.rank, printed, arguments.json)


def _has_ended(target: str) -> bool:
    """Return whether no more can come: a run's end is known, or its recording is a file on its own."""
    try:
        return run_store.find(target).read_exit() is not None
    except FtmonError:
        return True


def _follow(run: RunDir, rank: int | None, printed: dict[int, int], as_json: bool) -> int:
    """Print newly sampled steps; return the exit status of the run's end, or 130 after Ctrl-C."""
    from ...source.live import LiveSource

    source = LiveSource(run)
    drained_by = 0.0
    with counted_interrupts() as interrupts:
        source.start()
        try:
            while not interrupts.count:
                source.pump(POLL_SECONDS)
                for events in _news(source.model, rank, printed):
                    _print_events(events, as_json)
                sys.stdout.flush()
                end = run.read_exit()
                if end is not None:
                    drained_by = drained_by or time.monotonic() + _DRAIN_SECONDS
                    if source.model.ended or time.monotonic() > drained_by:
                        return exit_status(end)
                time.sleep(POLL_SECONDS)
        finally:
            source.close()
    return exits.INTERRUPTED


def _news(model: RunModel, wanted: int | None, printed: dict[int, int]) -> Iterator[AllocatorEvents]:
    """Return the samples that were not printed yet, by time."""
    found: list[AllocatorEvents] = []
    for number, rank in model.ranks.items():
        last = rank.allocator.last
        if wanted not in (None, number) or last is None or last.step <= printed.get(number, 0):
            continue
        found += [events for events in rank.allocator.samples if events.step > printed.get(number, 0)]
        printed[number] = last.step
    yield from sorted(found, key=lambda events: (events.time, events.rank))


def _print_events(events: AllocatorEvents, as_json: bool) -> None:
    if as_json:
        print_json(events_data(events), indent=False)
        return
    for line in event_lines(events):
        print(line)


def event_lines(events: AllocatorEvents) -> Iterator[str]:
    """Return the lines of a sampled step: one a phase, one for the step where it grew, flushed or left much unused."""
    at = time.strftime("%H:%M:%S", time.localtime(events.time))
    head = f"{at} rank {events.rank} step {events.step}"
    for row in phase_rates(events, ()):
        speed = ""
        if row.allocations_per_second is not None and row.bytes_per_second is not None:
            speed = f"  {row.allocations_per_second:,.0f}/s  {gib(row.bytes_per_second)}/s"
        grown = (
            f"  reserved {'+' if row.segment_bytes > 0 else ''}{gib(row.segment_bytes)}" if row.segment_bytes else ""
        )
        counts = f"{row.allocations:,} allocations, {gib(row.allocated_bytes)}, largest {gib(row.largest)}"
        yield f"{head} {sanitize(row.name, 16):<9} {counts}{speed}{grown}"
    more = [f"{events.retries} retries, each after the allocator freed its cache"] if events.retries else []
    if events.reserved_bytes:
        share = max(0.0, 1 - events.allocated_bytes / events.reserved_bytes)
        more.append(
            f"{share * 100:.0f} % of {gib(events.reserved_bytes)} reserved is unused, "
            f"largest free block {gib(events.largest_free_block_bytes)}"
        )
    if more:
        yield f"{head} {'step':<9} {'; '.join(more)}"


def events_data(events: AllocatorEvents) -> dict[str, Any]:
    """Describe one sampled step for scripts, rates included."""
    rates = {
        row.name: {"allocations_per_second": row.allocations_per_second, "bytes_per_second": row.bytes_per_second}
        for row in phase_rates(events, ())
    }
    return {**msgspec.to_builtins(events), "segment_bytes": segment_bytes(events), "rates": rates}
