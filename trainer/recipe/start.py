"""Starting the trainer: check everything that can be checked without torch, then start a run.

``python -m ftmon.trainer.recipe.start`` reads a ``StartRequest`` (JSON) of kind ``train`` or ``demo`` on standard input
and prints one JSON line, ``{"run": "<run directory>"}``; a mistake is one line on stderr and exit status 2.
``... print-config`` writes a commented default configuration.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.run import exits
from ...protocol.run.rundir import Recipe, RunDir
from ...protocol.run.start_request import StartRequest, print_started, read_request
from ..launch import start
from . import command, hardware
from .checkpoint import folder as checkpoints
from .config import write
from .config.load import Loaded, load
from .config.schema import Config
from .demo import demo_config
from .faults import spec
from .preflight.inputs import check_hub
from .preflight.resolve import resolve


def start_trainer(request: StartRequest, loaded: Loaded) -> RunDir:
    """Check a configuration and start its run.

    Where the request has no name, the run is called ``run.name``, or after the file.

    Raises:
        UsageError: the configuration or the request does not hold, or packages are missing.
        FtmonError: the run cannot be started.
    """
    start.check_request(request)
    missing = hardware.missing_packages()
    if missing:
        raise UsageError(f"training needs {', '.join(missing)}, not installed here; run: pip install 'ftmon[train]'")
    check_hub(loaded)
    resolved = resolve(loaded)
    _make_output(loaded, resolved.config.output.dir)
    os.environ.update(command.launch_environment(resolved))
    chosen = request.name or resolved.config.run.name or Path(loaded.source).stem
    described, recipe = write.dump(resolved.config), _recipe(request, resolved.config)
    return start.start_run(request, chosen, command.launch_command(resolved), described, recipe)


def _recipe(request: StartRequest, config: Config) -> Recipe:
    data = config.data
    before = (RunDir(request.resume).read_run().recipe if request.resume else None) or Recipe(config=_file(request))
    options = {"run.ranks": request.ranks, "training.max_steps": request.steps, "debug.fault": request.fault}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return Recipe(
        config=before.config,
        overrides=[*before.overrides, *_overrides(request), *given],
        model=config.model.name or f"{config.model.config.get('model_type', 'model')} (random weights)",
        data=[path for path in (data.path, data.name, *(file.path for file in data.files)) if path],
    )


def _file(request: StartRequest) -> str:
    """Return the configuration file as given; empty if everything is on the command line."""
    return "" if "=" in request.config and not Path(request.config).exists() else request.config


def _overrides(request: StartRequest) -> list[str]:
    """Return the request's assignments; without a file the first one is in its place."""
    return request.overrides if _file(request) == request.config else [request.config, *request.overrides]


def _make_output(loaded: Loaded, folder: str) -> None:
    """Make the output folder now, while an error still reaches the terminal."""
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise loaded.error("output.dir", f"{folder}: cannot be made: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.recipe.start``; return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.what == "print-config":
        print(write.commented_default(), end="")
        return 0
    try:
        request = read_request(sys.stdin.buffer)
        run = start_trainer(request, _demo(request) if request.kind == "demo" else _train(request))
    except FtmonError as error:
        print(error, file=sys.stderr)
        return exits.of_error(error, exits.WRONG_USAGE)
    except OSError as error:
        # A path of the configuration, such as one with a name too long for the file system.
        refusal = UsageError(f"{error.filename or 'the configuration'}: cannot be used: {error.strerror or error}")
        print(refusal, file=sys.stderr)
        return refusal.exit_status
    print_started(run)
    return 0


def _train(request: StartRequest) -> Loaded:
    if request.resume:
        return _resumed(RunDir(request.resume), request.overrides)
    return load(_file(request) or None, _overrides(request))


def _resumed(run: RunDir, overrides: Sequence[str]) -> Loaded:
    """Return the configuration of a run, with the place of its newest complete checkpoint; without an injected fault.

    A run that ended before its first checkpoint continues from where it was itself resumed.

    Raises:
        UsageError: there is no complete checkpoint.
    """
    config = load(str(run.config)).config
    output = config.output.dir or str(run.path / "output")
    for place in (output, config.checkpoint.resume):
        if place not in ("never", "auto"):
            with contextlib.suppress(ConfigError):
                checkpoints.candidates(place, Path(place))
                return load(str(run.config), [f"checkpoint.resume={json.dumps(place)}", "debug.fault=", *overrides])
    raise UsageError(
        f"{run.id}: no complete checkpoint is in {output}/checkpoints; 'ftmon train' writes one every checkpoint.every "
        f"steps; to begin anew: ftmon train {run.config}"
    )


def _demo(request: StartRequest) -> Loaded:
    overrides = list(request.overrides)
    for option, value in (("steps", request.steps), ("ranks", request.ranks)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}")
    if request.ranks is not None:
        overrides.append(f"run.ranks={request.ranks}")
    if request.steps is not None:
        overrides.append(f"training.max_steps={request.steps}")
        warmup = min(8, request.steps // 4)
        overrides.insert(0, f"schedule.warmup_steps={warmup}")
    loaded = demo_config(overrides)
    if request.fault:
        try:
            spec.parse(request.fault, loaded.config.run.ranks or 1024)
        except UsageError as error:
            raise UsageError(f"--fault {error}") from None
        loaded = demo_config([*overrides, f"debug.fault={request.fault}"])
    return loaded


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.recipe.start", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    commands.add_parser("print-config", help="write a commented default configuration")
    return parser


if __name__ == "__main__":
    sys.exit(main())
