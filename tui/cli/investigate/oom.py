"""``ftmon oom``: prints the report of an out-of-memory error from a run, a recording or a memory snapshot."""

from argparse import Namespace
from pathlib import Path

from ....protocol.analysis.oom.verdict import OomContext
from ....protocol.analysis.oom.words import explain
from ....protocol.analysis.remedies import remedies
from ....protocol.errors import FtmonError
from ....protocol.messages.oom import OomReport
from ....protocol.messages.telemetry import Hello, Oom
from ....protocol.recording.reader import Reader
from ...source.find import find_recording
from ..access.recordings import opened
from ..output.printable import print_json
from .oom_text import report_lines

_MOST = 64
_SQLITE = b"SQLite format 3\0"


class NoOomError(FtmonError):
    """The run, recording or snapshot has no out-of-memory error."""


def show_oom(arguments: Namespace) -> int:
    """Print the reports of a run's out-of-memory errors, newest last, the earlier ones in a line each.

    Raises:
        NoOomError: there was none.
        RunNotFoundError: it is neither a file nor a run.
        RecordingError: the recording cannot be read.
        SnapshotError: the snapshot cannot be read.
    """
    name: str = arguments.target
    run, reports = _of_snapshot(name) if _is_snapshot(Path(name)) else _of_recording(name)
    reports = [report for report in reports if arguments.rank in (None, report.rank)]
    if not reports:
        whose = f"rank {arguments.rank} of " if arguments.rank is not None else ""
        raise NoOomError(f"{whose}{run or name}: no out-of-memory error is recorded")
    if arguments.json:
        result = {"run": run, "file": None if run else name, "reports": reports}
        print_json(result)
        return 0
    for line in report_lines(reports, of_snapshot=not run):
        print(line)
    return 0


def _is_snapshot(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) != _SQLITE
    except (OSError, ValueError):
        return False  # reading it as a recording reports the problem


def _of_snapshot(name: str) -> tuple[str, list[OomReport]]:
    from ....protocol.analysis.allocator.snapshot.replay import Replay
    from ....protocol.analysis.oom_report.from_snapshot import report_of
    from ....protocol.snapshot.reader import open_snapshot

    snapshot = open_snapshot(name)
    report = report_of(snapshot, [Replay(snapshot, device) for device in snapshot.devices()])
    return "", [report] if report is not None else []


def _of_recording(name: str) -> tuple[str, list[OomReport]]:
    path = find_recording(name)
    with opened(path) as reader:
        info = reader.info()
        reports = [
            frame.message
            for rank in info.ranks
            for frame in reader.sampled("oom_report", rank, _MOST)
            if isinstance(frame.message, OomReport)
        ]
        if not reports:
            reports = _without_hub(reader, info.ranks)
    return info.run_id or path.parent.name, sorted(reports, key=lambda report: report.time)


def _without_hub(reader: Reader, ranks: list[int]) -> list[OomReport]:
    """Return the ranks' reports with a verdict, for a recording without the hub's (of an earlier version)."""
    state = [frame.message for frame in reader.state_at(float("inf"))]
    hellos = {message.rank: message for message in state if isinstance(message, Hello)}
    reports: list[OomReport] = []
    for rank in ranks:
        for frame in reader.sampled("oom", rank, _MOST):
            oom = frame.message
            if isinstance(oom, Oom):
                around = OomContext(hellos.get(rank))
                verdict = explain(oom, around)
                made = OomReport(rank, oom.step, oom.phase, oom.time, oom, verdict, remedies(oom, verdict, around))
                reports.append(made)
    return reports
