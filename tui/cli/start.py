"""``ftmon demo``, ``train`` and ``run``: start a run, then watch it."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from ...protocol import rundir
from ...protocol.errors import UsageError
from ...protocol.join import JOIN_NAME, join_path
from ...protocol.rundir import RunDir
from .outcome import attach_line
from .trainer import RECIPE, SCRIPT, become, print_config, require_training, start_run


def demo(arguments: Namespace) -> int:
    """Fine-tune a small model on this machine and watch it."""
    require_training()
    words = ["demo", *_common(arguments)]
    for option in ("fault", "steps", "ranks"):
        value = getattr(arguments, option)
        if value is not None:
            words += [f"--{option}", str(value)]
    return _start_and_watch(arguments, lambda: start_run(RECIPE, [*words, *arguments.overrides]))


def train(arguments: Namespace) -> int:
    """Train with a person's own configuration and watch it, or print a default one."""
    require_training()
    if arguments.print_config:
        return print_config()
    if arguments.config is None:
        raise UsageError("train needs CONFIG.yaml; 'ftmon train --print-config' writes one to start from")
    words = ["train", *_common(arguments), arguments.config, *arguments.overrides]
    return _start_and_watch(arguments, lambda: start_run(RECIPE, words))


def run(arguments: Namespace) -> int:
    """Watch a script that knows nothing of ftmon."""
    if not arguments.command:
        raise UsageError("run needs a command after '--', as in: ftmon run -- deepspeed train.py")
    if arguments.join:
        join(arguments.join, arguments.command)
    words = ["run", *_common(arguments)]
    if arguments.no_logs:
        words.append("--no-logs")
    return _start_and_watch(arguments, lambda: start_run(SCRIPT, [*words, "--", *arguments.command]))


def join(target: str, command: list[str]) -> NoReturn:
    """Become a command that is a part of a run begun on another host."""
    path = Path(target)
    if not path.is_file():
        path = path / JOIN_NAME if path.is_dir() else rundir.find(target).path / JOIN_NAME
    become(SCRIPT, ["join", str(path), "--", *command])


def _common(arguments: Namespace) -> Iterator[str]:
    if arguments.name:
        yield from ("--name", arguments.name)
    if arguments.listen:
        yield from ("--listen", arguments.listen)
    if arguments.read_only:
        yield "--read-only"
    if arguments.no_allocator_events:
        yield "--no-allocator-events"
    if arguments.on_oom == "hold":
        yield from ("--on-oom", "hold")
    if arguments.allow_console:
        yield "--allow-console"
    if arguments.hold_timeout:
        yield from ("--hold-timeout", str(arguments.hold_timeout))
    if arguments.on_hang != "warn":
        yield from ("--on-hang", arguments.on_hang)
    if arguments.hang_grace:
        yield from ("--hang-grace", str(arguments.hang_grace))
    if arguments.exit_timeout:
        yield from ("--exit-timeout", str(arguments.exit_timeout))


def _start_and_watch(arguments: Namespace, start: Callable[[], RunDir]) -> int:
    started = start()
    if (started.read_run().options.get("several") or {}).get("by_hand"):
        print(f"on each other host: ftmon run --join {join_path(started)} -- COMMAND", flush=True)
    if arguments.listen:
        from .remote import listen_line

        print(listen_line(started, arguments.listen), flush=True)
    if arguments.detach:
        print(attach_line(started.id))
        return 0
    from .view import watch

    return watch(started, arguments, owned=True)
