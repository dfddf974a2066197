"""From the end of the job to the end of the hub: the rest is taken in, then the end is told, then apps are waited for.

``EndDetector`` finds whether and how the run ended; ``RunEnd`` decides when the hub may leave.
"""

from collections.abc import Callable

from ...protocol.rundir import ExitFile
from .agents import BACK_SECONDS, Agents

LINGER_SECONDS = 3.0
"""How long the hub stays after the end, so that apps see it and can ask for the rest."""
SETTLE_SECONDS = 1.25
"""After a failure the deaths of the ranks are judged in their order before the end is told."""
AGENTS_END_SECONDS = 10.0
"""How long agents may take to end what is left on their hosts and to send the rest, when a run did not finish."""
AGENTS_FINISH_SECONDS = 45.0
"""The same when it has finished: on another host a job of its own may still be saving."""


class RunEnd:
    """Sees a run through its end. Main loop only.

    Args:
        agents: are told that the run is over, and may send the rest.
        look: returns how the job ended, or None while it goes on.
        finish: takes in what is still on its way, then says how the job ended; called once.
        busy: tells whether something is under way for which the hub should stay (``time.monotonic``).
    """

    def __init__(
        self,
        agents: Agents,
        poll: Callable[[], ExitFile | None],
        finish: Callable[[ExitFile], None],
        busy: Callable[[float], bool],
    ) -> None:
        self._agents = agents
        self._poll = poll
        self._finish = finish
        self._busy = busy
        self._end: ExitFile | None = None
        self._finish_at = 0.0
        self._agents_until = 0.0
        self._missed_until = 0.0
        self._leave_at: float | None = None

    def tick(self, now: float) -> bool:
        """Go on with the end where there is one; True when the hub may leave. ``now`` is ``time.monotonic``."""
        if self._end is None:
            self._end = self._poll()
            if self._end is not None:
                self._begin(self._end, now)
        if self._end is None or now < self._finish_at or (now < self._agents_until and self._agents.reachable()):
            return False
        if self._leave_at is None:
            self._leave_at = now + LINGER_SECONDS
            self._finish(self._end)
            return False
        if now < self._leave_at or self._busy(now):
            return False
        return now >= self._missed_until or not self._agents.missed()

    def _begin(self, end: ExitFile, now: float) -> None:
        clean = end.state == "finished"
        self._finish_at = now + (SETTLE_SECONDS if end.state == "failed" else 0.0)
        self._agents_until = now + (AGENTS_FINISH_SECONDS if clean else AGENTS_END_SECONDS)
        self._missed_until = now + BACK_SECONDS
        self._agents.run_is_over(AGENTS_FINISH_SECONDS - AGENTS_END_SECONDS if clean else SETTLE_SECONDS)
