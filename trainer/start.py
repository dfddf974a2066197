"""Starting a run: make its directory, leave a detached launcher behind, and say where the run is.

``python -m ftmon.trainer.start run [options] -- COMMAND`` prints one JSON line, ``{"run": "<run directory>"}``.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..protocol import rundir
from ..protocol.errors import FtmonError, UsageError
from ..protocol.join import read_join
from ..protocol.rundir import RunDir
from .environment import joined_environment, monitor_environment
from .hanging import add_hang_options, hang_options
from .holding import add_hold_options, hold_options
from .joining import free_listen, prepare
from .listen import check_free, parse_listen
from .several import several_hosts


def start_run(
    kind: str, name: str, command: Sequence[str], options: dict[str, Any] | None = None, config: str | None = None
) -> RunDir:
    """Create a run directory and start the run's launcher, detached from this process and its terminal.

    Args:
        kind: ``demo``, ``train`` or ``run``.
        name: what a person calls the run; it becomes part of its identifier.
        command: the job, as for exec.
        options: kept in ``run.json``. ``listen`` ("HOST:PORT"; chosen here for a command that trains on several hosts),
            ``read_only``, ``logs`` and ``allocator_events`` (booleans) are understood by the hub and the probes.
        config: text kept as the run's ``config.yaml``.

    Raises:
        UsageError: the command does not exist, or the address to listen on is not one or is taken.
        RunDirError: the run directory cannot be made.
    """
    options = dict(options or {})
    check_command(command)
    several = several_hosts(command, os.environ)
    if options.get("listen"):
        check_free(parse_listen(str(options["listen"])))
    elif several is not None:
        options["listen"] = free_listen()
    if several is not None:
        options["several"] = msgspec.to_builtins(several)
    run = rundir.create(name, list(command), kind, options)
    if options.get("listen"):
        prepare(run, str(options["listen"]))
    if config is not None:
        rundir.write_private(run.config, config.encode())
    spawn_launcher(run)
    return run


def join_run(path: Path, command: Sequence[str]) -> NoReturn:
    """Become ``command``, as a part of the run that the file ``path`` tells of: what each further host starts.

    Raises:
        UsageError: the command does not exist, or the file is none.
        RunDirError: others can read the file.
    """
    check_command(command)
    join = read_join(path)
    print(
        f"ftmon: joining {join.id} on {join.host}; watch it there: ftmon attach {join.id}", file=sys.stderr, flush=True
    )
    os.execvpe(command[0], list(command), joined_environment(path.absolute(), join, os.environ))


def check_command(command: Sequence[str]) -> None:
    """Refuse a command that cannot be started.

    Raises:
        UsageError: there is none, or no such program.
    """
    if not command:
        raise UsageError("no command: write it after --, as in 'ftmon run -- deepspeed train.py'")
    program = command[0]
    if shutil.which(program) is None:
        if os.path.isfile(program):
            raise UsageError(f"{program}: is not executable; run it with 'python {program}', or: chmod +x {program}")
        raise UsageError(f"{program}: command not found; check its spelling, or activate the environment that has it")


def spawn_launcher(run: RunDir) -> None:
    """Start ``ftmon.trainer.launch`` for ``run`` in a session of its own, its output in ``logs/launcher.log``."""
    # -P: the person's working directory must not shadow modules of the launcher (a script called queue.py, say).
    argv = [sys.executable, "-P", "-m", "ftmon.trainer.launch", str(run.path)]
    with (run.logs / "launcher.log").open("ab") as log:
        subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_launcher_environment()
        )


def _launcher_environment() -> dict[str, str]:
    return monitor_environment(os.environ)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.start", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run", help="watch a command")
    run.add_argument("--name", help="what to call the run (default: the script's name)")
    run.add_argument("--listen", metavar="HOST:PORT", help="also serve apps from other hosts, encrypted")
    run.add_argument("--read-only", action="store_true", help="refuse every command that acts on the run")
    run.add_argument("--no-logs", action="store_true", help="leave the ranks' output where it goes")
    run.add_argument("--no-allocator-events", action="store_true", help="do not sample the allocator's own trace")
    add_hold_options(run)
    add_hang_options(run)
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    join = commands.add_parser("join", help="become a command that is a part of another host's run")
    join.add_argument("file", metavar="JOIN.json", help="from the run's directory on the hub's host")
    join.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


def default_name(command: Sequence[str]) -> str:
    """Name a run after the script in its command: ``deepspeed train.py`` is ``train``."""
    for word in command:
        if word.endswith((".py", ".sh")):
            return Path(word).stem
    return Path(command[0]).name if command else "run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.start``; return its exit status."""
    arguments = _parser().parse_args(argv)
    command: list[str] = arguments.command
    if command and command[0] == "--":
        command = command[1:]
    try:
        if arguments.what == "join":
            join_run(Path(arguments.file), command)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    options = {
        "listen": arguments.listen or "",
        "read_only": bool(arguments.read_only),
        "logs": not arguments.no_logs,
        "allocator_events": not arguments.no_allocator_events,
    }
    try:
        options |= hold_options(arguments) | hang_options(arguments)
        run = start_run("run", arguments.name or default_name(command), command, options)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps({"run": str(run.path)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
