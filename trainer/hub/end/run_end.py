"""Sequence from the end of the job to the end of the hub: receive remaining messages, publish the end, wait for apps.

``EndDetector`` finds whether and how the run ended; ``RunEnd`` decides when the hub may exit.
"""

from collections.abc import Callable

from ....protocol.run.rundir import ExitFile
from ..ranks.agents import BACK_SECONDS, Agents

LINGER_SECONDS = 3.0
"""Seconds that the hub stays after the end, so that apps receive it and can query the rest."""
SETTLE_SECONDS = 1.25
"""Delay after a failure, so that the ranks' deaths are judged in their order before the end is published."""
AGENTS_END_SECONDS = 10.0
"""Time limit for agents to end their hosts' processes and send their last messages, if a run did not finish."""
AGENTS_FINISH_SECONDS = 45.0
"""The same if the run finished: another host's part of the job may still be saving."""


class RunEnd:
    """Ends a run in steps. Main loop only.

    Args:
        agents: receive the run's end, and may send remaining messages.
        poll: returns the job's end, or None while it is running.
        finish: receives the messages in flight, then appends the end; called once.
        busy: returns whether the hub should stay because of work in progress; its argument is ``time.monotonic``.
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
        self._finished = False
        self._leave_at: float | None = None

    def tick(self, now: float) -> bool:
        """Advance the sequence once the run has ended; True if the hub may exit. ``now`` is ``time.monotonic``."""
        if self._end is None:
            self._end = self._poll()
            if self._end is not None:
                self._begin(self._end, now)
        if self._end is None or now < self._finish_at or (now < self._agents_until and self._agents.reachable()):
            return False
        if not self._finished:
            self._finished = True
            self._finish(self._end)
            return False
        if self._leave_at is None:  # from now on: to finish may have taken longer than that
            self._leave_at = now + LINGER_SECONDS
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
