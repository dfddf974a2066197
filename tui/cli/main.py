"""The ``ftmon`` command: parse, call the one module that does it, and turn what went wrong into one line."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from ...protocol.errors import FtmonError
from .parser import build_parser, split_command
from .printable import guard_terminal

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def parse(argv: Sequence[str]) -> Namespace:
    """Turn command-line words into the arguments of one command.

    Configuration overrides (``zero.stage=2``) may stand anywhere among the options; argparse alone would refuse them
    after an option. Everything after the first ``--`` of ``run`` is the watched command, untouched.

    Raises:
        SystemExit: wrong usage (status 2), or help or version was asked for (status 0).
    """
    parser = build_parser()
    words, command = split_command(argv)
    arguments, rest = parser.parse_known_args(words)
    if command is not None:
        if arguments.command:
            parser.error(f"run: unexpected {arguments.command[0]!r} before '--'")
        arguments.command = command
    if hasattr(arguments, "overrides"):
        arguments.overrides = [*arguments.overrides, *(word for word in rest if not word.startswith("-"))]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``ftmon`` command and return its exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    guard_terminal()
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        status = _handler(arguments.handler)(arguments)
        sys.stdout.flush()
        return status
    except FtmonError as error:
        print(f"ftmon: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return 1


def _handler(name: str) -> Callable[[Namespace], int]:
    module, function = name.split(":")
    return getattr(import_module(f".{module}", __package__), function)


def _close_stdout() -> None:
    """Keep the interpreter's last flush from complaining about a reader (``| head``) that has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> NoReturn:
    """Run as a process: what ``python -m ftmon.tui.cli`` does."""
    sys.exit(main())
