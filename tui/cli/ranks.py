"""Commands about a run's ranks: out-of-memory errors, held ranks, stacks; stop, kill, and what runs left behind."""

import codeop
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...protocol.analysis.stalls import evidence
from ...protocol.errors import FtmonError, HubError, UsageError
from ...protocol.messages import control
from ...protocol.messages.control import Result
from ...protocol.messages.memory import OomReport, RankMoment
from ...protocol.messages.telemetry import Oom, Stacks
from ...protocol.run import rundir
from ...protocol.run.rundir import HubFile, RunDir
from ...protocol.text import duration, gib, ranks_counted, sanitize, wrapped
from ..model.oom import OomCase
from .access import ask, check_rank, living_hub, opened, wait_for_end, words_of
from .output import print_json

_FRAMES = 8
_HOLDERS = 5
_RANKS = 16


def report_lines(reports: Sequence[OomReport], *, of_snapshot: bool = False) -> Iterator[str]:
    """Yield the lines of the newest report, the last one, after one line for each earlier report.

    Reports of a snapshot have neither rank nor step.
    """
    *before, report = reports
    for other in before:
        yield f"{_clock(other.time)} rank {other.rank} step {other.step:,} {other.phase}: {other.verdict.title}"
    if before:
        yield ""
    yield from map(sanitize, _report(report, of_snapshot))


def _report(report: OomReport, of_snapshot: bool) -> Iterator[str]:
    oom, verdict = report.oom, report.verdict
    where = f" in {oom.phase}" if oom.phase else ""
    who = oom.message if of_snapshot else f"rank {oom.rank}, step {oom.step:,}"
    yield f"out of memory{where}: {who}, {_clock(oom.time)}"
    yield f"verdict: {verdict.title}{'' if verdict.sure or verdict.kind == 'unknown' else ' (likely)'}"
    yield f"  {verdict.text}"
    yield "evidence:"
    yield from (f"  {line}" for line in verdict.evidence)
    if report.remedies:
        yield "to try, in this order:"
        for number, remedy in enumerate(report.remedies, 1):
            bound = f" {remedy.bound}" if remedy.bound else ""
            frees = f" (frees{bound} {gib(remedy.frees_bytes)})" if remedy.frees_bytes else ""
            yield f"  {number}. {remedy.text}{frees}"
            if remedy.setting:
                yield f"     {remedy.setting}"
    if oom.stack:
        waits = "the training thread, which waited for the backward pass"
        whose = waits if oom.stack_of == "training" else "the request"
        yield f"stack of {whose}, innermost last:"
        yield from (f"  {frame}" for frame in oom.stack[-_FRAMES:])
    if oom.holders:
        yield "held most, by allocating stack:"
        for group in oom.holders[:_HOLDERS]:
            blocks = f"{group.count:,} block{'s' * (group.count != 1)}"
            yield f"  {gib(group.bytes):>11} in {blocks}  {group.frames[-1] if group.frames else ''}"
    if len(report.ranks) > 1:
        yield "all ranks at that moment:"
        yield from (f"  {_moment(moment)}" for moment in report.ranks[:_RANKS])
        if len(report.ranks) > _RANKS:
            yield f"  and {len(report.ranks) - _RANKS} more (--json has them all)"
    if oom.held:
        limit = f" for {duration(oom.hold_seconds)} at most" if oom.hold_seconds else ""
        yield f"the rank was held in the failing frame{limit}: {oom.others}"
    if not of_snapshot:
        yield f"snapshot: {oom.snapshot or oom.snapshot_note or 'none'}"
        if report.path:
            yield f"report: {report.path}"


def _moment(moment: RankMoment) -> str:
    memory = f"allocated {gib(moment.allocated_bytes)}, reserved {gib(moment.reserved_bytes)}"
    inside = f", in {moment.collective}" if moment.collective else ""
    return f"rank {moment.rank}: {moment.state}, step {moment.step:,} {moment.phase}{inside}; {memory}"


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t else "time not known"


_MOST = 64
_SQLITE = b"SQLite format 3\0"


