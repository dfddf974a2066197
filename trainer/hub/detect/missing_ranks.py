"""Detects ranks that never report; with several hosts, the usual cause is an agent without a connection."""

from ....protocol.analysis.findings import Finding
from ....protocol.analysis.findings.finding import Condition, Resolution, resolved
from ....protocol.analysis.hub_facts import MissingRanksFacts
from ..analyses.analysis import Analysis
from ..ranks.rank_hosts import RankHosts

PATIENCE_SECONDS = 60.0
"""Maximum delay between the first and the last rank's report; hosts start at different speeds."""


class MissingRanks:
    """Raises a note while ranks are missing. Main loop only.

    Args:
        analysis: raises and resolves it.
        rank_hosts: the ranks that have reported.
        listen: address on which the hub listens for other hosts; empty: none, then nothing is raised.
    """

    def __init__(self, analysis: Analysis, rank_hosts: RankHosts, listen: str) -> None:
        self._analysis = analysis
        self._rank_hosts = rank_hosts
        self._listen = listen
        self._since: float | None = None
        self._reported = False

    def tick(self, now: float) -> None:
        """Check whether all have reported; ``now`` is ``time.monotonic``."""
        heard, world = len(self._rank_hosts.ranks), self._rank_hosts.world_size
        if not self._listen or not heard:
            return
        if self._since is None:
            self._since = now
        missing = [rank for rank in range(world) if rank not in self._rank_hosts.ranks] if heard < world else []
        if missing and not self._reported and now - self._since > PATIENCE_SECONDS:
            self._reported = True
            self._analysis.put(Finding("missing_ranks", MissingRanksFacts(missing, world, self._listen)))
        elif self._reported and not missing:
            self._reported = False
            self._analysis.put(resolved(Condition("missing_ranks"), Resolution("resumed")))
