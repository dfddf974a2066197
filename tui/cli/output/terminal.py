"""Capabilities of the terminal: whether the app can open in it, and whether it shows more than ASCII."""

import os
import sys
from argparse import Namespace
from collections.abc import Mapping

from ...widgets.drawing.glyphs import names_c_locale

MIN_COLUMNS = 60
MIN_LINES = 16
"""Minimum lines of the narrow layout, which is made for 80x24."""

_NO_SCREEN = ("", "dumb", "unknown", "emacs")


def is_terminal() -> bool:
    """Return whether standard input, output and error are terminals: the app reads keys from input, draws on both."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def why_no_app(environ: Mapping[str, str] = os.environ) -> str:
    """Return the reason why the app cannot open here; empty if it can."""
    if not is_terminal():
        return "not a terminal"
    if environ.get("TERM", "") in _NO_SCREEN:
        return f"TERM={environ.get('TERM', '')!s} cannot draw"
    columns, lines = os.get_terminal_size(sys.stdout.fileno())
    if 0 < columns < MIN_COLUMNS or 0 < lines < MIN_LINES:
        return f"the terminal is {columns}x{lines}, the app needs {MIN_COLUMNS}x{MIN_LINES}"
    return ""


def wants_ascii(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether the locale or TERM=linux (the text console) lacks the app's block characters."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not encoding.startswith("utf") or environ.get("TERM") == "linux" or names_c_locale(environ)


def draws_ascii(arguments: Namespace) -> bool:
    """Return whether a command draws with ASCII only: by ``--ascii``, or because of the terminal."""
    return arguments.ascii or wants_ascii()


def colours(environ: Mapping[str, str] = os.environ) -> str:
    """Return the terminal's number of colours."""
    if environ.get("NO_COLOR"):
        return "none (NO_COLOR is set)"
    if environ.get("COLORTERM", "").lower() in ("truecolor", "24bit"):
        return "16 million"
    term = environ.get("TERM", "")
    if "direct" in term:
        return "16 million"
    return "256" if "256" in term else "16"


def multiplexer(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of the terminal multiplexer around this process; empty if there is none."""
    if environ.get("TMUX"):
        return "tmux"
    return "screen" if environ.get("STY") else ""
