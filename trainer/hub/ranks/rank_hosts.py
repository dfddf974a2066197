"""Tracks the run's ranks and which of them run on this host, that is, whose messages no agent forwards."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

from ....protocol.analysis.stalls.rank_tracker import RankTracker
from ....protocol.messages.telemetry import Hello
from ....protocol.messages.wire import Message
from ....protocol.run.rundir import RunDir
from ...host.end.kill import Target
from ...host.flow import Post
from .rank_link import RankLink, identity_of


class RankHosts:
    """The latest Hello of every rank."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._hellos: dict[int, Hello] = {}
        self._away: set[int] = set()
        """Ranks whose messages an agent forwards."""
        self.senders: set[str] = set()
        """Sender names of the processes that have sent ``Hello``."""

    def register(self, hello: Hello, away: bool = False) -> None:
        """Record a rank's ``Hello``, replacing an earlier one, and whether an agent forwarded it."""
        self._hellos[hello.rank] = hello
        (self._away.add if away else self._away.discard)(hello.rank)
        self.senders.add(identity_of(hello))

    def begin_job(self) -> None:
        """Forget the ranks of the previous job; known senders are kept."""
        self._hellos.clear()
        self._away.clear()

    @property
    def ranks(self) -> list[int]:
        """All known ranks, ascending."""
        return sorted(self._hellos)

    @property
    def world_size(self) -> int:
        """World size as reported by the known ranks; 0 before the first."""
        return max((hello.world_size for hello in self._hellos.values()), default=0)

    @property
    def on_gpu(self) -> bool:
        """Whether any rank computes on a GPU."""
        return any(hello.device.kind == "cuda" for hello in self._hellos.values())

    @property
    def any_elsewhere(self) -> bool:
        """Whether any rank runs on another host, where the supervisor cannot observe it."""
        return any(not self._is_here(hello) for hello in self._hellos.values())

    def target(self, rank: int) -> Target | None:
        """Return a rank's process if it runs on this host, else None."""
        hello = self._hellos.get(rank)
        if hello is None or not self._is_here(hello):
            return None
        return Target(rank, hello.pid, hello.start_ticks)

    def targets(self) -> list[Target]:
        """Return the processes of all ranks on this host."""
        found = [self.target(rank) for rank in self.ranks]
        return [target for target in found if target is not None]

    def host_of(self, rank: int) -> str:
        """Return the host of a known rank."""
        return self._hellos[rank].host

    def _is_here(self, hello: Hello) -> bool:
        # After a restart of the hub, ranks from the history have sent nothing yet: then the host's name decides.
        return hello.rank not in self._away and hello.host == self._host


@dataclass(frozen=True)
class RankAccess:
    """The ranks of a run, the commands to them, and the stream for what they answer."""

    run: RunDir
    tracker: RankTracker
    rank_hosts: RankHosts
    link: RankLink
    emit: Callable[[Message], object]
    """Appends a message to the stream, and analyses it."""
    post: Post
    """Schedules a call in the main loop; any thread."""