def show_oom(arguments: Namespace) -> int:
    """Print the reports of a run's out-of-memory errors, newest last, the earlier ones in a line each."""
    name: str = arguments.target
    run, reports = _of_snapshot(name) if _is_snapshot(Path(name)) else _of_recording(name)
    reports = [report for report in reports if arguments.rank in (None, report.rank)]
    if not reports:
        whose = f"rank {arguments.rank} of " if arguments.rank is not None else ""
        raise FtmonError(f"{whose}{run or name}: no out-of-memory error is recorded")
    if arguments.json:
        print_json({"run": run, "file": None if run else name, "reports": reports})
        return 0
    for line in report_lines(reports, of_snapshot=not run):
        print(wrapped(line, 1))
    return 0


def _is_snapshot(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) != _SQLITE
    except (OSError, ValueError):
        return False  # reading it as a recording reports the problem


def _of_snapshot(name: str) -> tuple[str, list[OomReport]]:
    from ...protocol.analysis.allocator.snapshot_replay import Replay
    from ...protocol.analysis.oom_report import report_of
    from ...protocol.snapshot.reader import open_snapshot

    snapshot = open_snapshot(name)
    report = report_of(snapshot, [Replay(snapshot, device) for device in snapshot.devices()])
    return "", [report] if report is not None else []


def _of_recording(name: str) -> tuple[str, list[OomReport]]:
    path = rundir.find_recording(name)
    with opened(path) as reader:
        info = reader.info()
        reports = [
            frame.message
            for rank in info.ranks
            for frame in reader.sampled("oom_report", rank, _MOST)
            if isinstance(frame.message, OomReport)
        ]
        if not reports:  # no hub has judged them
            frames = (frame for rank in info.ranks for frame in reader.sampled("oom", rank, _MOST))
            for case in (OomCase(frame.message) for frame in frames if isinstance(frame.message, Oom)):
                oom = case.oom
                reports.append(OomReport(oom.rank, oom.step, oom.phase, oom.time, oom, case.verdict, case.remedies))
    return info.run_id or path.parent.name, sorted(reports, key=lambda report: report.time)


_WELCOME = (
    "Python in the frame in which the allocation of rank {rank} failed; help() lists helpers, ctrl-d leaves.\n"
    "Leaving does not release the rank: ftmon release does."
)
_SECONDS = 75.0  # time limit of a result; the hub's own is a minute


def console(arguments: Namespace) -> int:
    """Run one piece of code in a held rank, or read and run code until the end of the input."""
    run = rundir.find(arguments.run)
    if run.read_exit() is not None:
        raise HubError(f"{run.id} has ended: 'ftmon oom {run.id}' prints what was found")
    hub = living_hub(run)
    if arguments.code is not None:
        return _run(hub, arguments.rank, arguments.code)
    if sys.stdin.isatty():
        print(_WELCOME.format(rank=arguments.rank))
    status = 0
    while (code := _read()) is not None:
        if not code.strip():
            continue
        try:
            status = _run(hub, arguments.rank, code)
        except FtmonError as error:
            print(f"ftmon: {error}", file=sys.stderr)
            status = error.exit_status
            if run.read_exit() is not None:
                break
    return status


def release(arguments: Namespace) -> int:
    """Release held ranks; return 1 if none was held."""
    run = rundir.find(arguments.run)
    if run.read_exit() is not None:
        print(f"{run.id} has ended; no rank is held")
        return 1
    result = ask(living_hub(run), control.Release(sorted(set(arguments.rank))))
    print(sanitize(result.text))
    return 0 if result.ok else 1


def _run(hub: HubFile, rank: int, code: str) -> int:
    result = ask(hub, control.Console(code, rank), result_seconds=_SECONDS)
    data: dict[str, Any] = result.data
    for line in str(data.get("output", "")).splitlines():
        print(sanitize(line, 100_000))
    if result.text:
        print(sanitize(result.text), file=sys.stderr)
    return 0 if result.ok and not data.get("error") else 1


def _read() -> str | None:
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else ">>> ") if sys.stdin.isatty() else "")
        except EOFError:
            return "\n".join(lines) if lines else None
        except KeyboardInterrupt:
            print()
            return ""
        lines.append(line)
        text = "\n".join(lines)
        try:
            # None: the statement is incomplete. An empty line ends a block, as in Python's own prompt.
            if codeop.compile_command(text, symbol="single") is not None or not line:
                return text
        except (SyntaxError, ValueError, OverflowError):
            return text


_STACKS_SECONDS = 60.0
_STACKS_MOST = 240  # recorded stacks of a rank that are searched


