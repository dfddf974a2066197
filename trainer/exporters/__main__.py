"""``python -m ftmon.trainer.exporters RUNDIR TARGET``: sends a run to one system, beside its hub (``--report-to``).

It ends with the run, at most ``Target.end_seconds`` later: what its target has not taken is then counted and given up.
"""

import importlib
import os
import signal
import sys
import threading

from ...protocol.errors import FtmonError, UsageError
from ...protocol.host.process import never_fail
from ...protocol.run.rundir import RunDir
from ...protocol.run.targets import REPORT_TARGETS
from .report import Feed, Target
from .stream import RunStream, yield_cpu

_WAIT_SECONDS = 0.5


def make_target(name: str) -> Target:
    """Return the target of this name; raise ``UsageError`` if there is none or its package is missing."""
    if name not in REPORT_TARGETS:
        raise UsageError(f"{name}: is not a target of --report-to; choose from {', '.join(REPORT_TARGETS)}")
    module, _, attribute = REPORT_TARGETS[name].target.partition(":")
    try:
        return getattr(importlib.import_module(f"{__package__}.{module}"), attribute)()
    except ImportError as error:
        raise UsageError(f"--report-to {name}: {error}; pip install 'ftmon[{name}]'") from None


def export(run: RunDir, name: str) -> None:
    """Send a run to a target until the run is over.

    Raises:
        UsageError: there is no such target, or its package is not installed.
        RunDirError: the run directory cannot be read.
    """
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    stream = RunStream(run)
    yield_cpu()  # not before: what is sent until it has subscribed is missed
    try:
        target = make_target(name)
        feed = Feed(target, run.read_run())
        feed.start()
        while not stream.over and not stopped.is_set():
            for frame, live in stream.read(_WAIT_SECONDS):
                feed.put(frame, live)
            stream.report(name, feed.dropped, feed.error)
        done = feed.end(target.end_seconds)
        error = feed.error or ("" if done else f"not done {target.end_seconds:g} s after the end of the run")
        if error or feed.dropped or stream.dropped:
            lost = f"{feed.dropped:,} points were dropped, and {stream.dropped:,} messages of the hub missed"
            print(f"{name}: {'; '.join(filter(None, (error, lost)))}", file=sys.stderr)
    finally:
        stream.close()


def main(argv: list[str]) -> int:
    """Send the run of the directory named in ``argv`` to the target named there; return the exit status."""
    if len(argv) != 2:
        print("usage: python -m ftmon.trainer.exporters RUNDIR TARGET", file=sys.stderr)
        return 2
    never_fail()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ctrl-c meant for the job
    try:
        export(RunDir(argv[0]), argv[1])
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a client's own threads and exit handlers may block for long
