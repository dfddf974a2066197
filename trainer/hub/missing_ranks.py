"""Detects ranks that never report; with several hosts, the usual cause is an agent without a connection."""

from ...protocol.text import sanitize
from .analysis import Analysis
from .rank_hosts import RankHosts

PATIENCE_SECONDS = 60.0
"""Maximum delay between the first and the last rank's report; hosts start at different speeds."""


class MissingRanks:
    """Raises a note while ranks are missing. Main loop only.

    Args:
        analysis: raises and resolves it.
        rank_hosts: the ranks that have reported.
        listen: address on which the hub listens for other hosts; empty: none, and nothing is raised.
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
            self._analysis.alert(
                "note",
                "warning",
                f"{len(missing)} of {world} ranks are not heard of",
                "unheard",
                f"The first is rank {missing[0]}. On its host ftmon must be installed in the job's environment, the "
                f"run's join.json must be at hand, and the hub must be reachable at {sanitize(self._listen, 80)} and "
                "the five ports after it. agent.log of that host's own directory says which of these fails.",
                missing=missing[:64],
            )
        elif self._reported and not missing:
            self._reported = False
            self._analysis.resolve("note", "unheard", "All are heard now.")
