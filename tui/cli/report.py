"""``ftmon report``: runs, sweeps and CSV files as charts and tables, in the terminal and as files."""

import shutil
import time
from argparse import Namespace
from pathlib import Path

from ... import __version__
from ..report.build import build
from ..report.export import records, to_csv, write_file, write_parquet
from ..report.html import page
from ..report.load import load, parse_mapping
from ..report.png import png
from ..report.svg import sheet
from ..report.terminal import lines
from . import terminal
from .printable import print_json

_WIDEST = 120


def show_report(arguments: Namespace) -> int:
    """Print a report, or write the files that are asked for.

    Raises:
        UsageError: something cannot be read or written.
        RunNotFoundError: no such run.
    """
    mapping = parse_mapping(arguments.columns) if arguments.columns else None
    found = [load(target, arguments.warm_up, mapping) for target in arguments.targets]
    report = build(found, arguments.price)
    written: list[str] = []
    if arguments.html:
        made = time.strftime("%Y-%m-%d %H:%M")
        write_file(Path(arguments.html), page(report, __version__, made).encode())
        written.append(arguments.html)
    if arguments.svg:
        write_file(Path(arguments.svg), sheet(report).encode())
        written.append(arguments.svg)
    if arguments.png:
        write_file(Path(arguments.png), png(sheet(report)))
        written.append(arguments.png)
    if arguments.csv:
        write_file(Path(arguments.csv), to_csv(records(found)).encode())
        written.append(arguments.csv)
    if arguments.parquet:
        write_parquet(records(found), Path(arguments.parquet))
        written.append(arguments.parquet)
    if arguments.json:
        print_json(report)
    elif written:
        print("\n".join(f"written: {path}" for path in written))
    else:
        width = min(_WIDEST, shutil.get_terminal_size((100, 24)).columns)
        for line in lines(report, width, ascii_only=arguments.ascii or terminal.wants_ascii()):
            print(line)
    return 0
