"""``python -m ftmon.trainer.exporters.replay RECORDING TARGET``: sends a recording to a tracker (``ftmon export``).

Files of the tracker are made in the working directory, unless its own variables name another place.
"""

import os
import signal
import sys
from pathlib import Path

from ...protocol.errors import FtmonError, UsageError
from ...protocol.messages.control import Alert
from ...protocol.recording.reader import Reader
from ...protocol.run.rundir import RunFile
from ...protocol.text import counted, sanitize
from .__main__ import make_target
from .report import Sent
from .trackers import Tracker

_MESSAGES = 1_000


def replay(recording: Path, name: str) -> str:
    """Send a recording to a tracker; return in words what was written, and where.

    Raises:
        UsageError: there is no such tracker, or its package is not installed.
        RecordingError: the recording cannot be read.
        FtmonError: the tracker does not take it.
    """
    target = make_target(name)
    if not isinstance(target, Tracker):
        raise UsageError(f"{name}: a recording cannot be sent there")
    target.replayed = True
    with Reader(recording, once=True) as reader:
        info = reader.info()
        target.open(RunFile(info.run_id or info.name, info.name, info.started, [], "", info.host, info.kind))
        after = 0
        while frames := reader.frames(after, _MESSAGES):
            after = frames[-1].seq
            target.points([Sent(frame, True) for frame in frames])
            for frame in frames:
                if isinstance(frame.message, Alert):
                    target.alert(frame.message)
        target.close()
    return f"{counted(target.written, 'row')}: {target.client.where}"


def main(argv: list[str]) -> int:
    """Replay the recording named in ``argv`` into the tracker named there; return the exit status."""
    if len(argv) != 2:
        print("usage: python -m ftmon.trainer.exporters.replay RECORDING TARGET", file=sys.stderr)
        return 2
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    words = os.fdopen(os.dup(1), "w")  # a tracker's client has this process's standard output
    try:
        print(f"written: {sanitize(replay(Path(argv[0]), argv[1]))}", file=words, flush=True)
    except FtmonError as error:
        print(f"ftmon: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a client's own threads and exit handlers may block for long
