"""Causes of a phase's transient: from its step's figures at once, and from stacks once a rank has sent them.

The figures identify a batch longer than any before, an update skipped by the loss scaler, and a checkpoint being saved.
Stacks identify the others (``stack_patterns``). Otherwise no cause is reported.
"""

from collections import defaultdict, deque

from ...messages.memory import Cause
from ...messages.telemetry import Hello, Step
from ..findings.finding import Condition
from ..remedies import remedy_of
from .facts import NumbersCause, StackCause
from .stack_patterns import name_cause

REPEATED_SHARE = 0.5
"""Stacks of a step with less than this share of the spike do not explain it."""
STEPS_KEPT = 64
"""Steps whose batch sizes are kept: the stacks of a step arrive some steps later."""


class _Rank:
    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.elements = 0
        self.longest: list[int] = []
        self.sizes: deque[tuple[int, int]] = deque(maxlen=STEPS_KEPT)
        """Latest steps, each with the elements of its largest micro-batch."""

    def elements_of(self, step: int) -> int:
        """Return the elements of a step's batch, or of the latest batch if the step is unknown; 0: none is known."""
        return dict(self.sizes).get(step, self.sizes[-1][1] if self.sizes else 0)


class KnownCauses:
    """Known causes of each rank's and phase's transients."""

    def __init__(self) -> None:
        self._ranks = defaultdict[int, _Rank](_Rank)
        self._numbers: dict[Condition, NumbersCause] = {}
        self._stacks: dict[Condition, StackCause] = {}
        self._with_stacks: set[Condition] = set()

    def hello(self, hello: Hello) -> None:
        """Record a rank's configuration."""
        self._ranks[hello.rank].hello = hello

    def note(self, step: Step) -> None:
        """Record a step's batch, once the step has been checked."""
        shape = step.batch_shape
        if not shape:
            return
        rank = self._ranks[step.rank]
        elements = shape[0] * shape[1] if len(shape) > 1 else shape[0]
        rank.sizes.append((step.step, elements))
        if elements > rank.elements:
            rank.elements, rank.longest = elements, shape

    def by_numbers(self, condition: Condition, step: Step, phase: str, transient: int, usual: int) -> None:
        """Find a cause in the step's own figures; call it before ``note``."""
        rank = self._ranks[step.rank]
        shape, pattern, saves = step.batch_shape, "", 0
        if phase == "optimizer" and step.overflow:
            pattern = "loss_scale_overflow"
        elif phase == "checkpoint":
            pattern = "checkpoint_saving"
        elif phase in ("forward", "backward") and len(shape) > 1 and shape[0] * shape[1] > rank.elements > 0:
            pattern, saves = "longer_batch", max(0, transient - usual)
        if pattern:
            remedy = remedy_of(pattern, transient, rank.hello)
            self._numbers[condition] = NumbersCause(pattern, remedy, shape, rank.longest, saves)
        else:
            self._numbers.pop(condition, None)

    def by_stacks(self, condition: Condition, cause: Cause, transient: int) -> None:
        """Process stacks that a rank has sent for a transient of ``transient`` bytes."""
        rank = self._ranks[cause.rank]
        if cause.transient_bytes < REPEATED_SHARE * transient:
            known = self._stacks.get(condition)
            if known is None or known.named is None:
                self._stacks[condition] = StackCause(cause)
            return
        self._with_stacks.add(Condition("spike", cause.rank, cause.phase))
        named = name_cause(cause, rank.elements_of(cause.step))
        found = StackCause(cause, named)
        if named.pattern:
            found = StackCause(cause, named, remedy_of(named.pattern, named.parts[0].bytes, rank.hello))
        self._stacks[condition] = found

    def has_stacks(self, condition: Condition) -> bool:
        """Return whether stacks of a step with this transient are already known."""
        return condition in self._with_stacks

    def of(self, condition: Condition) -> tuple[NumbersCause | StackCause, ...]:
        """Return the known causes of a transient, those from its own step first."""
        return tuple(
            found for found in (self._numbers.get(condition), self._stacks.get(condition)) if found is not None
        )


def conditions_of(cause: Cause) -> list[Condition]:
    """Return the conditions that the stacks of a rank's phase may explain."""
    if cause.reason == "leak":
        return []
    return [
        Condition("spike", cause.rank, cause.phase),
        Condition("spike", None, cause.phase),
        Condition("steady_transient", None, cause.phase),
    ]
