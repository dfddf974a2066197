"""The jobs of a run as rows of a table: what distinguishes each, its figures, how it ended."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from ...protocol.analysis.oom.detector import is_oom
from ...protocol.messages.jobs import Job, JobPhase, JobRank
from ...protocol.messages.telemetry import PHASES
from ...protocol.text import sanitize

_WORDS_LIMIT = 120
_RANK_OPTIONS = ("--local_rank=", "--local-rank=")
"""Options that a launcher adds to the command line of each rank."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """One job in the table; bytes, seconds."""

    number: int
    words: str
    """The words of its command line that differ from other jobs; for a single job, its script."""
    state: str
    text: str
    """Why it failed."""
    ranks: int
    steps: int
    step_seconds: float | None
    loss: float | None
    peak: int
    peak_rank: int | None
    peak_phase: str
    peak_step: int
    allocated_peak: int
    reserved_peak: int
    seconds: float
    """Duration so far, seconds."""
    shown: bool

    @property
    def outcome(self) -> str:
        """The state in one word; ``oom`` if memory ran out."""
        return "oom" if self.state == "failed" and is_oom(self.text) else self.state


def job_rows(jobs: Mapping[int, Job], now: float) -> list[JobRow]:
    """Return the table's rows, by number; ``now`` is the end of running jobs for their duration."""
    words = differing_words([job.argv for job in jobs.values()])
    return [_row(job, text, now) for job, text in zip(jobs.values(), words, strict=True)]


def _row(job: Job, words: str, now: float) -> JobRow:
    rank = job.peak_rank
    phase = rank.peak_phase if rank is not None else None
    restart = f"restart {job.restart}" if job.restart else ""
    return JobRow(
        number=job.number,
        words=", ".join(filter(None, (words, restart))),
        state=job.state,
        text=sanitize(job.text),
        ranks=job.world_size,
        steps=job.steps,
        step_seconds=job.step_us / 1e6 if job.step_us else None,
        loss=job.loss,
        peak=job.peak,
        peak_rank=rank.rank if rank is not None else None,
        peak_phase=phase.name if phase is not None else "",
        peak_step=phase.peak_step if phase is not None else 0,
        allocated_peak=job.allocated_peak,
        reserved_peak=job.reserved_peak,
        seconds=max(0.0, (job.ended if job.ended is not None else now) - job.started),
        shown=job.shown,
    )


def differing_words(commands: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each command line, the words that not all of them share, option values with their options.

    If nothing differs, or there is only one, it is the script's name.
    """
    commands = [[word for word in command if not word.startswith(_RANK_OPTIONS)] for command in commands]
    sets = [set(command[1:]) for command in commands]
    common = set[str].intersection(*sets) if len(sets) > 1 else set[str]()
    return [_distinct_words(command, common, len(sets) > 1) for command in commands]


def _distinct_words(command: Sequence[str], common: Collection[str], several: bool) -> str:
    found: list[str] = []
    for at, word in enumerate(command):
        if at == 0 or not several or word in common:
            continue
        option = command[at - 1]
        if option.startswith("-") and option in common and "=" not in option:
            found.append(option)
        found.append(word)
    script = PurePath(command[0]).name if command else ""
    text = sanitize(" ".join(found) or script)
    return text if len(text) <= _WORDS_LIMIT else f"{text[: _WORDS_LIMIT - 3]}..."


def phases_of(rank: JobRank) -> list[JobPhase]:
    """List a rank's phases in drawing order."""
    order = {name: at for at, name in enumerate(PHASES)}
    return sorted(rank.phases, key=lambda phase: order.get(phase.name, len(order)))


def failed(jobs: Mapping[int, Job]) -> list[Job]:
    """List the jobs that failed."""
    return [job for job in jobs.values() if job.state == "failed"]
