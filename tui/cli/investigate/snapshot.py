"""``ftmon snapshot``: explores a PyTorch memory snapshot in the terminal, or prints it as JSON or text."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager

from ....protocol.analysis.allocator.snapshot.replay import Replay
from ....protocol.analysis.allocator.snapshot.report import difference_report, report
from ....protocol.errors import UsageError
from ...source.snapshot import open_replays
from ..output import terminal
from ..output.printable import print_json

_LARGE = 4 * 2**20
"""Minimum size of a file, bytes, for which a message is shown while it is read."""


def explore(arguments: Namespace) -> int:
    """Open a snapshot, or two for a comparison, in the app if the terminal supports it, else as text.

    Raises:
        SnapshotError: a file cannot be opened as a snapshot.
        UsageError: the requested device is not in it.
    """
    as_text = arguments.text
    if not arguments.json and not as_text and (reason := terminal.why_no_app()):
        as_text = True
        if sys.stderr.isatty():
            print(f"ftmon: {reason}; text instead", file=sys.stderr)
    files = [arguments.file, *([arguments.second] if arguments.second else [])]
    in_app = not arguments.json and not as_text
    opened = [_replays(file, arguments.device, _load_app if in_app else None) for file in files]
    if in_app:
        from ...screens.snapshot.app import run_explorer

        before = opened[0] if len(opened) > 1 else []
        return run_explorer(opened[-1], before, ascii_only=terminal.draws_ascii(arguments))
    reports = [report(replays[0].snapshot, replays, arguments.top) for replays in opened]
    if arguments.json:
        # Of two files, the second is described as the present state, with its differences from the first.
        result = reports[-1] if len(reports) == 1 else reports[-1] | {"difference": _difference(opened, arguments.top)}
        print_json(result)
        return 0
    from .snapshot_text import difference_lines, lines

    text = lines(opened[-1], arguments.top)
    if len(opened) == 2:
        text = [*difference_lines(opened[0], opened[1], arguments.top), "", *text]
    for line in text:
        print(line.encode("ascii", "replace").decode() if terminal.draws_ascii(arguments) else line)
    return 0


def _load_app() -> None:
    """Import the app, which is as slow as reading a small file."""
    from ...screens.snapshot import app

    del app


def _replays(file: str, device: int | None, meanwhile: Callable[[], None] | None) -> list[Replay]:
    def choose(devices: list[int]) -> list[int]:
        if device is not None and device not in devices:
            raise UsageError(f"{file}: no device {device} in it, only {', '.join(map(str, devices))}")
        return [one for one in devices if device in (None, one)]

    with _patience(file):
        return open_replays(file, choose, meanwhile)


@contextmanager
def _patience(file: str) -> Generator[None, None, None]:
    """Show a message on a terminal while a large file is read, and erase it afterwards."""
    text = f"ftmon: reading {file} ..."
    try:
        says = sys.stderr.isatty() and os.stat(file).st_size >= _LARGE
    except OSError:
        says = False
    if says:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if says:
            print("\r" + " " * len(text) + "\r", end="", file=sys.stderr, flush=True)


def _difference(opened: list[list[Replay]], top: int) -> dict[str, object]:
    return {"before": opened[0][0].snapshot.path, **difference_report(opened[0], opened[1], top)}
