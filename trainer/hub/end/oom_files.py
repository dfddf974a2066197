"""Writes reports of out-of-memory errors as files of the run, which are readable without the recording."""

import sys
import time
from collections.abc import Callable

import msgspec

from ....protocol.host.private_files import write_private
from ....protocol.messages.oom import OomReport
from ....protocol.run.rundir import RunDir


def keeper(run: RunDir) -> Callable[[OomReport], OomReport]:
    """Return a function that writes a report into the run's ``oom/`` and returns its path; empty on a full disk."""

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
