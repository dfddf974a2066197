"""The contents of a report, and its sources: a run's recording, a sweep's results, or a CSV file."""

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from math import isfinite
from pathlib import Path

import msgspec
import yaml

from ...protocol.analysis.estimates.memory import UNITS, CsvMapping, HeaderError, Measurement, guess_mapping, read_csv
from ...protocol.analysis.report import Measure, Side, StepRange, settings_of, side_of_ranks, side_of_rows
from ...protocol.analysis.sweep.summary import figures, pool, settings_text
from ...protocol.errors import FtmonError, UsageError
from ...protocol.messages.telemetry import Evaluation
from ...protocol.recording.reader import Reader, RecordedRun
from ...protocol.recording.results import StepPoint, TrainingPoint, run_state
from ...protocol.run.end import ending_in_words
from ...protocol.run.rundir import find_recording
from ...protocol.sweep.rows import RankRow, Results, is_results, key_of, read
from ...protocol.text import sanitize
from ..model.runs import recorded_entry


class Curve(msgspec.Struct, frozen=True):
    """A figure over the horizontal axis: the median, lowest and highest rank."""

    name: str
    xs: list[float]
    low: list[float]
    median: list[float]
    high: list[float]
    predicted: bool = False
    sparse: bool = False  # the terminal draws its points without a line, which would hide other curves

    @property
    def has_band(self) -> bool:
        """Whether ranks differ."""
        return self.low != self.high


OUT_OF_MEMORY = "out of memory"


class Chart(msgspec.Struct, frozen=True):
    """Curves with one vertical axis. ``unit`` of the values is ``GiB``, ``ms``, ``iterations/s`` ...; empty: none."""

    title: str
    x_name: str
    unit: str
    curves: list[Curve]
    marks: list[tuple[float, str]] = []  # positions on the horizontal axis with text: crossovers, `OUT_OF_MEMORY`
    notes: list[str] = []
    band: str = "lowest and highest rank"  # the ends of the curves' bands
    from_zero: bool = True  # the vertical axis begins at 0, or below

    @property
    def heading(self) -> str:
        """The title with the unit."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value to draw; the first is below the second."""
        bottom = min((y for curve in self.curves for y in curve.low), default=0.0)
        top = max((y for curve in self.curves for y in curve.high), default=0.0)
        if self.from_zero:
            bottom = min(bottom, 0.0)
            top = max(top, 0.0) or (0.0 if bottom < 0 else 1.0)
        largest = max(abs(bottom), abs(top))
        if top - bottom > largest * 1e-6:
            return bottom, top
        return bottom - (largest * 0.05 or 1.0), top + (largest * 0.05 or 1.0)


class Section(msgspec.Struct, frozen=True):
    """One run, sweep or file; or several in one picture."""

    title: str
    facts: list[tuple[str, str]] = []
    charts: list[Chart] = []
    table: list[list[str]] = []
    notes: list[str] = []


class Report(msgspec.Struct, frozen=True):
    """All sections, in order."""

    title: str
    sections: list[Section]


MOST_STEPS = 4096  # maximum number of compared steps of a rank: the last ones
CSV_SUFFIXES = (".csv", ".tsv")


class Loaded(msgspec.Struct):
    """An argument of the comparison: a run has one side, a sweep one for each configuration."""

    name: str
    of_sweep: bool
    sides: dict[str, Side]
    steps: StepRange | None = None  # the steps of a run that its figures are of


