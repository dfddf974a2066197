"""The ``ftmon`` command: parses the arguments, calls the command's module, and prints errors in one line."""

import argparse
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from ...protocol.errors import FtmonError
from ...protocol.run import exits
from ...protocol.text import wrapped
from .arguments import build_parser, command_name, split_command
from .output import OutputError, guard_output


def parse(argv: Sequence[str]) -> Namespace:
    """Parse command-line words into the arguments of one command.

    Configuration overrides (``zero.stage=2``) may be anywhere among the options; argparse alone would refuse them after
    an option. Everything after the first ``--`` of ``run`` and ``predict`` is a command, and not parsed. Raises
    ``SystemExit`` for wrong usage (status 2), and for a request for help or version (status 0).
    """
    parser = build_parser()
    words, command = split_command(argv)
    arguments, rest = parser.parse_known_args(words)
    of_command: argparse.ArgumentParser = vars(arguments).pop("parser")
    if command is not None:
        if arguments.command:
            of_command.error(f"unexpected {arguments.command[0]!r} before '--'")
        if not command and arguments.handler.startswith("train:"):
            of_command.error("nothing after '--'; write a command, such as: deepspeed train.py")
        arguments.command = command
    if hasattr(arguments, "overrides"):
        arguments.overrides = [*arguments.overrides, *(word for word in rest if not word.startswith("-"))]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        of_command.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``ftmon`` command and return its exit status (``protocol.run.exits``)."""
    guard_output()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            arguments = parse(words)
        except SystemExit as refusal:
            sys.stdout.flush()
            if refusal.code == exits.WRONG_USAGE and command_name(words) == "run":
                raise SystemExit(exits.RUN_USAGE) from None  # many scripts exit with 2 for their own arguments
            raise
        status = _handler(arguments.handler)(arguments)
        sys.stdout.flush()
        return status
    except OutputError as error:
        _close_stdout()
        print(wrapped(f"ftmon: {error}", 2), file=sys.stderr)
        return error.exit_status
    except FtmonError as error:
        print(wrapped(f"ftmon: {error}", 2), file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return 1


def _handler(name: str) -> Callable[[Namespace], int]:
    module, function = name.split(":")
    return getattr(import_module(f".{module}", __package__), function)


def _close_stdout() -> None:
    """Keep the interpreter's last flush from reporting a closed pipe (``| head``) or a full disk."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run() -> NoReturn:
    """Run the command and exit, as ``python -m ftmon.tui.cli``."""
    sys.exit(main())
