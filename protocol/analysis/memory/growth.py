"""Growth: memory that the first optimizer step allocated and keeps; reported as information, not as a spike.

Rule: in the first three optimizer steps of a rank that the loss scaler did not skip, the phase's ``end - start`` is at
least 16 MiB. One alert for all ranks, once a run; its size is the largest rank's.

Gradients do not count: memory left by a forward and backward inside the update (its closure) is subtracted. Once the
step's composition is received, the size is that of the optimizer's states, so that gradients freed by the update do not
reduce it.
"""

from ...messages.memory import Composition
from ...messages.telemetry import Hello, PhaseRecord, Step
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from .facts import GrowthFacts

GROWTH_FLOOR = 16 * 2**20
FIRST_STEPS = 3
_NESTED = ("forward", "backward")


class GrowthDetector:
    """Finds the growth of the first optimizer steps (rule: this module's docstring)."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}
        self._grown: dict[int, tuple[int, int]] = {}
        """By rank: the step with growth and its size, until its composition is received."""
        self._capacity = 0
        self._sizes: dict[str, int] = {}
        self._found: set[int] = set()
        """Ranks with growth."""

    def hello(self, hello: Hello) -> None:
        """Record the device's size, for the growth's share of it."""
        self._capacity = hello.device.capacity_bytes

    def step(self, step: Step) -> list[Finding]:
        """Check one step; after the first few this costs nothing."""
        left = self._left.get(step.rank, FIRST_STEPS)
        if left == 0 or step.overflow:
            return []
        self._left[step.rank] = left - 1
        record = step.phase("optimizer")
        if record is None:
            return []
        grown = _own_growth(step, record)
        if grown < GROWTH_FLOOR:
            return []
        self._left[step.rank] = 0
        self._grown[step.rank] = (step.step, grown)
        return [self._finding(step.rank, step.step, grown, grown)]

    def composition(self, found: Composition) -> list[Finding]:
        """Process a step's composition, whose optimizer states are the growth of the first step."""
        number, grown = self._grown.get(found.rank, (-1, 0))
        states = found.known.get("optimizer_states", 0)
        if found.step != number or states < GROWTH_FLOOR:
            return []
        del self._grown[found.rank]
        return [self._finding(found.rank, number, states, grown)]

    def observe(self, step: Step) -> None:
        """Restore a step from the recording: this rank's first steps are over."""
        self._left[step.rank] = 0

    def restore(self, finding: Finding) -> None:
        """Restore the finding from the recording, so that further ranks are added to it."""
        self._found.update(finding.ranks)
        if finding.facts is not None:
            self._sizes = dict(finding.facts.bytes_by_rank)

    def _finding(self, rank: int, step: int, size: int, net: int) -> Finding:
        self._found.add(rank)
        if len(self._sizes) < RANKS_LISTED or str(rank) in self._sizes:
            self._sizes[str(rank)] = size
        freed = size - net if size - net >= GROWTH_FLOOR else 0
        facts = GrowthFacts(max(self._sizes.values()), net, self._capacity, dict(self._sizes), freed)
        ranks = tuple(sorted(self._found))
        return Finding("state_growth", facts, severity="info", ranks=ranks, step=step, phase="optimizer")


def _own_growth(step: Step, record: PhaseRecord) -> int:
    """Return the update's own growth, without that of phases inside it (a closure's)."""
    grown = record.allocated.growth
    if record.count > 1:
        inside = [phase for phase in step.phases if phase.name in _NESTED and phase.start_us >= record.start_us]
        if inside:
            first, last = inside[0], inside[-1]
            grown -= max(0, last.allocated.end - first.allocated.start)
    return grown
