"""Finds a resumed training whose data do not continue where its weights do: batches come again, or are left out."""

from collections.abc import Mapping
from typing import ClassVar

import msgspec

from ...messages.telemetry import Hello, Step
from ..findings.finding import Detector, Finding, Handler, Kind, Shown
from ..words import Words

ALIKE = 4
"""Steps in a row with the batches of other steps, one for one, that are no accident."""
_MOST = 100_000
"""Steps of a job whose batches are remembered."""


class ResumeFacts(msgspec.Struct, frozen=True):
    """The first step of the resumed job, and the step whose batches it had."""

    resumed_at: int
    batches_of: int
    """The step of the job before that had the batches of ``resumed_at``."""


def _resume(finding: Finding) -> Words:
    facts: ResumeFacts = finding.facts
    first, of = facts.resumed_at, facts.batches_of
    what = "repeats batches" if of < first else "leaves batches out"
    return Words(
        f"the training was resumed at step {first} and {what}: it has those of step {of}",
        f"Steps {first} to {first + ALIKE - 1} have, one for one, the batches that steps {of} to {of + ALIKE - 1} had "
        f"before, which had others at step {first}. The weights continue, the data do not.",
        "Save the state of the data with the checkpoint and restore it: a StatefulDataLoader, accelerate's "
        "skip_first_batches, a Trainer with ignore_data_skip=False; in a loop, skip the batches of the steps done.",
        "Another training has begun.",
    )


class Resumes(Detector):
    """Compares the first batches of rank 0's process with those of the same steps in the processes before.

    A job that does not begin before the end of the one before is not judged: what it had to continue with is unknown.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "data_not_resumed",
            ResumeFacts,
            _resume,
            shown={"resumed_at": Shown("resumed at step"), "batches_of": Shown("with the batches of step")},
            limits={"batches of other steps, one for one": f"{ALIKE} steps in a row"},
        ),
    )
    replays = (Hello, Step)

    def __init__(self) -> None:
        self._process = 0, 0
        self._before: dict[int, int] = {}
        """Batches by step of the jobs before; of several that had a step, those of the first."""
        self._batches: dict[int, int] = {}
        self._judged = True
        self._raised: Finding | None = None

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message."""
        return {Hello: self.hello, Step: self.step}

    def hello(self, hello: Hello) -> list[Finding]:
        """Begin another job if rank 0 is another process."""
        process = hello.pid, hello.start_ticks
        if hello.rank or process == self._process:
            return []
        began_anew = 1 in self._batches
        self._before = self._batches if began_anew else self._batches | self._before
        self._process, self._batches, self._judged = process, {}, False
        raised, self._raised = self._raised, None
        return [raised.over()] if raised is not None else []

    def step(self, step: Step) -> list[Finding]:
        """Process one rank's step."""
        if step.rank or not step.batch_id:
            return []
        if len(self._batches) < _MOST:
            self._batches[step.step] = step.batch_id
        if self._judged or len(self._batches) < ALIKE:
            return []
        self._judged = True
        first = next(iter(self._batches))
        of = self._batches_of(first)
        if of is None:
            return []
        self._raised = Finding("data_not_resumed", ResumeFacts(first, of), step=first)
        return [self._raised]

    def _batches_of(self, first: int) -> int | None:
        """Return the step before that had the batches of ``first`` and those after it; None: the same, or unknown."""
        before = self._before
        if first == 1 or first not in before:  # a script that counts anew in each process has not said where it is
            return None
        mine = [self._batches.get(first + place) for place in range(ALIKE)]
        found = [step for step, batch in before.items() if batch == mine[0]]
        if len(found) != 1 or found[0] == first:
            return None  # data that came again in the job before may come again here
        return found[0] if all(before.get(found[0] + place) == batch for place, batch in enumerate(mine)) else None
