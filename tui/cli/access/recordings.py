"""Recordings opened for one command, and ranks as its words name them."""

import sys
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ....protocol.errors import UsageError

if TYPE_CHECKING:
    from ....protocol.recording.reader import Reader


def check_rank(ranks: Collection[int], rank: int | None) -> None:
    """See that a run has the rank that was asked for; None is any.

    Raises:
        UsageError: there is none of that number.
    """
    if rank is not None and rank not in ranks:
        known = f"{min(ranks)} to {max(ranks)}" if ranks else "none yet"
        raise UsageError(f"no rank {rank} in this run; its ranks: {known}")


@contextmanager
def opened(path: Path) -> "Generator[Reader, None, None]":
    """Open a recording for one command; at its end a line on standard error reports what was left out, if anything.

    Raises:
        RecordingError: it is not one, or cannot be read.
    """
    from ....protocol.recording.reader import Reader

    with Reader(path, once=True) as reader:
        yield reader
        if reader.left_out:
            print(f"ftmon: {path}: {reader.left_out}", file=sys.stderr)
