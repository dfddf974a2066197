"""Diagnostic requests of detectors to ranks: queued here, sent by the hub.

A capture costs the rank time (stacks make allocations slower), so requests are limited: for spikes, at most
``PER_RANK`` per rank and run, with growing pauses unless the next spike can be predicted, and ``RANKS_A_PHASE`` ranks
per phase; for a transient of every step, one per phase. Only ranks on a GPU are asked: the CPU allocator has no trace.
"""

from typing import NamedTuple

from ...messages import verbs
from ...messages.telemetry import PHASES, Hello

PER_RANK = 3
PAUSE_S = 30.0
LONGER = 4.0
"""Factor between consecutive pauses."""
RANKS_A_PHASE = 4
LEAK_STEPS = 3


class Action(NamedTuple):
    """A command that a detector requests from the hub."""

    verb: verbs.Verb
    ranks: tuple[int, ...]
    why: str


class DiagnosticRequests:
    """The queue of requests and its limits. Times are passed in."""

    def __init__(self) -> None:
        self._queue: list[Action] = []
        self._cuda: set[int] = set()
        self._asked: dict[int, tuple[int, float]] = {}
        """By rank: number of requests, and time of the last one."""
        self._awaited: dict[int, int] = {}
        """By rank: the predicted step for which a capture was requested."""
        self._ranks: dict[str, set[int]] = {}
        self._steady: set[str] = set()
        self._leak_asked = 0

    def drain(self) -> list[Action]:
        """Return the requests since the last call."""
        found, self._queue = self._queue, []
        return found

    def add(self, action: Action) -> None:
        """Queue a request."""
        self._queue.append(action)

    def hello(self, hello: Hello) -> None:
        """Record whether a rank's allocator has a trace."""
        (self._cuda.add if hello.memory_measure == "cuda" else self._cuda.discard)(hello.rank)

    def spike(self, t: float, rank: int, phase: str, steps: list[int]) -> None:
        """Request a capture of a rank's phase after a spike, for the step in which the next spike is predicted.

        Args:
            steps: the steps with a spike, ascending.
        """
        ranks = self._ranks.setdefault(phase, set())
        times, last = self._asked.get(rank, (0, 0.0))
        if rank not in self._cuda or phase not in PHASES or times >= PER_RANK:
            return
        expected = next_step(steps)
        # The pause applies only to spikes that cannot be predicted.
        if times and not expected and t - last < PAUSE_S * LONGER ** (times - 1):
            return
        if (rank not in ranks and len(ranks) >= RANKS_A_PHASE) or steps[-1] <= self._awaited.get(rank, -1):
            return
        self._awaited[rank] = expected
        ranks.add(rank)
        self._asked[rank] = times + 1, t
        self._arm(rank, phase, expected, f"a spike in {phase}, step {steps[-1]}")

    def steady(self, rank: int, phase: str) -> None:
        """Request one capture of a phase whose transient is large in every step."""
        if phase not in self._steady and rank in self._cuda and phase in PHASES:
            self._steady.add(phase)
            self._arm(rank, phase, 0, f"a transient of every {phase}")

    def leak(self, rank: int) -> None:
        """Request a capture of whole steps of a rank whose memory grows."""
        if rank in self._cuda and self._leak_asked < PER_RANK:
            self._leak_asked += 1
            arm = verbs.Arm(steps=LEAK_STEPS, reason="leak")
            self.add(Action(arm, (rank,), "memory that grows step over step"))

    def _arm(self, rank: int, phase: str, from_step: int, why: str) -> None:
        self.add(Action(verbs.Arm(phase=phase, from_step=from_step, reason="spike"), (rank,), why))
        self.add(Action(verbs.Compose(reason="spike"), (rank,), why))


def next_step(steps: list[int]) -> int:
    """Return the step of the next spike if the last ones were evenly spaced; 0: unknown."""
    if len(steps) < 3:
        return 0
    first, second = steps[-1] - steps[-2], steps[-2] - steps[-3]
    return steps[-1] + first if first == second > 1 else 0
