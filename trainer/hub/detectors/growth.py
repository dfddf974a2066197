"""Growth: memory that the first optimizer step created and that stays. Told apart from a spike, as information.

Rule: in the first three optimizer steps of a rank that the loss scaler did not skip, the phase's ``end - start`` is at
least 16 MiB. One alert for all ranks, once a run; its size is the largest rank's.
"""

from ....protocol.control import Alert
from ....protocol.telemetry import Hello, Step
from ....protocol.text import gib
from .book import RANKS_LISTED, AlertBook, Key

GROWTH_FLOOR = 16 * 2**20
FIRST_STEPS = 3
KEY: Key = ("growth", None, "optimizer", "first-step")


class GrowthDetector:
    """Finds the growth of the first optimizer steps (rule: this module's docstring)."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._left: dict[int, int] = {}
        self._capacity = 0

    def hello(self, hello: Hello) -> None:
        """Learn the device's size, to say what share of it the growth is."""
        self._capacity = hello.device.capacity_bytes

    def step(self, t: float, step: Step) -> list[Alert]:
        """Look at one step; free after the first few."""
        left = self._left.get(step.rank, FIRST_STEPS)
        if left == 0 or step.overflow:
            return []
        self._left[step.rank] = left - 1
        record = step.phase("optimizer")
        if record is None:
            return []
        span = record.allocated
        grown = span.end - span.start
        if grown < GROWTH_FLOOR:
            return []
        self._left[step.rank] = 0
        known = self._book.get(KEY)
        before: dict[str, int] = dict(known.evidence.get("bytes_by_rank", {})) if known is not None else {}
        if len(before) < RANKS_LISTED:
            before[str(step.rank)] = grown
        largest = max(grown, known.evidence.get("growth_bytes", 0) if known is not None else 0)
        share = f" ({largest / self._capacity:.1%} of the device)" if self._capacity else ""
        return self._book.raise_alert(
            t,
            "growth",
            "info",
            f"first optimizer step +{gib(largest, 1)} that stays: the optimizer's state",
            rule="first-step",
            ranks=sorted({*(known.ranks if known is not None else []), step.rank}),
            step=step.step,
            phase="optimizer",
            text=(
                f"The first optimizer step created {gib(largest)} a rank{share} that it keeps: the moments of Adam, or "
                "what else the optimizer remembers. It is no leak and does not repeat; later steps need it, so a run "
                "that fits its first step with room for their transients goes on fitting."
            ),
            evidence={"growth_bytes": largest, "capacity_bytes": self._capacity, "bytes_by_rank": before},
            repeat=False,
        )

    def observe(self, step: Step) -> None:
        """Take in a step of the recording: this rank's first steps are over."""
        self._left[step.rank] = 0
