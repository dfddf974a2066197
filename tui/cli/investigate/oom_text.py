"""Renders the report of an out-of-memory error as lines of text."""

import time
from collections.abc import Iterator, Sequence

from ....protocol.messages.oom import OomReport, RankMoment, Remedy
from ....protocol.text import duration, gib, sanitize

_FRAMES = 8
_HOLDERS = 5
_RANKS = 16


def report_lines(reports: Sequence[OomReport], *, of_snapshot: bool = False) -> Iterator[str]:
    """Yield the lines of the newest report, after one line for each earlier report.

    Args:
        reports: oldest first; at least one.
        of_snapshot: whether they are from a snapshot, which has neither rank nor step.
    """
    *before, report = reports
    for other in before:
        yield f"{_clock(other.time)} rank {other.rank} step {other.step:,} {other.phase}: {other.verdict.title}"
    if before:
        yield ""
    yield from _safe(_report(report, of_snapshot))


def _safe(lines: Iterator[str]) -> Iterator[str]:
    return (sanitize(line) for line in lines)


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
            yield f"  {number}. {remedy.text}{remedy_bytes(remedy)}"
            if remedy.setting:
                yield f"     {remedy.setting}"
    if oom.stack:
        whose = (
            "the training thread, which waited for the backward pass" if oom.stack_of == "training" else "the request"
        )
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


def remedy_bytes(remedy: Remedy) -> str:
    """Return text for the memory that a remedy frees: `` (frees about 4.00 GiB)``; empty if unknown."""
    bound = f" {remedy.bound}" if remedy.bound else ""
    return f" (frees{bound} {gib(remedy.frees_bytes)})" if remedy.frees_bytes else ""


def _moment(moment: RankMoment) -> str:
    memory = f"allocated {gib(moment.allocated_bytes)}, reserved {gib(moment.reserved_bytes)}"
    inside = f", in {moment.collective}" if moment.collective else ""
    return f"rank {moment.rank}: {moment.state}, step {moment.step:,} {moment.phase}{inside}; {memory}"


def _clock(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t)) if t else "time not known"
