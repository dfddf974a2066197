"""Starts a run: creates its directory, starts a detached launcher, and prints the directory.

``python -m ftmon.trainer.launch.start`` reads a ``StartRequest`` (JSON) of kind ``run`` on standard input and prints
one JSON line, ``{"run": "<run directory>"}``. ``... join JOIN.json -- COMMAND`` replaces itself by a command that joins
another host's run.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from ...protocol.errors import FtmonError, StartError, UsageError
from ...protocol.host import process
from ...protocol.link.sockets import read_join
from ...protocol.run import exits, rundir
from ...protocol.run.notices import check_target, write_notify
from ...protocol.run.rundir import Recipe, RunDir
from ...protocol.run.start import StartRequest, print_started, read_request, spawn_module
from ...protocol.run.targets import check_report_to
from ..host.sockets import Listen, check_free, parse_listen, parse_metrics
from .environment import executable_command, find_hosts, free_listen, joined_environment, prepare


def check_request(request: StartRequest) -> None:
    """Validate a request before anything is created.

    Raises ``UsageError``: invalid options, or a target of notifications or metrics that cannot work on this host.
    """
    request.options.check()
    for target in request.notify.targets if request.notify is not None else []:
        check_target(target)
    if request.options.metrics:
        check_metrics(request.options.metrics)
    check_report_to(request.options.report_to)


def start_run(
    request: StartRequest, name: str, command: Sequence[str], config: str | None = None, recipe: Recipe | None = None
) -> RunDir:
    """Create a run directory and start the run's launcher, detached from this process and its terminal.

    If the command trains on several hosts and the options have no address to listen on, one is chosen. ``config`` is
    kept as the run's ``config.yaml``; ``recipe`` is what ftmon's trainer was started with. Raises ``UsageError`` if the
    command does not exist, the options are invalid, or the address to listen on is invalid or in use. ``RunDirError``
    if the run directory cannot be created.
    """
    check_request(request)
    check_command(command)
    hosts = find_hosts(command, os.environ)
    options = msgspec.structs.replace(request.options, multihost=hosts)
    if options.listen:
        check_free(parse_listen(options.listen))
    elif hosts is not None:
        options = msgspec.structs.replace(options, listen=free_listen())
    run = rundir.create(name, list(command), request.kind, options, recipe)
    if options.listen:
        prepare(run, options.listen)
    if config is not None:
        process.write_private(run.config, config.encode())
    if request.notify is not None:
        write_notify(run, request.notify)
    spawn_launcher(run, request.line, request.stdin)
    return run


def check_metrics(text: str, setting: str = "--metrics") -> None:
    """Raise ``UsageError`` if the figures cannot be served or written there; ``setting`` is its name."""
    target = parse_metrics(text, setting)
    if isinstance(target, Listen):
        check_free(target, setting, 1)
    elif not os.access(target.parent, os.W_OK | os.X_OK) or not target.parent.is_dir():
        raise UsageError(f"{setting} {text}: {target.parent} is not a folder that you can write to; make it first")


def join_run(path: Path, command: Sequence[str]) -> NoReturn:
    """Replace this process by ``command`` as part of the run of the join file ``path``; called on each further host.

    Raises ``UsageError`` if the command does not exist, or the file is not a join file, ``RunDirError``: others can
    read the file.
    """
    check_command(command)
    join = read_join(path)
    print(
        f"ftmon: joining {join.id} on {join.host}; watch it there: ftmon attach {join.id}", file=sys.stderr, flush=True
    )
    words = executable_command(command, os.environ)
    os.execvpe(words[0], words, joined_environment(path.absolute(), join, os.environ))


def check_command(command: Sequence[str]) -> None:
    """Validate that a command can be started.

    Raises ``UsageError`` if the command is empty, ``StartError`` if the program does not exist or is not executable.
    """
    if not command:
        raise UsageError("no command: write it after --, as in 'ftmon run -- deepspeed train.py'")
    program = command[0]
    if shutil.which(program) is None:
        if os.path.isfile(program):
            quoted = shlex.quote(program)
            raise StartError(f"{program}: is not executable; run it with 'python {quoted}', or: chmod +x {quoted}")
        raise StartError(f"{program}: command not found; check its spelling, or activate the environment that has it")


def spawn_launcher(run: RunDir, line: int | None = None, stdin: int | None = None) -> None:
    """Start ``ftmon.trainer.launch.launcher`` for ``run`` in a new session, with its output in ``logs/launcher.log``.

    ``line`` is the launcher's end of the connection to the command that started the run, ``stdin`` the job's input.
    """
    words = [str(run.path)]
    words += ["--starter", str(line)] if line is not None else []
    words += ["--stdin"] if stdin is not None else []
    source = subprocess.DEVNULL if stdin is None else stdin
    fds = () if line is None else (line,)
    with (run.logs / "launcher.log").open("ab") as log:
        spawn_module("ftmon.trainer.launch.launcher", words, stdin=source, stdout=log, stderr=log, pass_fds=fds)


def default_name(command: Sequence[str]) -> str:
    """Return the name of a run from the script in its command: ``train`` for ``deepspeed train.py``."""
    scripts = [Path(word).stem for word in command if word.endswith((".py", ".sh"))]
    return scripts[0] if scripts else Path(command[0]).name if command else "run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.launch.start``; return its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.what == "join":
            command: list[str] = arguments.command
            join_run(Path(arguments.file), command[1:] if command[:1] == ["--"] else command)
        request = read_request(sys.stdin.buffer)
        run = start_run(request, request.name or default_name(request.command), request.command)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return exits.of_error(error)
    print_started(run)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.launch.start", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    join = commands.add_parser("join", help="become a command that is a part of another host's run")
    join.add_argument("file", metavar="JOIN.json", help="from the run's directory on the hub's host")
    join.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return parser


if __name__ == "__main__":
    sys.exit(main())
