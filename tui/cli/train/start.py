"""``ftmon demo``, ``train``, ``resume`` and ``run``: start a run, then watch it."""

import os
import shlex
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from ....protocol.errors import FtmonError, UsageError
from ....protocol.link.join import JOIN_NAME, join_path
from ....protocol.run import exits, run_store
from ....protocol.run.notices import make_notify
from ....protocol.run.run_options import RunOptions
from ....protocol.run.start_request import StartRequest
from ....protocol.run.starter import CommandEnd
from ....protocol.text import sanitize
from ...model.runs import TRAINER_KINDS, RunList
from ..access.trainer_process import SCRIPT, StartFailedError, become, print_config, require_training, start_run
from ..foreground.outcome import attach_line
from ..output.printable import OutputError


@contextmanager
def _own_statuses(usage: int) -> Generator[None]:
    """Make errors of a command that starts a run end with their status of ``protocol.run.exits``."""
    try:
        yield
    except (StartFailedError, OutputError):
        raise
    except FtmonError as error:
        raise StartFailedError(str(error), exits.of_error(error, usage)) from None


@_own_statuses(exits.WRONG_USAGE)
def demo(arguments: Namespace) -> int:
    """Fine-tune a small model on this machine and watch it."""
    require_training()
    request = _request(
        "demo",
        arguments,
        overrides=arguments.overrides,
        fault=arguments.fault,
        steps=arguments.steps,
        ranks=arguments.ranks,
    )
    return _start_and_watch(arguments, request)


@_own_statuses(exits.WRONG_USAGE)
def train(arguments: Namespace) -> int:
    """Train with the given configuration and show the run, or print a default configuration."""
    require_training()
    if arguments.print_config:
        return print_config()
    if arguments.config is None:
        raise UsageError("train needs CONFIG.yaml; 'ftmon train --print-config' prints a template")
    push = [f"output.push={arguments.push}"] if arguments.push else []
    request = _request("train", arguments, config=arguments.config, overrides=[*arguments.overrides, *push])
    return _start_and_watch(arguments, request)


@_own_statuses(exits.WRONG_USAGE)
def resume(arguments: Namespace) -> int:
    """Continue a run of ftmon's trainer from its newest complete checkpoint, as a new run.

    Raises:
        UsageError: it is another script's run, or it is still running, or has finished and nothing is changed.
    """
    require_training()
    found = run_store.find(arguments.run)
    entry = RunList().entry(found)
    if entry.kind not in TRAINER_KINDS or not found.config.exists():
        again = sanitize(shlex.join(entry.command), 200)
        raise UsageError(
            f"{found.id}: is not a run of ftmon's trainer; start its script again with the script's own option for "
            f"resuming: ftmon run -- {again}"
        )
    if entry.live:
        raise UsageError(f"{found.id}: is still running; 'ftmon stop {found.id}' saves a checkpoint and ends it")
    if entry.state == "finished" and not arguments.overrides:
        raise UsageError(f"{found.id}: has finished; to train longer, give training.max_steps=N or training.epochs=N")
    request = _request("train", arguments, resume=str(found.path), overrides=arguments.overrides)
    return _start_and_watch(arguments, msgspec.structs.replace(request, name=request.name or entry.name))


@_own_statuses(exits.RUN_USAGE)
def run(arguments: Namespace) -> int:
    """Watch an unchanged script; return its exit status, or one of ``protocol.run.exits.OWN``.

    Raises:
        StartFailedError: it could not be started, or its end is unknown.
    """
    if not arguments.command:
        raise UsageError("run needs a command after '--', as in: ftmon run -- deepspeed train.py")
    if arguments.join:
        join(arguments.join, arguments.command)
    return _start_and_watch(arguments, _request("run", arguments, command=arguments.command), stdin=True)


def join(target: str, command: list[str]) -> NoReturn:
    """Replace this process by a command that is a part of another host's run."""
    path = Path(target)
    if not os.path.isfile(path):
        path = path / JOIN_NAME if os.path.isdir(path) else run_store.find(target).path / JOIN_NAME
    become(SCRIPT, ["join", str(path), "--", *command])


def _request(kind: Literal["run", "train", "demo"], arguments: Namespace, **more: Any) -> StartRequest:
    """Return the request of a command's arguments; an omitted option keeps its default.

    Raises:
        UsageError: ``--notify-on`` names no event.
    """
    given: dict[str, Any] = {
        "listen": arguments.listen,
        "hold_timeout": arguments.hold_timeout,
        "hang_grace": arguments.hang_grace,
        "stop_grace": arguments.stop_grace,
        "exit_timeout": arguments.exit_timeout,
    }
    options = RunOptions(
        read_only=arguments.read_only,
        logs=not getattr(arguments, "no_logs", False),
        allocator_events=not arguments.no_allocator_events,
        predict=not getattr(arguments, "no_predict", False),
        on_oom=arguments.on_oom,
        allow_console=arguments.allow_console,
        on_hang=arguments.on_hang,
        **{name: value for name, value in given.items() if value is not None},
    )
    notify = make_notify(arguments.notify, arguments.notify_on or "")
    return StartRequest(kind, arguments.name or "", options, notify, **more)


def _start_and_watch(arguments: Namespace, request: StartRequest, *, stdin: bool = False) -> int:
    """Start a run and watch it, or with ``--detach`` leave it.

    Args:
        arguments: the command's arguments.
        request: the run to start.
        stdin: whether the job may read this command's standard input if the app does not.
    """
    from ..watch.attach import opens_app, watch

    line = None if arguments.detach else CommandEnd()
    stdin = stdin and line is not None and _may_read_stdin() and not opens_app(arguments)
    started = start_run(request, line, stdin=stdin)
    if stdin:
        _let_go_of_stdin()
    hosts = started.read_run().options.multihost
    if hosts is not None and hosts.by_hand:
        print(f"on each other host: ftmon run --join {shlex.quote(str(join_path(started)))} -- COMMAND", flush=True)
    if arguments.listen:
        from ..watch.remote import listen_line

        print(listen_line(started, arguments.listen), flush=True)
    if line is None:
        print(attach_line(started.id))
        return 0
    return watch(started, arguments, line)


def _may_read_stdin() -> bool:
    """Return whether the job may read standard input: not a shell's terminal while in the background."""
    try:
        os.fstat(0)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _let_go_of_stdin() -> None:
    """Close this command's end of a pipe, so that its writer sees it closed when the job closes it."""
    if not os.isatty(0):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