def load_both(before: str, after: str, warm_up: int) -> tuple[Loaded, Loaded]:
    """Read two runs, recordings or sweeps' results; the figures of two runs are those of their common steps.

    Raises ``UsageError`` if one does not exist, or cannot be read.
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
    compared, differ_from = _compare_data(one[1], other[1])
    last_evaluation = evaluated[1] if evaluated is not None else None
    steps = StepRange(first, min(lasts), lasts[0], lasts[1], last_evaluation, compared, differ_from)
    return _of_run(*one, steps, evaluated), _of_run(*other, steps, evaluated)


def _compare_data(before: RecordedRun, after: RecordedRun) -> tuple[int, int | None]:
    """Return how many steps have known data in both runs, and the first step whose data differ, warm-up included.

    Not a resumed run's first step alone: the batches that a loop fetches and skips before it are seen as a part of it.
    """
    pairs = [
        (step, batch, before.batches[rank][step])
        for rank, batches in after.batches.items()
        for step, batch in batches.items()
        if step in before.batches.get(rank, ())
    ]
    differing = {step for step, one, other in pairs if one != other}
    first = max(min(chain.from_iterable(run.batches.values()), default=1) for run in (before, after))
    return len(pairs), min(differing - ({first} if differing == {first} and first > 1 else set()), default=None)


def _last_step(target: str) -> int:
    try:
        with Reader(find_recording(target)) as reader:
            return reader.info().last_step
    except FtmonError as error:
        raise UsageError(str(error)) from None


def _common_evaluation(before: RecordedRun, after: RecordedRun) -> tuple[str, int] | None:
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
    side = msgspec.structs.replace(side, not_finite=_not_finite(found))
    loss = next((each.loss for each in reversed(found.evaluations) if (each.name, each.step) == evaluated), None)
    if loss is not None and isfinite(loss):
        side.measures["evaluation loss"] = Measure(loss, unit="loss")
    return Loaded(name, False, {"": side}, steps)


def is_sweep(path: Path) -> bool:
    """Return whether a path is a sweep's results, by the file's beginning or else by its name."""
    return is_results(path) or (path.suffix == ".jsonl" and os.path.lexists(path))


def read_run(target: str, warm_up: int, until: int | None = None) -> tuple[Path, RecordedRun]:
    """Return a run's recording, and its contents after the first ``warm_up`` steps of each rank, up to a step.

    Raises ``UsageError`` if there is none, or it cannot be read.
    """
    try:
        recording = find_recording(target)
        return recording, RecordedRun(recording, warm_up, MOST_STEPS, until, last=True)
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
    by_rank = ([step.loss for step in found.steps(rank) if step.loss is not None] for rank in found.ranks)
    return next(filter(None, by_rank), [])


def _not_finite(found: RecordedRun) -> dict[str, int]:
    """Count the kept steps in which a rank's loss or gradient norm was NaN or infinite.

    The norm of an update that the loss scaler skipped does not count.
    """
    steps = [step for rank in found.ranks for step in found.steps(rank)]
    lost = {
        "loss": {step.step for step in steps if step.loss is not None and not isfinite(step.loss)},
        "gradient norm": {
            step.step
            for step in steps
            if step.grad_norm is not None and not isfinite(step.grad_norm) and not step.overflow
        },
    }
    return {name: len(numbers) for name, numbers in lost.items() if numbers}


def _config(path: Path) -> dict[str, str]:
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    skipped = ("", "run.name", "output.dir", "run.master_port")
    return {key: value for key, value in _flat("", tree) if key not in skipped}


def _flat(path: str, value: object) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield path, str(value)
        return
    for key, below in value.items():
        yield from _flat(f"{path}.{key}" if path else str(key), below)


_POINTS = 200
_LARGEST_CSV = 256 << 20


class RunData(msgspec.Struct):
    """A run."""

    name: str
    facts: list[tuple[str, str]]
    series: dict[int, list[StepPoint]]  # steps by rank, pooled if there are many
    training: dict[int, list[TrainingPoint]]  # the same
    evaluations: list[Evaluation]
    not_finite: list[int]  # steps in which the loss of a rank was NaN or infinite
    ranks: list[RankRow]
    seconds: float
    gpus: int  # number of ranks, each on a GPU of its own


class SweepData(msgspec.Struct):
    """A sweep."""

    name: str
    results: Results


class CsvData(msgspec.Struct):
    """A CSV file of another tool's measurements."""

    name: str
    mapping: CsvMapping
    measurements: list[Measurement]


Data = RunData | SweepData | CsvData


def load(target: str, warm_up: int, mapping: CsvMapping | None) -> Data:
    """Return the data of one source of a report; its name is safe for a file and a terminal.

    ``target`` is a run's name, a recording, a run directory, a sweep's results or a CSV file. Figures of a run exclude
    its first ``warm_up`` steps. Without a ``mapping``, the columns of CSV files are guessed from their heads. Raises
    ``UsageError`` if there is none, or it cannot be read.
    """
    path = Path(target)
    if is_sweep(path):
        found = SweepData(path.name.removesuffix(".results.jsonl"), read(path))
    elif path.suffix.lower() in CSV_SUFFIXES and os.path.isfile(path):
        found = _csv(path, mapping)
    else:
        found = _run(target, warm_up)
    found.name = sanitize(found.name)
    return found