def show_stacks(arguments: Namespace) -> int:
    """Print the ranks' stacks, of a recording or an ended run the last ones; return 0 if all ranks' were received."""
    run = rundir.find_run(arguments.run)
    # A run directory without a living hub may be a copy, for which no hub is started.
    if (
        run is None
        or run.read_exit() is not None
        or (rundir.recording_file(arguments.run) and run.living_hub() is None)
    ):
        return _show(recorded(rundir.find_recording(arguments.run), arguments.rank), arguments)
    verb = control.Stacks(sorted(set(arguments.rank)), "ftmon stacks", arguments.native)
    return _show(ask(living_hub(run), verb, result_seconds=_STACKS_SECONDS), arguments)


def _show(result: Result, arguments: Namespace) -> int:
    if arguments.json:
        print_json(as_json(result))
    else:
        for line in as_lines(result, all_threads=arguments.all_threads):
            print(line)
    return 0 if result.ok else 1


def recorded(path: Path, ranks: list[int]) -> Result:
    """Return the last stacks of some ranks (empty: all) from a recording, in the form of an answer.

    Raises ``UsageError`` if the run has no such rank or no recorded stacks, ``RecordingError`` if it cannot be read.
    """
    with opened(path) as reader:
        known = reader.info().ranks
        for rank in ranks:
            check_rank(known, rank)
        frames = [frame for rank in ranks or known for frame in reader.sampled("stacks", rank, _STACKS_MOST)]
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
        for group in evidence.group(stacks)
    ]
    return {"groups": groups, "ranks": result.data.get("answers", {}), "silent": result.data.get("silent", [])}


def as_lines(result: Result, *, all_threads: bool = False) -> list[str]:
    """Return the answer to ``stacks`` as lines: a head for each group of ranks, then the frames, innermost first."""
    stacks = _stacks_of(result)
    answers: dict[str, dict[str, Any]] = result.data.get("answers", {})
    lines: list[str] = []
    for group in evidence.group(stacks):
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


def cleanup(arguments: Namespace) -> int:
    """Run the trainer's clean-up, which asks on this terminal; return its status."""
    words = words_of(arguments, ("yes", "json", "elsewhere"))
    return subprocess.run(
        [sys.executable, "-P", "-m", "ftmon.trainer.host.end.cleanup", *words], check=False
    ).returncode


_WRITTEN_SECONDS = 10.0


def kill(arguments: Namespace) -> int:
    """End a run, or some of its ranks; return 0 only if all their processes have ended."""
    run = rundir.find(arguments.run)
    if _is_over(run):
        print(f"{run.id} has ended already; no process of it is left")
        return 0
    if not _confirmed(run, arguments):
        print("nothing was killed")
        return 1
    return _act(run, control.Kill(sorted(set(arguments.rank)), arguments.signal or ""))


def stop(arguments: Namespace) -> int:
    """Make a run save a checkpoint and end after its step; a foreign script receives INT."""
    run = rundir.find(arguments.run)
    if _is_over(run):
        print(f"{run.id} has ended already")
        return 0
    return _act(run, control.Stop())


def _is_over(run: RunDir) -> bool:
    return run.read_exit() is not None


def _confirmed(run: RunDir, arguments: Namespace) -> bool:
    if arguments.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    ranks = ", ".join(map(str, sorted(set(arguments.rank))))
    target = f"rank{'s' if len(set(arguments.rank)) > 1 else ''} {ranks} of {run.id}" if ranks else f"all of {run.id}"
    steps = arguments.signal or "INT, TERM and KILL in steps"
    print(f"This sends {steps} to {target}, dataloader workers included.", file=sys.stderr)
    if ranks:
        print("DeepSpeed ends the whole node when one rank dies.", file=sys.stderr)
    print("Kill? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _act(run: RunDir, verb: control.Verb) -> int:
    try:
        result = ask(living_hub(run), verb, on_accepted=lambda text: print(text or "accepted", flush=True))
    except FtmonError:
        if not _is_over(run):  # the run may have ended meanwhile
            raise
        print(f"{run.id} has ended")
        return 0
    print(result.text)
    if result.ok and isinstance(verb, control.Kill) and not verb.ranks:
        wait_for_end(run, _WRITTEN_SECONDS)  # so that the next command sees that it is over
    return 0 if result.ok else 1
