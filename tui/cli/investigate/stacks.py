"""``ftmon stacks RUN``: prints the ranks' stacks, grouped by equal stacks."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from ....protocol.analysis.stalls import python_stacks
from ....protocol.errors import UsageError
from ....protocol.messages import verbs
from ....protocol.messages.control import Result
from ....protocol.messages.telemetry import Stacks
from ....protocol.run.rundir import RunDir
from ....protocol.text import ranks_counted, sanitize
from ...source.find import find_recording, find_run, recording_file
from ..access.control import ask
from ..access.recordings import check_rank, opened
from ..access.trainer_process import living_hub
from ..output.printable import print_json

_SECONDS = 60.0
_MOST = 240
"""Recorded stacks of a rank that are searched."""


def show_stacks(arguments: Namespace) -> int:
    """Request the ranks' stacks and print them; of a recording or an ended run, the last recorded ones.

    Returns:
        0 if all ranks' stacks were received.

    Raises:
        UsageError: the recording has none.
        RecordingError: it cannot be read.
    """
    run = find_run(arguments.run)
    if run is None or run.read_exit() is not None or _is_copy(run, arguments.run):
        return _show(recorded(find_recording(arguments.run), arguments.rank), arguments)
    verb = verbs.Stacks(sorted(set(arguments.rank)), "ftmon stacks", arguments.native)
    return _show(ask(living_hub(run), verb, result_seconds=_SECONDS), arguments)


def _is_copy(run: RunDir, name: str) -> bool:
    """Return whether ``name`` is a run directory without a living hub: possibly a copy, for which none is started."""
    return recording_file(name) is not None and run.living_hub() is None


def _show(result: Result, arguments: Namespace) -> int:
    if arguments.json:
        print_json(as_json(result))
    else:
        for line in as_lines(result, all_threads=arguments.all_threads):
            print(line)
    return 0 if result.ok else 1


def recorded(path: Path, ranks: list[int]) -> Result:
    """Return the last stacks of each rank from a recording, in the form of an answer.

    Args:
        path: the recording.
        ranks: the ranks; empty: all.

    Raises:
        UsageError: the run has no such rank, or no stacks of it were recorded.
        RecordingError: the recording cannot be read.
    """
    with opened(path) as reader:
        known = reader.info().ranks
        for rank in ranks:
            check_rank(known, rank)
        frames = [frame for rank in ranks or known for frame in reader.sampled("stacks", rank, _MOST)]
        answers: dict[str, dict[str, Any]] = {}
        for frame in sorted(frames, key=lambda frame: frame.seq):
            found = frame.message
            if not isinstance(found, Stacks):
                continue
            answer = answers.setdefault(str(found.rank), {})
            if found.taken_by == "py-spy":
                answer["native"] = found.text
            else:
                answer |= {"text": found.text, "thread": found.thread, "time": found.time, "reason": found.reason}
        if not answers:
            raise UsageError(f"{path}: no stacks were recorded in this run")
    return Result("", True, data={"answers": answers, "silent": []})


def as_json(result: Result) -> dict[str, Any]:
    """Return the answer to ``stacks`` as JSON values: groups of ranks, and each rank's own text."""
    stacks = _stacks_of(result)
    groups = [
        {
            "ranks": group.ranks,
            "doing": group.place.doing,
            "what": group.place.text,
            "frames": [{"file": frame.file, "line": frame.line, "function": frame.function} for frame in group.frames],
        }
        for group in python_stacks.group(stacks)
    ]
    return {"groups": groups, "ranks": result.data.get("answers", {}), "silent": result.data.get("silent", [])}


def as_lines(result: Result, *, all_threads: bool = False) -> list[str]:
    """Return the answer to ``stacks`` as lines: a head for each group of ranks, then the frames, innermost first."""
    stacks = _stacks_of(result)
    answers: dict[str, dict[str, Any]] = result.data.get("answers", {})
    lines: list[str] = []
    for group in python_stacks.group(stacks):
        lines += [f"{ranks_counted(group.ranks)}: {group.place.text or 'no Python frames'}"]
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
