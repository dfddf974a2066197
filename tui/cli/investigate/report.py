"""``ftmon report``: prints runs, sweeps and CSV files as charts and tables, or writes them to files."""

import shutil
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from .... import __version__
from ...report.build import build
from ...report.export import check_outputs, records, to_csv, to_parquet, write_file
from ...report.html import page
from ...report.load import load, parse_mapping
from ...report.png import png
from ...report.svg import sheet
from ...report.terminal import lines
from ...source.find import find_recording
from ..output import terminal
from ..output.printable import print_json

_WIDEST = 120


def show_report(arguments: Namespace) -> int:
    """Print a report, or write the requested files.

    Raises:
        UsageError: a source cannot be read, or a file cannot be written.
    """
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
    for path, data in [(Path(path), made[name]()) for name, path in outputs.items()]:
        write_file(path, data)
    if arguments.json:
        print_json(report)
    elif outputs:
        print("\n".join(f"written: {path}" for path in outputs.values()))
    else:
        width = min(_WIDEST, shutil.get_terminal_size((100, 24)).columns)
        for line in lines(report, width, ascii_only=terminal.draws_ascii(arguments)):
            print(line)
    return 0