def parse_mapping(text: str) -> CsvMapping:
    """Parse ``length=seq,allocated=gpu_{rank}_alloc,its=rate,iteration=iter,unit=MiB``; figures may be left out.

    Raises ``UsageError`` for another form.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, _, column = (text.strip() for text in part.partition("="))
        if not name or not column:
            raise UsageError(f"--columns: {part!r} is not of the form name=column, such as length=seq_len")
        if name in found:
            raise UsageError(f"--columns: {name} is given twice")
        found[name] = column
    length = found.pop("length", "")
    if not length:
        raise UsageError("--columns needs length=COLUMN, and mostly a column for each figure: allocated=peak_mib")
    rank, iteration, unit = found.pop("rank", ""), found.pop("iteration", ""), found.pop("unit", "MiB")
    if unit not in UNITS:
        raise UsageError(f"--columns: unit must be one of {', '.join(UNITS)}, not {unit}")
    return CsvMapping(length, found, rank, iteration, unit)


def _csv(path: Path, mapping: CsvMapping | None) -> CsvData:
    try:
        if path.stat().st_size > _LARGEST_CSV:
            raise UsageError(f"{path}: is larger than 256 MiB")
        text = path.read_text(encoding="utf-8-sig")
        chosen = mapping if mapping and mapping.figures else guess_mapping(text, mapping.length if mapping else "")
        return CsvData(path.stem, chosen, read_csv(text, chosen))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is not a text file in UTF-8") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        guessed = mapping is None and not isinstance(error, HeaderError)
        hint = "; name its columns with --columns length=...,allocated=..." if guessed else ""
        raise UsageError(f"{path}: {error}{hint}") from None


def _run(target: str, warm_up: int) -> RunData:
    recording, found = read_run(target, warm_up)
    info = found.info
    with Reader(recording) as reader:
        window = (info.first_t - 1 if found.began is None else found.began, info.last_t + 1, _POINTS)
        series = {rank: reader.series(rank, *window) for rank in info.ranks}
        training = {rank: reader.training(rank, *window) for rank in info.ranks}
    entry = recorded_entry(recording, info)
    hello = found.hellos[min(found.hellos)] if found.hellos else None
    ending = f" ({ending_in_words(info.exit_code, None)})" if info.exit_code else ""
    facts = [
        ("script", shlex.join(entry.script)),
        ("model", entry.model),
        ("data", ", ".join(entry.data)),
        ("configuration", entry.config),
        ("overrides", " ".join(entry.overrides)),
        ("host", info.host),
        ("trainings", f"{found.trainings}, of which the last is shown" if found.trainings > 1 else ""),
        ("state", run_state(info.state, info.live) + ending),
        ("reason", entry.reason),
        ("steps", f"{info.last_step:,}"),
        ("loss", "" if entry.loss is None else f"{entry.loss:.4f}"),
        ("evaluation loss", "" if entry.evaluation_loss is None else f"{entry.evaluation_loss:.4f}"),
        ("ranks", str(len(info.ranks))),
    ]
    if hello is not None:
        facts += [
            ("device", hello.device.name),
            ("class", hello.model if hello.model != entry.model else ""),
            ("parameters", f"{hello.parameters:,}" if hello.parameters else ""),
            ("ZeRO stage", "" if hello.zero_stage is None else str(hello.zero_stage)),
            ("versions", ", ".join(f"{name} {version}" for name, version in hello.versions.items())),
        ]
    if info.missing:
        facts.append(("missing", info.missing))
    shown = [(key, value) for key, value in facts if value]
    seconds = entry.duration_s(max(info.last_t, info.started))  # an empty recording has no last time
    name = info.run_id or recording.parent.name
    not_finite = sorted(found.not_finite)
    return RunData(
        name, shown, series, training, found.evaluations, not_finite, rank_rows(found), seconds, len(info.ranks)
    )
