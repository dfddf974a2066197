"""Time limits of each phase: the table used by the hub, the tests and the guide.

A rank's limit, in seconds without progress, is ``max(row, LIMIT_FACTOR x usual longest of that phase on that rank)``;
a phase that only the first step had so far counts with ``FIRST_STEP_FACTOR``.
The column depends on the activity of the rank's process tree, see ``Row``.
"""

from typing import NamedTuple

__all__ = [
    "ALONE_ACTION_S",
    "EARLY_STEPS",
    "FIRST_STEP_FACTOR",
    "LIMIT_FACTOR",
    "REGULAR_STEPS",
    "RESUME_S",
    "ROWS",
    "UNSETTLED_ASLEEP_S",
    "Row",
    "action_patience",
    "as_markdown",
    "row_of",
]

LIMIT_FACTOR = 5.0
"""Multiple of a phase's usual longest duration that exceeds its ordinary variation."""
FIRST_STEP_FACTOR = 2.0
"""The same for a duration of the first step, which may include compilation and warm-up."""
EARLY_STEPS = 3
"""Steps whose durations include compilation, warm-up and the first touch of memory."""
REGULAR_STEPS = 10
"""After this many steps the usual longest duration is known well enough for the short limits of ``asleep_s``."""
UNSETTLED_ASLEEP_S = {"idle": 8.0}
"""Lower bounds of ``asleep_s``, by phase, before ``REGULAR_STEPS`` steps have been seen; 5 s for the others. Between
steps a script's own pauses vary most."""
ALONE_ACTION_S = 300.0
"""No process is ended before its tree was idle for this many seconds if no other rank is known to wait for it, or if it
may go on by itself. Otherwise its phase's limit applies; in every case the verdict must have stood for
``--hang-grace``."""
RESUME_S = 120.0
"""A timed sleep that ends within this many seconds, as between two attempts to reach a server, is not a hang: the rank
counts as working. A longer one is."""


class Row(NamedTuple):
    """Time limits of one phase, in seconds without progress of the training thread."""

    phase: str
    title: str
    """Name of the phase in the guide."""
    computing_s: float
    """Limit if the rank computes, or if its activity is unknown."""
    working_s: float
    """Limit while its process tree reads, writes, sends, receives or compiles, or a child computes."""
    asleep_s: float
    """Limit if it sleeps at one line, its process tree is idle, and other ranks wait for it."""


ROWS = (
    Row("data", "data", 8.0, 60.0, 6.0),
    Row("forward", "forward", 8.0, 60.0, 4.0),
    Row("backward", "backward", 8.0, 60.0, 4.0),
    Row("optimizer", "optimizer", 8.0, 60.0, 4.0),
    Row("within step", "Python code within a step", 8.0, 60.0, 4.0),
    Row("idle", "Python code between steps", 300.0, 300.0, 6.0),
    Row("eval", "evaluation", 300.0, 300.0, 8.0),
    Row("generate", "generation", 300.0, 300.0, 8.0),
    Row("checkpoint", "checkpoint", 600.0, 600.0, 8.0),
    Row("early", "second and third step", 60.0, 60.0, 8.0),
    Row("first", "first step", 300.0, 300.0, 8.0),
    Row("init", "start-up", 300.0, 300.0, 20.0),
)
"""Lower bounds of the limits. ``early`` and ``first`` apply to every phase of those steps; ``init`` applies until the
first phase of the first step, also between phases before that, where scripts sleep to start ranks in turn."""

_BY_PHASE = {row.phase: row for row in ROWS}
_UNKNOWN = Row("", "", 60.0, 300.0, 10.0)


def row_of(phase: str, *, within_step: bool, steps_seen: int, has_stepped: bool) -> Row:
    """Return the applicable row: the phase's own, raised to the lower bounds of the first steps.

    Args:
        within_step: whether it is ``idle`` between the phases of one step.
        has_stepped: whether it has finished a step, received or not.
    """
    row = _BY_PHASE.get("within step" if phase == "idle" and within_step else phase, _UNKNOWN)
    unsettled = UNSETTLED_ASLEEP_S.get(row.phase, 5.0) if steps_seen < REGULAR_STEPS else 0.0
    asleep = max(row.asleep_s, unsettled)
    row = row._replace(asleep_s=asleep)
    if not has_stepped:
        in_step = within_step or phase not in ("init", "idle")
        return _at_least(row, _BY_PHASE["first" if in_step else "init"])
    return _at_least(row, _BY_PHASE["early"]) if steps_seen < EARLY_STEPS else row


def action_patience(computing_s: float, *, awaited: bool, may_resume: bool) -> float:
    """Return for how many seconds a rank's process tree must have been idle before the run may be ended.

    Args:
        may_resume: whether it waits for an answer from the network, or sleeps for a set time.
    """
    return computing_s if awaited and not may_resume else max(computing_s, ALONE_ACTION_S)


def as_markdown() -> list[str]:
    """Return the lines of the guide's table."""
    lines = [
        "| phase | computes, or not known | reads, writes, sends, compiles | asleep, others wait for it "
        "| `--on-hang`: nothing done for | the same, if alone, or if it may go on by itself |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in ROWS:
        action = action_patience(row.computing_s, awaited=True, may_resume=False)
        longer = action_patience(row.computing_s, awaited=True, may_resume=True)
        limits = (row.computing_s, row.working_s, row.asleep_s, action, longer)
        lines.append(" | ".join([f"| {row.title}", *(f"{seconds:g} s" for seconds in limits)]) + " |")
    return lines


def _at_least(row: Row, floor: Row) -> Row:
    return row._replace(
        computing_s=max(row.computing_s, floor.computing_s),
        working_s=max(row.working_s, floor.working_s),
        asleep_s=max(row.asleep_s, floor.asleep_s),
    )
