"""Parses ``accelerate launch`` with accelerate's own code: options, configuration file, environment of the ranks."""

import argparse
import contextlib
import logging
import os
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ...protocol.errors import UsageError
from .launched import Launched

_LAUNCHERS = ("deepspeed_launcher", "multi_gpu_launcher", "simple_launcher")
_OTHERS = ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")


class _ChosenError(Exception):
    """Raised at the point where accelerate would start a job.

    Args:
        launcher: the name of accelerate's function that starts it.
        arguments: its arguments, completed from the configuration file.
    """

    def __init__(self, launcher: str, arguments: argparse.Namespace) -> None:
        super().__init__(launcher)
        self.launcher, self.arguments = launcher, arguments


def parse(words: Sequence[str]) -> Launched:
    """Parse the arguments of ``accelerate launch``.

    Raises:
        UsageError: accelerate would not start it, or not on GPUs.
    """
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    parser = launch.launch_command_parser()
    parser.error = _refuse
    if not words:
        _refuse("names no script")
    arguments = parser.parse_args(list(words))
    if arguments.config_file:
        _check_file(arguments.config_file)
    launcher, environment = "", dict[str, str]()
    with _not_started(launch):
        try:
            try:
                launch.launch_command(arguments)
            except _ChosenError as chosen:
                launcher, arguments = chosen.launcher, chosen.arguments
            if arguments.use_deepspeed:
                arguments.main_process_port = 0  # any free port: nothing is started, and accelerate refuses a used one
                _, environment = prepare_deepspeed_cmd_env(arguments)
        except Exception as error:  # accelerate raises many types for wrong values
            _refuse(" ".join(str(error).split()))
    if launcher in _OTHERS or getattr(arguments, "use_cpu", False):
        _refuse("it would train on no GPU")
    if not isinstance(arguments.num_processes, int):
        _refuse(f"num_processes must be a whole number, not {arguments.num_processes!r}")
    told = {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}
    return Launched(
        arguments.training_script,
        bool(arguments.module),
        list(arguments.training_script_args),
        arguments.num_processes or None,
        {name: value for name, value in told.items() if os.environ.get(name) != value},
    )


def _check_file(path: str) -> None:
    """Refuse a configuration file for which accelerate has no clear error."""
    try:
        content = yaml.safe_load(Path(path).read_bytes())
    except OSError as error:
        _refuse(f"{path}: {error.strerror}")
    except yaml.YAMLError as error:
        _refuse(f"{path}: {' '.join(str(error).split())}")
    if not isinstance(content, dict):
        _refuse(f"{path}: must be keys with values, as 'accelerate config' writes them")


def _refuse(message: str) -> NoReturn:
    raise UsageError(f"accelerate launch: {message}; use --model and --deepspeed instead")


@contextlib.contextmanager
def _not_started(launch: Any) -> Generator[None]:
    """Make accelerate raise ``_ChosenError`` instead of starting a job, without its messages about defaults."""

    def instead(name: str) -> Any:
        def chosen(*arguments: Any) -> NoReturn:
            raise _ChosenError(name, arguments[-1])

        return chosen

    kept = {name: getattr(launch, name) for name in (*_LAUNCHERS, *_OTHERS)}
    logger = logging.getLogger(launch.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    for name in kept:
        setattr(launch, name, instead(name))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
        for name, function in kept.items():
            setattr(launch, name, function)
