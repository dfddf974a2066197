"""Loads the sides of ``ftmon compare``: a run's recording, or the rows of a sweep."""

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec
import yaml

from ...protocol.analysis.report.compare import Measure, Side, StepRange
from ...protocol.analysis.report.sides import settings_of, side_of_ranks, side_of_rows
from ...protocol.analysis.sweep.figures import figures
from ...protocol.analysis.sweep.summary import pool
from ...protocol.analysis.sweep.text import settings_text
from ...protocol.errors import FtmonError, UsageError
from ...protocol.recording.collect import RecordedRun
from ...protocol.recording.reader import Reader
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
    steps: StepRange | None = None
    """The steps of a run that its figures are of."""


def load_both(before: str, after: str, warm_up: int) -> tuple[Loaded, Loaded]:
    """Read two runs, recordings or sweeps' results; the figures of two runs are those of their common steps.

    Raises:
        UsageError: one does not exist, or cannot be read.
    """
    for target in (before, after):
        if Path(target).suffix.lower() in CSV_SUFFIXES and os.path.isfile(target):
            raise UsageError(
                f"{target}: CSV files are not compared; 'ftmon report FILE.csv FILE.csv' shows them together"
            )
    if is_sweep(Path(before)) or is_sweep(Path(after)):
        return _load(before, warm_up), _load(after, warm_up)
    lasts = [_last_step(target) for target in (before, after)]
    one, other = (read_run(target, warm_up, until=min(lasts)) for target in (before, after))
    kept = [[step.step for rank in run.ranks for step in run.steps(rank)] for _, run in (one, other)]
    if not all(kept):
        return _of_run(*one), _of_run(*other)
    first = max(map(min, kept))
    for _, run in (one, other):
        run.drop_before(first)
    evaluated = _common_evaluation(one[1], other[1])
    steps = StepRange(first, min(lasts), lasts[0], lasts[1], evaluated[1] if evaluated is not None else None)
    return _of_run(*one, steps, evaluated), _of_run(*other, steps, evaluated)


def _last_step(target: str) -> int:
    try:
        with Reader(find_recording(target)) as reader:
            return reader.info().last_step
    except FtmonError as error:
        raise UsageError(str(error)) from None


def _common_evaluation(before: RecordedRun, after: RecordedRun) -> tuple[str, int] | None:
    """Return the name and step of the last evaluation of both runs, of the data set evaluated first; None: none."""
    known = {(each.name, each.step) for each in after.evaluations if each.loss is not None}
    both = [(each.name, each.step) for each in before.evaluations if each.loss is not None]
    common = [each for each in both if each in known]
    return max((each for each in common if each[0] == common[0][0]), key=lambda each: each[1], default=None)


def _load(target: str, warm_up: int) -> Loaded:
    path = Path(target)
    if not is_sweep(path):
        return _of_run(*read_run(target, warm_up))
    rows = list(read(path).answered().values())
    name = path.name.removesuffix(".results.jsonl")
    sides = {key_of(one.settings): side_of_rows(settings_text(one.settings), one.rows) for one in pool(rows)}
    return Loaded(name, True, sides)


def _of_run(
    recording: Path, found: RecordedRun, steps: StepRange | None = None, evaluated: tuple[str, int] | None = None
) -> Loaded:
    name = found.info.run_id or recording.parent.name
    side = side_of_ranks(
        name,
        rank_rows(found),
        losses(found),
        {**settings_of(list(found.hellos.values())), **_config(recording.parent / "config.yaml")},
        Counter(alert.kind for alert in found.alerts),
        "done" if found.info.state in ("finished", "", "stopped") else found.info.state,
    )
    loss = next((each.loss for each in reversed(found.evaluations) if (each.name, each.step) == evaluated), None)
    if loss is not None:
        side.measures["evaluation loss"] = Measure(loss, unit="loss")
    return Loaded(name, False, {"": side}, steps)


def is_sweep(path: Path) -> bool:
    """Return whether a path is a sweep's results, by the file's beginning or else by its name."""
    return is_results(path) or (path.suffix == ".jsonl" and os.path.lexists(path))


def read_run(target: str, warm_up: int, until: int | None = None) -> tuple[Path, RecordedRun]:
    """Return a run's recording, and its contents after the warm-up.

    Args:
        target: a run's name, a recording or a run directory.
        warm_up: number of first steps of each rank to exclude.
        until: the last step; None: all.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        recording = find_recording(target)
        return recording, RecordedRun(recording, warm_up, MOST_STEPS, until)
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
