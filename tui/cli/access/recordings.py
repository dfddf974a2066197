"""Opens recordings for one command, and checks its rank argument."""

import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....protocol.errors import UsageError

if TYPE_CHECKING:
    from ....protocol.recording.reader import Reader


def check_rank(ranks: Collection[int], rank: int | None) -> None:
    """Check that a run has the requested rank; None is any.

    Raises:
        UsageError: there is no such rank.
    """
    if rank is not None and rank not in ranks:
        known = f"{min(ranks)} to {max(ranks)}" if ranks else "none yet"
        raise UsageError(f"no rank {rank} in this run; its ranks: {known}")


@contextmanager
def opened(path: Path) -> "Generator[Reader, None, None]":
    """Open a recording for one command; at the end report omitted messages, if any, in a line on standard error.

    Raises:
        RecordingError: it is not a recording, or cannot be read.
    """
    from ....protocol.recording.reader import Reader

    with Reader(path, once=True) as reader:
        yield reader
        if reader.left_out:
            print(f"ftmon: {path}: {reader.left_out}", file=sys.stderr)
