"""Reads the sources of a report: a run's recording, a sweep's results, or a CSV file of other measurements."""

import os
import shlex
from pathlib import Path

import msgspec

from ...protocol.analysis.estimates.measured import (
    UNITS,
    CsvMapping,
    HeaderError,
    Measurement,
    guess_mapping,
    read_csv,
)
from ...protocol.errors import UsageError
from ...protocol.recording.reader import Reader
from ...protocol.recording.results import StepPoint, run_state
from ...protocol.run.endings import ending_in_words
from ...protocol.sweep.rows import RankRow
from ...protocol.sweep.store import Results, read
from ...protocol.text import sanitize
from ..model.runs import recorded_entry
from .sides import CSV_SUFFIXES, is_sweep, rank_rows, read_run

_POINTS = 200
_LARGEST_CSV = 256 << 20


class RunData(msgspec.Struct):
    """A run."""

    name: str
    facts: list[tuple[str, str]]
    series: dict[int, list[StepPoint]]
    """Steps by rank, pooled if there are many."""
    ranks: list[RankRow]
    seconds: float


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

    Args:
        target: a run's name, a recording, a run directory, a sweep's results or a CSV file.
        warm_up: number of first steps of a run that its figures exclude.
        mapping: columns of CSV files; None: guessed from their heads.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    found = _load(target, warm_up, mapping)
    found.name = sanitize(found.name)
    return found


def _load(target: str, warm_up: int, mapping: CsvMapping | None) -> Data:
    path = Path(target)
    if is_sweep(path):
        return SweepData(path.name.removesuffix(".results.jsonl"), read(path))
    if path.suffix.lower() in CSV_SUFFIXES and os.path.isfile(path):
        return _csv(path, mapping)
    return _run(target, warm_up)


def parse_mapping(text: str) -> CsvMapping:
    """Parse ``length=seq,allocated=gpu_{rank}_alloc,iteration=iter,unit=MiB``.

    Raises:
        UsageError: it has another form.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, column = part.partition("=")
        if not equals or not name.strip() or not column.strip():
            raise UsageError(f"--columns: {part!r} is not of the form name=column, such as length=seq_len")
        if name.strip() in found:
            raise UsageError(f"--columns: {name.strip()} is given twice")
        found[name.strip()] = column.strip()
    length = found.pop("length", "")
    if not length:
        raise UsageError("--columns needs length=COLUMN, and a column for each figure, such as allocated=peak_mib")
    rank, iteration, unit = found.pop("rank", ""), found.pop("iteration", ""), found.pop("unit", "MiB")
    if unit not in UNITS:
        raise UsageError(f"--columns: unit must be one of {', '.join(UNITS)}, not {unit}")
    if not found:
        raise UsageError("--columns names no figure: add one, such as allocated=gpu_{rank}_peak_mib")
    return CsvMapping(length, found, rank, iteration, unit)


def _csv(path: Path, mapping: CsvMapping | None) -> CsvData:
    try:
        if path.stat().st_size > _LARGEST_CSV:
            raise UsageError(f"{path}: is larger than 256 MiB")
        text = path.read_text(encoding="utf-8-sig")
        chosen = mapping or guess_mapping(text)
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
        series = {rank: reader.series(rank, info.first_t - 1, info.last_t + 1, _POINTS) for rank in info.ranks}
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
    seconds = max(0.0, info.last_t - info.started)  # an empty recording has no last time
    return RunData(info.run_id or recording.parent.name, shown, series, rank_rows(found), seconds)
