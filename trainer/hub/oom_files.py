"""Reports of out-of-memory errors as files of the run: readable without the recording, and whatever becomes of it."""

import sys
import time
from collections.abc import Callable

import msgspec

from ...protocol.oom import OomReport
from ...protocol.private_files import write_private
from ...protocol.rundir import RunDir


def keeper(run: RunDir) -> Callable[[OomReport], OomReport]:
    """Return a writer of reports into the run's ``oom/``; it returns the path, empty if the disk is full."""

    def keep(report: OomReport) -> OomReport:
        stamp = time.strftime("%H%M%S", time.localtime(report.time))
        path = run.path / "oom" / f"rank-{report.rank}-step-{report.step}-{stamp}.json"
        found = msgspec.structs.replace(report, path=str(path.relative_to(run.path)))
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        except OSError as error:
            print(f"{path}: cannot be written: {error.strerror or error}", file=sys.stderr)
            return report
        return found

    return keep
