"""``ftmon logs``: prints the output of a run's ranks from its recording."""

from argparse import Namespace

from ....protocol.messages.telemetry import LogLine
from ....protocol.text import sanitize
from ...source.find import find_recording
from ..access.recordings import check_rank, opened


def show_logs(arguments: Namespace) -> int:
    """Print the last lines of all ranks, or of one, that contain a text.

    Raises:
        UsageError: the run has no such rank.
        RecordingError: the recording cannot be read.
    """
    with opened(find_recording(arguments.run)) as reader:
        # A rank that failed before its first message has lines, although it is not among the known ranks.
        if not reader.logs(rank=arguments.rank, limit=1):
            check_rank(reader.info().ranks, arguments.rank)
        frames = reader.logs(rank=arguments.rank, text=arguments.text, limit=arguments.lines)
    for frame in sorted(frames, key=lambda frame: frame.seq):
        line = frame.message
        if isinstance(line, LogLine):
            source = "launcher" if line.rank < 0 else f"rank {line.rank}"
            print(f"{source}| {sanitize(line.text)}")
    return 0
