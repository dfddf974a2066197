"""``ftmon export`` and ``import``: recordings for other tools, and runs from their logs."""

import os
import subprocess
from argparse import Namespace
from pathlib import Path

from ...protocol.errors import UsageError
from ...protocol.recording.reader import Reader
from ...protocol.recording.series import SERIES
from ...protocol.run.rundir import find_recording
from ...protocol.run.start import module_command
from ...protocol.run.targets import REPORT_TARGETS, TRACKERS, is_installed
from ...protocol.text import counted, sanitize
from ..export.tables import check_outputs, write_table
from .access import opened
from .output import print_json


def import_run(arguments: Namespace) -> int:
    """Make a run of a log, and print its name."""
    from ..source.imported import import_log

    made = import_log(Path(arguments.file), arguments.name)
    if arguments.json:
        counts = {name: getattr(made, name) for name in ("steps", "last_step", "evaluations", "repeated")}
        print_json({"run": made.run.id, **counts})
        return 0
    steps, evaluations = counted(made.steps, "logged step"), counted(made.evaluations, "evaluation")
    print(f"imported: {steps} up to step {made.last_step:,}, {evaluations}")
    if made.repeated:
        print(f"log entries left out, as later ones repeat their steps: {made.repeated:,}")
    print(f"ftmon report {made.run.id}")
    return 0


def _send(source: Path, tracker: str, folder: str | None) -> int:
    """Send a recording to a tracker, in a process of the trainer's side; return its exit status."""
    if not is_installed(REPORT_TARGETS[tracker].package):
        raise UsageError(f"{tracker} needs packages that are not installed: pip install 'ftmon[{tracker}]'")
    environ = dict(os.environ)
    if folder is not None:
        try:
            Path(folder).mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output: {folder}: no folder for the files: {error.strerror}") from None
        environ.setdefault("TRACKIO_DIR", str(Path(folder, "trackio").absolute()))
    words = module_command("ftmon.trainer.exporters", ["--replay", str(source.absolute()), tracker])
    return subprocess.run(words, stdin=subprocess.DEVNULL, cwd=folder, env=environ, check=False).returncode


_TABLES = ("parquet", "arrow", "csv")
_OF_STEP = ("memory_viz", "flamegraph")


def export(arguments: Namespace) -> int:
    """Write the requested files of a run's recording, or send it to a tracker."""
    kind, series = arguments.format, arguments.series or "steps"
    if arguments.series and kind not in _TABLES:
        raise UsageError(f"--series: {kind} has none; remove the option, or export {', '.join(_TABLES)}")
    if kind not in _OF_STEP and (arguments.rank is not None or arguments.step is not None):
        raise UsageError(
            f"--rank, --step: {kind} has all ranks and steps; remove the options, or export {' or '.join(_OF_STEP)}"
        )
    source = find_recording(arguments.run)
    if kind in TRACKERS:
        return _send(source, kind, arguments.output)
    if not arguments.output:
        raise UsageError(f"--output: {kind} needs the file to write: -o FILE")
    target = Path(arguments.output)
    files = {series: target}
    if series == "all":
        try:
            target.mkdir(exist_ok=True)
        except OSError as error:
            raise UsageError(f"--output: {target}: no folder for the files: {error.strerror}") from None
        files = {name: target / f"{name}.{kind}" for name in SERIES}
    for path in files.values():
        check_outputs({"--output": str(path)}, [source])
    with opened(source) as reader:
        for name, path in files.items():
            print(f"written: {path}: {sanitize(_write(reader, name, path, arguments))}")
    return 0


def _write(reader: Reader, series: str, path: Path, arguments: Namespace) -> str:
    """Write one file; return what it has, in words. Only the modules of its format are imported."""
    kind, rank = arguments.format, arguments.rank or 0
    if kind in _TABLES:
        return counted(write_table(reader, series, kind, path), "row")
    if kind == "perfetto":
        from ..export.perfetto import write_trace

        return counted(write_trace(reader, path), "event")
    from ..export.snapshots import write_flame_graph, write_snapshot

    return (write_snapshot if kind == "memory_viz" else write_flame_graph)(reader, rank, arguments.step, path)
