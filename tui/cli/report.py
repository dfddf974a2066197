"""``ftmon report`` and ``compare``: runs and sweeps as charts and tables, and their differences."""

import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import msgspec

from ... import __version__
from ...protocol.analysis.report import Comparison, compare, comparison_lines, noisy, summary_line
from ...protocol.errors import UsageError
from ...protocol.run.rundir import find_recording
from ...protocol.text import sanitize
from ..export.tables import check_outputs
from ..report.build import build, lines, records, to_csv, to_parquet, write_file
from ..report.data import Loaded, load, load_both, parse_mapping
from ..report.pictures import page, png, sheet
from . import output
from .output import draws_ascii, print_json

_MOST = 10


def show_comparison(arguments: Namespace) -> int:
    """Print a comparison; return 1 if the gate is exceeded."""
    before, after = load_both(arguments.before, arguments.after, arguments.warm_up)
    found = compare_loaded(before, after, arguments.gate)
    checked = [figure for one in found for figure in one.differences if arguments.gate is None or figure.gated]
    if not checked and not any(one.regressions for one in found):
        raise UsageError(
            f"nothing to compare: {before.name} and {after.name} have no measured steps in common; --warm-up excludes "
            f"the first {arguments.warm_up} steps of a run"
        )
    if arguments.json:
        print_json({"gate": arguments.gate, "comparisons": found})
    else:
        shown = found if len(found) <= _MOST else [one for one in found if _is_changed(one)]
        for one in shown:
            for line in comparison_lines(one, arguments.gate):
                print(sanitize(line.replace("±", "+-") if draws_ascii(arguments) else line, 400))
        if len(shown) < len(found):
            print(f"not shown, equal within their noise: {len(found) - len(shown)} of {len(found)}; --json has them")
        if len(found) > 1:
            print(summary_line(found, arguments.gate))
    return int(any(one.regressions for one in found))


def _is_changed(one: Comparison) -> bool:
    return bool(one.regressions or one.alerts) or any(figure.judgement != "same" for figure in one.differences)


def compare_loaded(before: Loaded, after: Loaded, gate: float | None) -> list[Comparison]:
    """Compare two runs, or the common configurations of two sweeps.

    Raises ``UsageError`` for a run and a sweep, and if there is no common configuration.
    """
    if before.of_sweep != after.of_sweep:
        sweep, run = (before, after) if before.of_sweep else (after, before)
        raise UsageError(f"{sweep.name} is a sweep and {run.name} is a run: compare two runs or two sweeps")
    keys = [key for key in before.sides if key in after.sides]
    if not keys:
        raise UsageError(f"{before.name} and {after.name} have no configuration in common: their axes or values differ")
    tests = sum(noisy(before.sides[key], after.sides[key]) for key in keys)
    found = [compare(before.sides[key], after.sides[key], gate, tests) for key in keys]
    return [msgspec.structs.replace(one, steps=before.steps) for one in found]


_WIDEST = 120


def show_report(arguments: Namespace) -> int:
    """Print a report, or write the requested files."""
    mapping = parse_mapping(arguments.columns) if arguments.columns else None
    found = [load(target, arguments.warm_up, mapping) for target in arguments.targets]
    report = build(found, arguments.price)
    made: dict[str, Callable[[], bytes]] = {
        "html": lambda: page(report, __version__, time.strftime("%Y-%m-%d %H:%M")).encode(),
        "svg": lambda: sheet(report).encode(),
        "png": lambda: png(sheet(report)),
        "csv": lambda: to_csv(records(found)).encode(),
        "parquet": lambda: to_parquet(records(found)),
    }
    outputs = {name: path for name in made if (path := getattr(arguments, name)) is not None}
    check_outputs({f"--{name}": path for name, path in outputs.items()}, [*map(find_recording, arguments.targets)])
    contents = [(Path(path), made[name]()) for name, path in outputs.items()]  # all, before any is written
    for path, data in contents:
        write_file(path, data)
    if arguments.json:
        print_json(report)
    elif outputs:
        print("\n".join(f"written: {path}" for path in outputs.values()))
    else:
        width = min(_WIDEST, shutil.get_terminal_size((100, 24)).columns)
        for line in lines(report, width, ascii_only=output.draws_ascii(arguments)):
            print(line)
    return 0
