"""Output of the commands: sanitised streams, JSON, and what the terminal can show."""

import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, TextIO

from ...protocol.errors import FtmonError
from ...protocol.text import escape_json, names_c_locale, sanitize


def print_json(value: Any, *, indent: bool = True) -> None:
    """Print a value as JSON, on one line or indented.

    Characters that a terminal executes or does not show are escaped: a reader gets the exact value, and a terminal only
    text. NaN and infinity become null.
    """
    import msgspec

    try:
        encoded = msgspec.json.encode(value)
        text = (msgspec.json.format(encoded) if indent else encoded).decode()
    except UnicodeEncodeError:  # a path with bytes that are not UTF-8, whose escapes msgspec does not accept
        text = json.dumps(msgspec.to_builtins(value), indent=2 if indent else None)
    print(escape_json(text))


class OutputError(FtmonError, OSError):
    """Standard output or error cannot be written, as on a full disk."""


class Printable(io.TextIOWrapper):
    """Text output of printable characters, line ends, tabs, and the blanks that erase a line.

    ``write`` and ``flush`` raise ``OutputError``, or ``BrokenPipeError`` for a closed pipe.
    """

    def write(self, text: str, /) -> int:
        """Write text, sanitised line by line; return its length."""
        harmless = text
        if not text.isprintable() and text.strip("\r "):
            harmless = "\n".join(sanitize(line, len(line) + 1) for line in text.split("\n"))
        try:
            super().write(harmless)
        except OSError as error:
            raise _named(error) from None
        return len(text)

    def flush(self) -> None:
        """Write the buffer."""
        try:
            super().flush()
        except OSError as error:
            raise _named(error) from None


def _named(error: OSError) -> OSError:
    if isinstance(error, BrokenPipeError | OutputError):
        return error
    return OutputError(f"the output cannot be written: {error.strerror}")


def guard_output() -> None:
    """Replace standard output and error with sanitising ones, for terminals, files and pipes alike.

    Every command sanitises its output itself; this is an additional safeguard. Piped output reaches a terminal too,
    through ``less -R`` or a CI log. The app draws through separate streams. A stream that the caller has closed
    (``>&-``) is replaced by ``/dev/null``, for this process and its children.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nothing(descriptor))
    sys.stdout = _guarded(sys.stdout)
    sys.stderr = _guarded(sys.stderr)


def _nothing(descriptor: int) -> TextIO:
    opened = os.open(os.devnull, os.O_RDWR)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)
    return open(descriptor, "w" if descriptor else "r", closefd=False)


def _guarded(stream: TextIO) -> TextIO:
    if type(stream) is not io.TextIOWrapper:
        return stream
    stream.flush()
    raw = io.FileIO(stream.fileno(), "wb", closefd=False)
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    by_line = stream.line_buffering or stream.write_through  # the latter with PYTHONUNBUFFERED
    return Printable(io.BufferedWriter(raw), stream.encoding, errors, line_buffering=by_line)


MIN_COLUMNS = 60
MIN_LINES = 16  # minimum lines of the narrow layout, which is made for 80x24
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


def wants_ascii() -> bool:
    """Return whether the locale or TERM=linux (the text console) lacks the app's block characters."""
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return not encoding.startswith("utf") or os.environ.get("TERM") == "linux" or names_c_locale()


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
