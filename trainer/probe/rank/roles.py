"""Classifies a process of a run: a rank, a launcher of ranks, or neither. Standard library only, no side effects."""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ....protocol.run.environment import RANK_PID_ENV as RANK_PID_ENV

Role = Literal["rank", "candidate", "launcher", "refused", "other"]
"""``candidate``: a process that becomes a rank if it trains (a single process, or a process whose rank is set in code);
``refused``: a launcher started from inside a rank."""

_LAUNCH_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds", "torchrun", "torchrun.py", "accelerate-launch"}
_LAUNCH_MODULES = (
    *("deepspeed.launcher.", "torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic"),
    *("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "ftmon.trainer.recipe.launcher"),
)


class Program(NamedTuple):
    """Target of a Python command line: a ``script`` path, a ``module`` (-m), or neither (-c, interactive)."""

    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()


def parse_program(argv: Sequence[str]) -> Program:
    """Return the program in ``sys.orig_argv``, after the interpreter's own options (also bundled ones)."""
    words = iter(argv[1:])
    for word in words:
        if word == "-" or not word.startswith("-"):
            return Program(script="" if word == "-" else word, arguments=tuple(words))
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(words, "")
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter == "c":
                return Program()
            if letter == "m":
                return Program(module=word[place:] or next(words, ""), arguments=tuple(words))
            if letter in "WX":
                if not word[place:]:
                    next(words, "")
                break
    return Program()


def launcher_name(program: Program) -> str:
    """Return the name of the launcher that a program is; empty if it is not a launcher."""
    name = os.path.basename(program.script)
    if name in _LAUNCH_SCRIPTS:
        return name
    if name == "accelerate" or program.module == "accelerate.commands.accelerate_cli":
        return "accelerate launch" if "launch" in program.arguments[:1] else ""
    if program.module and (program.module + ".").startswith(_LAUNCH_MODULES):
        return program.module
    return ""


def parse_rank(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Read (rank, local rank, world size) from a launcher's environment; None when it names no rank."""
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return rank, int(environment.get("LOCAL_RANK", rank)), world
    except (KeyError, ValueError):
        return None


def is_alive(pid: int) -> bool:
    """Return whether a process with that id exists (its start time is unknown here)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def decide(argv: Sequence[str], environment: Mapping[str, str], pid: int) -> Role:
    """Return the role of this process."""
    launcher = launcher_name(parse_program(argv))
    marker = environment.get(RANK_PID_ENV, "")
    if marker.isdigit() and int(marker) != pid and is_alive(int(marker)):
        return "refused" if launcher else "other"
    if launcher:
        return "launcher"
    return "rank" if parse_rank(environment) is not None else "candidate"
