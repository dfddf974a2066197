"""``ftmon console`` and ``ftmon release``: inspects and releases a rank that is held at an out-of-memory error."""

import codeop
import sys
from argparse import Namespace
from typing import Any

from ....protocol.errors import FtmonError, HubError
from ....protocol.messages import verbs
from ....protocol.run import run_store
from ....protocol.run.rundir import HubFile
from ....protocol.text import sanitize
from ..access.control import ask
from ..access.trainer_process import living_hub

_WELCOME = (
    "Python in the frame in which the allocation of rank {rank} failed; help() lists helpers, ctrl-d leaves.\n"
    "Leaving does not release the rank: ftmon release does."
)
_SECONDS = 75.0
"""Time limit of a result; the hub's own is a minute."""


def console(arguments: Namespace) -> int:
    """Run one piece of code in a held rank, or read and run code until the end of the input.

    Raises:
        HubError: the run has ended, has no console, or the rank is not held.
    """
    run = run_store.find(arguments.run)
    if run.read_exit() is not None:
        raise HubError(f"{run.id} has ended: 'ftmon oom {run.id}' prints what was found")
    hub = living_hub(run)
    if arguments.code is not None:
        return _run(hub, arguments.rank, arguments.code)
    if sys.stdin.isatty():
        print(_WELCOME.format(rank=arguments.rank))
    status = 0
    while (code := _read()) is not None:
        if not code.strip():
            continue
        try:
            status = _run(hub, arguments.rank, code)
        except FtmonError as error:
            print(f"ftmon: {error}", file=sys.stderr)
            status = error.exit_status
            if run.read_exit() is not None:
                break
    return status


def release(arguments: Namespace) -> int:
    """Release held ranks; return 1 if none was held."""
    run = run_store.find(arguments.run)
    if run.read_exit() is not None:
        print(f"{run.id} has ended; no rank is held")
        return 1
    result = ask(living_hub(run), verbs.Release(sorted(set(arguments.rank))))
    print(sanitize(result.text))
    return 0 if result.ok else 1


def _run(hub: HubFile, rank: int, code: str) -> int:
    result = ask(hub, verbs.Console(code, rank), result_seconds=_SECONDS)
    data: dict[str, Any] = result.data
    for line in str(data.get("output", "")).splitlines():
        print(sanitize(line, 100_000))
    if result.text:
        print(sanitize(result.text), file=sys.stderr)
    return 0 if result.ok and not data.get("error") else 1


def _read() -> str | None:
    """Read one statement of one or more lines; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else ">>> ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            print()
            return ""
        lines.append(line)
        text = "\n".join(lines)
        try:
            # None: the statement is incomplete. An empty line ends a block, as in Python's own prompt.
            if codeop.compile_command(text, symbol="single") is not None or not line:
                return text
        except (SyntaxError, ValueError, OverflowError):
            return text
