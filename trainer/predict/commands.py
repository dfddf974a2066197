"""Parses a command that starts a training script: the script, its arguments, and its number of ranks."""

import argparse
import contextlib
import logging
import os
import re
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ...protocol.errors import UsageError
from ..probe.rank.roles import parse_program

# The job of a launcher's command: script, arguments, ranks, environment.


@dataclass(frozen=True, slots=True)
class Launched:
    """The job that a command would start."""

    script: str
    """A file, or with ``is_module`` a module."""
    is_module: bool
    arguments: list[str]
    ranks: int | None
    """Number of ranks; None: the launcher would count this machine's GPUs."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables from the launcher, without the ranks' numbers."""


# Parses ``accelerate launch`` with accelerate's own code: options, configuration file, environment of the ranks.


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


_FLAGS = "use --model and --deepspeed instead"
_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS_LAUNCHERS = {
    "deepspeed": "deepspeed",
    "torchrun": "torchrun",
    "accelerate-launch": "accelerate",
    "accelerate": "accelerate launch",
}
"""Kind of a program, by its name or its name with the following word."""
_LAUNCHING_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate launch",
}
_A_HOST = ("num_gpus", "nproc_per_node")
_HOSTS = ("num_nodes", "nnodes")
_SWITCHES = (
    *("standalone", "no_python", "run_path", "no_local_rank", "virtual_local_rank", "force_multi", "use_env"),
    *("bind_cores_to_rank", "save_pid", "no_ssh", "no_ssh_check", "elastic_training", "q", "quiet"),
)
"""Options of the launchers without a value."""


def launchers_parse(command: Sequence[str]) -> Launched:
    """Parse a command: a launcher or ``python``, its options, a script and its arguments.

    Raises:
        UsageError: it is another command, or its script does not exist.
    """
    words = list(command)
    if not words:
        raise UsageError("predict -- needs a command, such as: deepspeed --num_gpus 4 train.py")
    program = Path(words.pop(0)).name
    launcher = _LAUNCHERS_LAUNCHERS.get(program, "")
    if _PYTHON.fullmatch(program):
        launcher, words = _after_python(words)
    elif not launcher:
        raise UsageError(f"predict -- takes deepspeed, torchrun, accelerate launch or python, not {program}; {_FLAGS}")
    launcher, _, verb = launcher.partition(" ")
    if verb and words[:1] != [verb]:
        raise UsageError(f"predict -- takes {launcher} {verb}, not '{' '.join(command)}'; {_FLAGS}")
    if launcher == "accelerate":
        found = parse(words[1:] if verb else words)
        _check_script(found.script, found.is_module)
        return found
    options, is_module, words = _options(words) if launcher else ({}, *_script(words))
    if not words:
        raise UsageError(f"'{' '.join(command)}' names no script; {_FLAGS}")
    script, *arguments = words
    _check_script(script, is_module)
    if launcher == "deepspeed" and "no_local_rank" not in options:
        arguments = ["--local_rank=0", *arguments]
    return Launched(script, is_module, arguments, _ranks(options) if launcher else 1)


def _check_script(script: str, is_module: bool) -> None:
    if not is_module and not Path(script).is_file():
        raise UsageError(f"{script}: no such file; {_FLAGS}")


def _after_python(words: list[str]) -> tuple[str, list[str]]:
    """Return the launcher that Python runs as a module (or empty), and the words after Python's own options."""
    program = parse_program(["python", *words])
    if program.module in _LAUNCHING_MODULES:
        return _LAUNCHING_MODULES[program.module], list(program.arguments)
    if program.module:
        return "", ["-m", program.module, *program.arguments]
    if not program.script and "-c" in words:
        raise UsageError(f"predict -- takes a script, not python -c; {_FLAGS}")
    return "", [program.script, *program.arguments] if program.script else []


def _script(words: list[str]) -> tuple[bool, list[str]]:
    """Return whether Python runs a module, and the name of module or script with its arguments."""
    if words and words[0] == "-m":
        return True, words[1:]
    return False, words


def _options(words: list[str]) -> tuple[dict[str, str], bool, list[str]]:
    """Return a launcher's options, whether it runs a module, and the script with its arguments."""
    found: dict[str, str] = {}
    is_module = False
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "module"):
            is_module = True
        elif equals:
            found[name] = value
        elif name in _SWITCHES:
            found[name] = ""
        elif rest:
            found[name] = rest.pop(0)
    return found, is_module, rest


def _ranks(options: dict[str, str]) -> int | None:
    a_host = next((options[name] for name in _A_HOST if name in options), "")
    included = options.get("include") or options.get("i", "")
    if not a_host and ":" in included:  # deepspeed --include worker-0:0,2@worker-1:0,2
        return sum(len(part.partition(":")[2].split(",")) for part in included.split("@") if ":" in part) or None
    hosts = next((options[name] for name in _HOSTS if name in options), "1")
    if options.get("nproc_per_node") == "0" or options.get("nnodes") == "0":
        raise UsageError("torchrun starts no rank with 0 processes or nodes: write 1 or more")
    if not a_host.isdigit() or not hosts.isdigit():
        return None
    return int(a_host) * int(hosts) or None
