"""``ftmon stacks RUN``: where the ranks are, those with the same stack together."""

import json
from argparse import Namespace
from typing import Any

from ...protocol import pystacks, rundir
from ...protocol.control import Result
from ...protocol.errors import UsageError
from ...protocol.text import sanitize
from ..model.stacks import ranks_in_short
from .control import ask
from .trainer import living_hub

_SECONDS = 60.0


def show_stacks(arguments: Namespace) -> int:
    """Ask the ranks for their stacks and print them; status 0 when every rank's were had."""
    run = rundir.find(arguments.run)
    if run.read_exit() is not None:
        raise UsageError(f"{run.id} has ended; stacks that were taken are in its recording: ftmon replay {run.id}")
    args: dict[str, Any] = {"ranks": sorted(set(arguments.rank)), "reason": "ftmon stacks"}
    if arguments.native:
        args["native"] = True
    result = ask(living_hub(run), "stacks", args, result_seconds=_SECONDS)
    if arguments.json:
        print(json.dumps(as_json(result), indent=2))
    else:
        for line in as_lines(result, all_threads=arguments.all_threads):
            print(line)
    return 0 if result.ok else 1


def as_json(result: Result) -> dict[str, Any]:
    """Give the answer to ``stacks`` as plain data: groups of ranks, and each rank's own text."""
    stacks = _stacks_of(result)
    groups = [
        {
            "ranks": group.ranks,
            "doing": group.place.doing,
            "what": group.place.text,
            "frames": [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in group.frames],
        }
        for group in pystacks.group(stacks)
    ]
    return {"groups": groups, "ranks": result.data.get("answers", {}), "silent": result.data.get("silent", [])}


def as_lines(result: Result, *, all_threads: bool = False) -> list[str]:
    """Give the answer to ``stacks`` as lines: a head for each group of ranks, then the frames, innermost first."""
    stacks = _stacks_of(result)
    answers: dict[str, dict[str, Any]] = result.data.get("answers", {})
    lines: list[str] = []
    for group in pystacks.group(stacks):
        lines += [f"{ranks_in_short(group.ranks)}: {group.place.text or 'no Python frames'}"]
        if not all_threads:
            lines += [f"    {frame.place} in {frame.function}" for frame in group.frames]
            continue
        for rank in group.ranks:
            lines += [f"  rank {rank}", *(f"    {sanitize(line)}" for line in stacks[rank][0].splitlines())]
    for rank in sorted(answers, key=int):
        if "native" in answers[rank]:
            lines += [f"rank {rank}, native frames:"]
            lines += [f"    {sanitize(line)}" for line in str(answers[rank]["native"]).splitlines()]
        elif "no_native" in answers[rank]:
            lines += [f"rank {rank}, no native frames: {sanitize(str(answers[rank]['no_native']))}"]
    if not result.ok:
        lines += [sanitize(result.text)]
    return lines


def _stacks_of(result: Result) -> dict[int, tuple[str, str]]:
    answers: dict[str, dict[str, Any]] = result.data.get("answers", {})
    return {
        int(rank): (str(answer["text"]), str(answer.get("thread", "")))
        for rank, answer in answers.items()
        if answer.get("text")
    }
