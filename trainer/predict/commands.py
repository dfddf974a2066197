"""Parses a command that starts a training script: the script, its arguments, and its number of ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...protocol.errors import UsageError
from ..probe.rank.roles import parse_program

_FLAGS = "use --model and --deepspeed instead"
_PYTHON = re.compile(r"python[\d.]*")
_LAUNCHERS = ("deepspeed", "torchrun")
_LAUNCHING_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
    "accelerate.commands.accelerate_cli": "accelerate",
}
_A_HOST = ("num_gpus", "nproc_per_node")
_HOSTS = ("num_nodes", "nnodes")
_SWITCHES = (
    *("standalone", "no_python", "run_path", "no_local_rank", "virtual_local_rank", "force_multi", "use_env"),
    *("bind_cores_to_rank", "save_pid", "no_ssh", "no_ssh_check", "elastic_training", "q", "quiet"),
)
"""Options of the launchers without a value."""


@dataclass(frozen=True, slots=True)
class Launched:
    """The job that a command would start."""

    script: str  # A file, or with ``is_module`` a module
    is_module: bool
    arguments: list[str]
    ranks: int | None  # Number of ranks; None: the launcher would count this machine's GPUs


def parse(command: Sequence[str]) -> Launched:
    """Parse a command: a launcher or ``python``, its options, a script and its arguments.

    Raises ``UsageError`` if it is another command, or its script does not exist.
    """
    words = list(command)
    if not words:
        raise UsageError("predict -- needs a command, such as: deepspeed --num_gpus 4 train.py")
    program = Path(words.pop(0)).name
    launcher = program
    if _PYTHON.fullmatch(program):
        launcher, words = _after_python(words)
    if launcher in ("accelerate", "accelerate-launch"):
        raise UsageError(
            "predict -- does not read accelerate's options and configuration file: "
            "give the script and its ranks as torchrun takes them, torchrun --nproc-per-node N train.py"
        )
    if launcher and launcher not in _LAUNCHERS:
        raise UsageError(f"predict -- takes deepspeed, torchrun or python, not {program}; {_FLAGS}")
    options, is_module, words = _options(words) if launcher else ({}, words[:1] == ["-m"], words)
    if is_module and not launcher:
        words = words[1:]
    if not words:
        raise UsageError(f"'{' '.join(command)}' names no script; {_FLAGS}")
    script, *arguments = words
    if not is_module and not Path(script).is_file():
        raise UsageError(f"{script}: no such file; {_FLAGS}")
    if launcher == "deepspeed" and "no_local_rank" not in options:
        arguments = ["--local_rank=0", *arguments]
    return Launched(script, is_module, arguments, _ranks(options) if launcher else 1)


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
