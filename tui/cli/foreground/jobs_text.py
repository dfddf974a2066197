"""Renders the jobs of a run as plain lines: the table of ``ftmon status``, and a line each for a followed run."""

from collections.abc import Iterator, Mapping

from ....protocol.messages.jobs import Job
from ....protocol.text import counted, duration, gib
from ...model.jobs import JobRow, job_rows

_SHOWN = 40
"""Maximum number of listed jobs: the last ones."""


def job_table(jobs: Mapping[int, Job], now: float) -> Iterator[str]:
    """Yield the table of jobs, with the reason below each failed one."""
    rows = job_rows(jobs, now)
    if len(rows) > _SHOWN:
        yield f"jobs: the last {_SHOWN} of {len(rows)}; all of them: --json"
    shown = rows[-_SHOWN:]
    resident = any(row.peak != row.allocated_peak for row in shown)
    heads = ("allocated", "reserved", *(("resident",) if resident else ()))
    table = [("job", "outcome", "ranks", "steps", "s/step", "loss", *heads, "time", "command")]
    table += [_cells(row, resident) for row in shown]
    widths = [max(len(cells[at]) for cells in table) for at in range(len(table[0]))]
    for at, cells in enumerate(table):
        left = [cells[0].rjust(widths[0]), cells[1].ljust(widths[1])]
        middle = [cell.rjust(width) for cell, width in zip(cells[2:-1], widths[2:-1], strict=True)]
        yield "  ".join([*left, *middle, cells[-1]]).rstrip()
        if at and shown[at - 1].text:
            yield f"{' ' * widths[0]}    {shown[at - 1].text}"


def _cells(row: JobRow, resident: bool) -> tuple[str, ...]:
    peaks = [row.allocated_peak, row.reserved_peak, *([row.peak] if resident else [])]
    return (
        str(row.number),
        row.outcome + ("" if row.shown else " (not shown)"),
        str(row.ranks),
        f"{row.steps:,}",
        f"{row.step_seconds:.3f}" if row.step_seconds else "-",
        f"{row.loss:.4f}" if row.loss is not None else "-",
        *(gib(peak) if row.steps else "-" for peak in peaks),
        duration(row.seconds),
        row.words,
    )


def job_line(jobs: Mapping[int, Job], number: int, now: float) -> str:
    """Return the state of a job in one line."""
    row = next(row for row in job_rows(jobs, now) if row.number == number)
    parts = [f"job {number} {row.outcome}", row.words, counted(row.steps, "step")]
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4f}")
    if row.peak:
        parts.append(f"peak {gib(row.peak)} (rank {row.peak_rank}, {row.peak_phase} of step {row.peak_step:,})")
    parts.append(duration(row.seconds))
    return "  ".join(filter(None, parts)) + (f": {row.text}" if row.text else "")
