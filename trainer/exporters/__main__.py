"""``python -m ftmon.trainer.exporters RUNDIR TARGET``: sends a run to one system, beside its hub.

TARGET is ``metrics`` (``--metrics``) or one of ``--report-to``. The process ends with the run, at most
its ``end_seconds`` later: what its target has not taken is then counted and given up.
``... --replay RECORDING TARGET`` sends a recording to a tracker (``ftmon export``); the tracker's files are made in the
working directory, unless its own variables name another place.
"""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...protocol.errors import FtmonError, TargetError, UsageError
from ...protocol.host.process import never_fail
from ...protocol.run.rundir import RunDir
from ...protocol.run.targets import METRICS, REPORT_TARGETS
from ...protocol.text import sanitize
from .report import Feed, Target
from .stream import RunStream, yield_cpu

if TYPE_CHECKING:
    from .metrics import Prometheus

_GATHER_SECONDS = 2.0  # Longest time for which messages are gathered: each time it wakes up it disturbs ranks on CPUs


def make_target(name: str) -> Target:
    """Return the target of this name; raise ``UsageError`` if there is none or its package is missing."""
    if name not in REPORT_TARGETS:
        raise UsageError(f"{name}: is not a target of --report-to; choose from {', '.join(REPORT_TARGETS)}")
    module, _, attribute = REPORT_TARGETS[name].target.partition(":")
    try:
        return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)()
    except ImportError as error:
        raise UsageError(f"--report-to {name}: {error}; pip install 'ftmon[{name}]'") from None


def _sink(run: RunDir, name: str) -> "Feed | Prometheus":
    file = run.read_run()
    if name != METRICS:
        return Feed(make_target(name), file)
    from .metrics import Prometheus

    return Prometheus(file)


def export(run: RunDir, name: str) -> None:
    """Send a run to a target until the run is over, or SIGTERM; what has arrived by then is sent too.

    Raises ``UsageError`` if there is no such target, its package is not installed, or its port cannot be used,
    ``RunDirError`` if the run directory cannot be read.
    """
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    stream = RunStream(run)
    yield_cpu()  # not before: what is sent until it has subscribed is missed
    try:
        sink = _sink(run, name)
        sink.start()
        while True:
            for frame, live in stream.read(min(_GATHER_SECONDS, sink.seconds), woken):
                sink.put(frame, live)
            sink.check(stream.dropped)
            stream.report(name, sink.dropped, sink.error)
            if stream.over or stopped:  # SIGTERM comes after the hub's last message
                break
        done = sink.end(sink.end_seconds)
        error = sink.error or ("" if done else f"not done {sink.end_seconds:g} s after the end of the run")
        if error or sink.dropped or stream.dropped:
            lost = f"{sink.dropped:,} points were dropped, and {stream.dropped:,} messages of the hub missed"
            print("; ".join(filter(None, (error, lost))), file=sys.stderr)
    finally:
        stream.close()


def replay(recording: Path, name: str) -> None:
    """Send a recording to a tracker; print what was written, and where.

    Raises ``UsageError`` if there is no such tracker, or its package is not installed, ``RecordingError`` if the
    recording cannot be read, ``FtmonError`` if the tracker does not take it.
    """
    from .tracker_clients import without_secrets
    from .trackers import Tracker

    words = os.fdopen(os.dup(1), "w")  # a tracker's client has this process's standard output
    target = make_target(name)
    if not isinstance(target, Tracker):
        raise UsageError(f"{name}: a recording cannot be sent there")
    try:
        written = target.replay(recording)
    except FtmonError:
        raise
    except Exception as error:  # of its client, of any type: a full disk, a database of another version
        raise TargetError(f"{name}: {type(error).__name__}: {without_secrets(str(error))}") from None
    print(f"written: {sanitize(written)}", file=words, flush=True)


def main(argv: list[str]) -> int:
    """Send the run or recording named in ``argv`` to the target named there; return the exit status."""
    replays = argv[:1] == ["--replay"]
    words = argv[1:] if replays else argv
    if len(words) != 2:
        print("usage: python -m ftmon.trainer.exporters [--replay] PATH TARGET", file=sys.stderr)
        return 2
    if not replays:
        never_fail()
    signal.signal(signal.SIGINT, signal.SIG_DFL if replays else signal.SIG_IGN)  # a ctrl-c is meant for the job
    try:
        if replays:
            replay(Path(words[0]), words[1])
        else:
            export(RunDir(words[0]), words[1])
    except FtmonError as error:
        print(f"ftmon: {error}" if replays else error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a client's own threads and exit handlers may block for long
