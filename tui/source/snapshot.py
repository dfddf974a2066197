"""A memory snapshot as a source: its file read, its devices replayed."""

from collections.abc import Callable
from pathlib import Path

from ...protocol.analysis.allocator.snapshot.replay import Replay
from ...protocol.snapshot.reader import SnapshotReading


def open_replays(
    path: str | Path,
    choose: Callable[[list[int]], list[int]] = list,
    meanwhile: Callable[[], object] | None = None,
) -> list[Replay]:
    """Read a snapshot and replay its devices; quicker than one after the other: they need its stacks last.

    Args:
        path: the file.
        choose: is given the devices there are, and returns those that are wanted; what it raises is passed on.
        meanwhile: is called while the file is being read.

    Raises:
        SnapshotError: one line that says what is wrong with the file.
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
