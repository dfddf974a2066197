"""Reads a memory snapshot, and replays its devices."""

from collections.abc import Callable
from pathlib import Path

from ...protocol.analysis.allocator.snapshot.replay import Replay
from ...protocol.snapshot.reader import SnapshotReading


def open_replays(
    path: str | Path,
    choose: Callable[[list[int]], list[int]] = list,
    meanwhile: Callable[[], object] | None = None,
) -> list[Replay]:
    """Read a snapshot and replay its devices concurrently, which is faster, since a replay needs the stacks last.

    ``choose`` gets the snapshot's devices and returns those to replay; ``meanwhile`` is called while the file is read.

    Raises:
        SnapshotError: one line about the error in the file.
    """
    with SnapshotReading(Path(path)) as reading:
        if meanwhile is not None:
            meanwhile()
        first = reading.snapshot()
        replays = [Replay(first, device) for device in choose(first.devices())]
        whole = first.with_stacks(reading.stacks())
    for replay in replays:
        replay.complete(whole)
    return replays
