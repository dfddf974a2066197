"""``ftmon events RUN``: prints the allocator statistics of a run, one line per phase of each sampled step."""

import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec

from ....protocol.errors import RunDirError, UsageError
from ....protocol.messages.telemetry import AllocatorEvents
from ....protocol.run import exits
from ....protocol.run.rundir import RunDir
from ....protocol.text import gib, sanitize
from ...model.events import phase_rates, segment_bytes
from ...model.run import RunModel
from ...source.find import find_recording, find_run
from ..access.recordings import check_rank, opened
from ..foreground.follow import POLL_SECONDS, counted_interrupts
from ..foreground.outcome import exit_status
from ..foreground.standing import Standing
from ..output.printable import print_json

_WHOLE = 1 << 30
"""A limit above any number of samples of a rank."""

_DRAIN_SECONDS = 5.0
"""Time limit of waiting for the rest of the stream after the run's end."""


def show_events(arguments: Namespace) -> int:
    """Print the sampled steps of a run, and with ``--follow`` later ones until it ends.

    Raises:
        UsageError: the run has no such rank, or ``--follow`` is given with a recording on its own.
        HubError: the followed run's launcher and hub are gone.
    """
    run = find_run(arguments.run)
    if run is None and arguments.follow:
        raise UsageError(f"{arguments.run}: is a recording on its own, which --follow cannot follow; name a run")
    with opened(find_recording(arguments.run)) as reader:
        known = reader.info().ranks
        if known or not arguments.follow:  # a run that has just begun has none yet
            check_rank(known, arguments.rank)
        ranks = known if arguments.rank is None else [arguments.rank]
        frames = [frame for rank in ranks for frame in reader.sampled("events", rank, _WHOLE)]
        left_out = reader.left_out
    printed: dict[int, float] = {}
    for frame in sorted(frames, key=lambda frame: frame.seq):
        if isinstance(frame.message, AllocatorEvents):
            printed[frame.message.rank] = frame.message.time
            _print_events(frame.message, arguments.json)
    sys.stdout.flush()
    ended = _has_ended(run)
    if not frames and not left_out and (ended or not arguments.follow):
        print(f"no step of this run was sampled{'' if ended else ' yet (--follow waits for it)'}", file=sys.stderr)
    if run is None or not arguments.follow or ended:
        return 0
    return _follow(run, arguments.rank, printed, arguments.json)


def _has_ended(run: RunDir | None) -> bool:
    """Return whether no more samples can follow: the run has ended, or its directory is unreadable or missing."""
    try:
        return run is None or run.read_exit() is not None
    except RunDirError:
        return True


def _follow(run: RunDir, rank: int | None, printed: dict[int, float], as_json: bool) -> int:
    """Print newly sampled steps; return the exit status of the run's end, or 130 after Ctrl-C.

    Raises:
        HubError: the run's launcher and hub are both gone, so its end is unknown.
    """
    from ...source.live import LiveSource

    source, standing = LiveSource(run), Standing(run)
    drained_by = 0.0
    with counted_interrupts() as interrupts:
        source.start()
        try:
            while not interrupts.count:
                source.pump(POLL_SECONDS)
                for events in _news(source.model, rank, printed):
                    _print_events(events, as_json)
                sys.stdout.flush()
                end = standing.end() or standing.end_without_launcher(source.model)
                if end is not None:
                    drained_by = drained_by or time.monotonic() + _DRAIN_SECONDS
                    if source.model.ended or time.monotonic() > drained_by:
                        return exit_status(end)
                time.sleep(POLL_SECONDS)
        finally:
            source.close()
    return exits.INTERRUPTED


def _news(model: RunModel, wanted: int | None, printed: dict[int, float]) -> Iterator[AllocatorEvents]:
    """Yield the samples after each rank's last printed one, by time, as a later job's steps count from 1 again."""
    found: list[AllocatorEvents] = []
    for number, rank in model.ranks.items():
        last = rank.allocator.last
        if wanted not in (None, number) or last is None or last.time <= printed.get(number, 0.0):
            continue
        found += [events for events in rank.allocator.samples if events.time > printed.get(number, 0.0)]
        printed[number] = last.time
    yield from sorted(found, key=lambda events: (events.time, events.rank))


def _print_events(events: AllocatorEvents, as_json: bool) -> None:
    if as_json:
        print_json(events_data(events), indent=False)
        return
    for line in event_lines(events):
        print(line)


def event_lines(events: AllocatorEvents) -> Iterator[str]:
    """Yield the lines of a sampled step: one per phase, and one for growth, flushes or much unused memory."""
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
    """Return one sampled step as JSON values, with rates."""
    rates = {
        row.name: {"allocations_per_second": row.allocations_per_second, "bytes_per_second": row.bytes_per_second}
        for row in phase_rates(events, ())
    }
    return {**msgspec.to_builtins(events), "segment_bytes": segment_bytes(events), "rates": rates}
