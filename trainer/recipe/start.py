"""Starting the trainer: check everything that can be checked without torch, then start a run.

``python -m ftmon.trainer.recipe.start train CONFIG [key.sub=value ...]``, ``... demo`` and ``... print-config``.
Train and demo print one JSON line, ``{"run": "<run directory>"}``; a mistake is one line on stderr and exit status 2.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...protocol.errors import FtmonError, UsageError
from ...protocol.rundir import RunDir
from .. import start
from ..hanging import add_hang_options, hang_options
from ..holding import add_hold_options, hold_options
from . import check, command, describe, faults, hardware
from .decode import Loaded, load
from .demo import demo_config


def start_trainer(kind: str, loaded: Loaded, name: str, options: dict[str, Any]) -> RunDir:
    """Check a configuration and start its run.

    Args:
        kind: ``train`` or ``demo``.
        loaded: the configuration.
        name: what to call the run; empty: ``run.name``, or the file's name.
        options: the run's options (see ``ftmon.trainer.start.start_run``).

    Raises:
        UsageError: the configuration does not hold, or packages are missing.
        FtmonError: the run cannot be started.
    """
    missing = hardware.missing_packages()
    if missing:
        raise UsageError(f"training needs {', '.join(missing)}, not installed here; run: pip install 'ftmon[train]'")
    resolved = check.resolve(loaded)
    _make_output(loaded, resolved.config.output.dir)
    os.environ.update(command.launch_environment(resolved))
    chosen = name or resolved.config.run.name or Path(loaded.source).stem
    return start.start_run(kind, chosen, command.launch_command(resolved), options, describe.dump(resolved.config))


def _make_output(loaded: Loaded, folder: str) -> None:
    """Make the output folder now, while a refusal can still be read on the terminal."""
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise loaded.error("output.dir", f"{folder}: cannot be made: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.recipe.start``; return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.what == "print-config":
        print(describe.commented_default(), end="")
        return 0
    try:
        loaded = _demo(arguments) if arguments.what == "demo" else _train(arguments)
        options = {
            "listen": arguments.listen or "",
            "read_only": bool(arguments.read_only),
            "logs": True,
            "allocator_events": not arguments.no_allocator_events,
            **hold_options(arguments),
            **hang_options(arguments),
        }
        run = start_trainer(arguments.what, loaded, arguments.name or "", options)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    print(json.dumps({"run": str(run.path)}), flush=True)
    return 0


def _train(arguments: argparse.Namespace) -> Loaded:
    config: str = arguments.config
    overrides: list[str] = arguments.overrides
    if "=" in config and not Path(config).exists():
        # No file: everything on the command line.
        return load(None, [config, *overrides])
    return load(config, overrides)


def _demo(arguments: argparse.Namespace) -> Loaded:
    overrides: list[str] = list(arguments.overrides)
    for option in ("steps", "ranks"):
        if getattr(arguments, option) is not None and getattr(arguments, option) < 1:
            raise UsageError(f"--{option} must be at least 1, not {getattr(arguments, option)}")
    if arguments.ranks is not None:
        overrides.append(f"run.ranks={arguments.ranks}")
    if arguments.steps is not None:
        overrides.append(f"training.max_steps={arguments.steps}")
        warmup = min(8, arguments.steps // 4)
        overrides.insert(0, f"schedule.warmup_steps={warmup}")
    loaded = demo_config(overrides)
    if arguments.fault:
        try:
            faults.parse(arguments.fault, loaded.config.run.ranks or 1024)
        except UsageError as error:
            raise UsageError(f"--fault {error}") from None
        loaded = demo_config([*overrides, f"debug.fault={arguments.fault}"])
    return loaded


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.recipe.start", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    train = commands.add_parser("train", help="train with a configuration file")
    train.add_argument("config", metavar="CONFIG", help="YAML file ('ftmon train --print-config' writes one)")
    demo = commands.add_parser("demo", help="train a small model on data that ships with ftmon")
    demo.add_argument("--fault", help=f"{'|'.join(faults.KINDS)}[:rank=R,step=S]: make a real one happen")
    demo.add_argument("--steps", type=int, help="optimizer steps")
    demo.add_argument("--ranks", type=int, help="number of ranks")
    for one in (train, demo):
        one.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that win over the file's")
        one.add_argument("--name", help="what to call the run")
        one.add_argument("--listen", metavar="HOST:PORT", help="also serve apps from other hosts, encrypted")
        one.add_argument("--read-only", action="store_true", help="refuse every command that acts on the run")
        one.add_argument("--no-allocator-events", action="store_true", help="do not sample the allocator's own trace")
        add_hold_options(one)
        add_hang_options(one)
    commands.add_parser("print-config", help="write a commented default configuration")
    return parser


if __name__ == "__main__":
    sys.exit(main())
