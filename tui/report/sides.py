"""Loads the sides of ``ftmon compare``: a run's recording, or the rows of a sweep."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from ...protocol.analysis.report.compare import Side
from ...protocol.analysis.report.sides import settings_of, side_of_ranks, side_of_rows
from ...protocol.analysis.sweep.figures import figures
from ...protocol.analysis.sweep.summary import pool
from ...protocol.analysis.sweep.text import settings_text
from ...protocol.errors import FtmonError, UsageError
from ...protocol.recording.collect import RecordedRun
from ...protocol.sweep.rows import RankRow, key_of
from ...protocol.sweep.store import is_results, read
from ..source.find import find_recording

MOST_STEPS = 4096
"""Maximum number of compared steps of a rank: the last ones."""
CSV_SUFFIXES = (".csv", ".tsv")


class Loaded(msgspec.Struct):
    """An argument of the comparison: a run has one side, a sweep one for each configuration."""

    name: str
    of_sweep: bool
    sides: dict[str, Side]


def load(target: str, warm_up: int) -> Loaded:
    """Read a run by name, a recording or a sweep's results.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = Path(target)
    if path.suffix.lower() in CSV_SUFFIXES and os.path.isfile(path):
        raise UsageError(f"{target}: CSV files are not compared; 'ftmon report FILE.csv FILE.csv' shows them together")
    if is_sweep(path):
        rows = list(read(path).answered().values())
        name = path.name.removesuffix(".results.jsonl")
        sides = {key_of(one.settings): side_of_rows(settings_text(one.settings), one.rows) for one in pool(rows)}
        return Loaded(name, True, sides)
    recording, found = read_run(target, warm_up)
    name = found.info.run_id or recording.parent.name
    side = side_of_ranks(
        name,
        rank_rows(found),
        losses(found),
        {**settings_of(list(found.hellos.values())), **_config(recording.parent / "config.yaml")},
        Counter(alert.kind for alert in found.alerts),
        "done" if found.info.state in ("finished", "", "stopped") else found.info.state,
    )
    return Loaded(name, False, {"": side})


def is_sweep(path: Path) -> bool:
    """Return whether a path is a sweep's results, by the file's beginning or else by its name."""
    return is_results(path) or (path.suffix == ".jsonl" and os.path.lexists(path))


def read_run(target: str, warm_up: int) -> tuple[Path, RecordedRun]:
    """Return a run's recording, and its contents after the warm-up.

    Args:
        target: a run's name, a recording or a run directory.
        warm_up: number of first steps of each rank to exclude.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        recording = find_recording(target)
        return recording, RecordedRun(recording, warm_up, MOST_STEPS)
    except FtmonError as error:
        raise UsageError(str(error)) from None


def rank_rows(found: RecordedRun) -> list[RankRow]:
    """Return the figures of each rank over the kept steps."""
    return [
        msgspec.structs.replace(
            figures(rank, found.steps(rank), 0, None, found.hellos.get(rank), found.nvml.get(rank, 0)),
            reserved_peak_bytes=found.peak_reserved.get(rank, 0),
        )
        for rank in found.ranks
    ]


def losses(found: RecordedRun) -> list[float]:
    """Return the losses of the lowest rank with losses."""
    for rank in found.ranks:
        values = [step.loss for step in found.steps(rank) if step.loss is not None]
        if values:
            return values
    return []


def _config(path: Path) -> dict[str, str]:
    """Return the trainer's configuration, flat; empty for other scripts."""
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    flat: dict[str, str] = {}
    _flatten("", tree, flat)
    return {key: value for key, value in flat.items() if key not in ("run.name", "output.dir", "run.master_port")}


def _flatten(path: str, value: object, into: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, below in value.items():
            _flatten(f"{path}.{key}" if path else str(key), below, into)
    elif path:
        into[path] = str(value)
