"""``ftmon logs``: what the ranks of a run printed, from its recording."""

from argparse import Namespace

from ...protocol import rundir
from ...protocol.recording.reader import Reader
from ...protocol.telemetry import LogLine
from ...protocol.text import sanitize


def show_logs(arguments: Namespace) -> int:
    """Print the last lines of all ranks, or of one, that contain a text."""
    run = rundir.find(arguments.run)
    with Reader(run.recording) as reader:
        frames = reader.logs(rank=arguments.rank, text=arguments.text, limit=arguments.lines)
    for frame in sorted(frames, key=lambda frame: frame.seq):
        line = frame.message
        if isinstance(line, LogLine):
            source = "launcher" if line.rank < 0 else f"rank {line.rank}"
            print(f"{source}| {sanitize(line.text)}")
    return 0
