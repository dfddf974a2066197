"""The base of a detector that needs nothing of another one; docs/detectors.md shows how to write one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from .finding import Finding
from .kind import Kind

Handler = Callable[[Any], Sequence[Finding] | None]
"""Processes one message; returns the findings, if any."""


class Detector:
    """Finds conditions in the messages of a run. Pure: times come with messages and ticks. One instance a run."""

    kinds: ClassVar[tuple[Kind, ...]] = ()
    """The kinds of its findings."""
    replays: ClassVar[tuple[type, ...]] = ()
    """Types of messages that it also receives from the recording after a restart of the hub, to rebuild its state."""

    def handlers(self) -> Mapping[type, Handler]:
        """Return the method for each type of message that it processes."""
        return {}

    def tick(self, now: float) -> Sequence[Finding]:
        """Process elapsed time, twice a second; ``now`` is in seconds since the epoch."""
        del now
        return ()

    def rank_ended(self, rank: int) -> Sequence[Finding]:
        """Process the end of a rank's process."""
        del rank
        return ()
