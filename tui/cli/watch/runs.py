"""``ftmon ls``: prints the runs of this user, as a table or as JSON."""

import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from textwrap import wrap

from ....protocol.run import run_store
from ....protocol.text import cells_of, duration, gib, sanitize
from ...model.runs import RunEntry, RunList, recorded_entry
from ...source.find import recording_file
from ..output.printable import print_json

_WIDE = 140
"""Columns from which the table has all its columns, and a run its subject in the same line."""
_INDENT = "    "


def list_runs(arguments: Namespace) -> int:
    """Print the runs of this user, newest first, or the runs of the named recordings.

    Raises:
        RecordingError: a named recording cannot be read.
        RunNotFoundError: a name is neither a file nor a run.
    """
    named: list[str] = getattr(arguments, "runs", [])
    entries = [_named(name) for name in named] if named else RunList().entries()
    if getattr(arguments, "json", False):
        print_json(entries)
    elif not entries:
        print(f"no runs in {run_store.home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    else:
        # Lines of a pipe are not cut.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in table(entries, width):
            print(line)
    return 0


def _named(name: str) -> RunEntry:
    recording = recording_file(name)
    return RunList().entry(run_store.find(name)) if recording is None else recorded_entry(recording)


def table(entries: Sequence[RunEntry], width: int | None) -> Iterator[str]:
    """Yield the lines of the table of runs.

    Args:
        entries: the runs.
        width: columns of the terminal; below 140 each run has its subject in a second line. None: not limited.
    """
    wide = width is None or width >= _WIDE
    heads = ("RUN", "STATE", *(("STARTED",) if wide else ()), "LASTED", "STEP", "LOSS", "EVAL LOSS")
    heads += ("RANKS", "RECORDED") if wide else ()
    rows = [heads, *(_cells(found, wide) for found in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = 3 if wide else 2
    subjects = ("MODEL, DATA, OVERRIDES OR SCRIPT", *(sanitize(found.subject, 1000) for found in entries))
    for row, subject, found in zip(rows, subjects, (None, *entries), strict=True):
        padded = [f"{cell:{'<' if place < texts else '>'}{widths[place]}}" for place, cell in enumerate(row)]
        line, whole = "  ".join(padded), "  ".join([*padded, subject])
        fits = wide and (width is None or cells_of(whole) <= width)
        yield (whole if fits else line).rstrip()
        if found is not None:
            details = ["" if fits else subject, found.problem, found.reason]
            for detail in details:
                text = sanitize(detail, 1000)
                wrapped = [text] if width is None else wrap(text, width - len(_INDENT), break_on_hyphens=False)
                yield from (f"{_INDENT}{part}" for part in wrapped if part)


def _cells(found: RunEntry, wide: bool) -> tuple[str, ...]:
    step, loss, evaluation = f"{found.step:,}", _loss(found.loss), _loss(found.evaluation_loss)
    lasted = duration(round(found.duration_s(time.time())))
    names = (sanitize(found.id), sanitize(found.condition, 20))
    if not wide:
        return (*names, lasted, step, loss, evaluation)
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created))
    size = gib(found.recording_bytes, 1) if found.recording_bytes else "-"
    return (*names, started, lasted, step, loss, evaluation, str(found.ranks), size)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
