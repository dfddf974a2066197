"""Facts of failures and deaths; ``deaths.words`` puts them into words."""

import msgspec

from ...messages.hosts import KernelKill


class HostPressure(msgspec.Struct, frozen=True):
    """Use of a host's memory, or its control group's."""

    age_s: float
    """Seconds between the measurement and the death."""
    used_bytes: int
    total_bytes: int
    rank_bytes: int
    """Memory of the rank itself."""


class ScriptFailure(msgspec.Struct, frozen=True):
    """An uncaught exception of a script."""

    error: str
    traceback: str
    log: list[str]
    """The rank's last lines."""
    peer_killed: bool = False
    """Whether the lost peer was ended on request."""


class EndedEarly(msgspec.Struct, frozen=True):
    """Ranks whose script ended without an error before another rank lost its connection to them."""

    last_steps: dict[int, int]
    """The last step of each rank that ended."""
    lost: int
    """The rank that lost the connection."""
    error: str
    traceback: str
    log: list[str]


class ProcessDeath(msgspec.Struct, frozen=True):
    """A process that ended without sending ``Goodbye``."""

    pid: int
    exit_code: int | None
    signal: int | None
    state: str
    """The rank's state."""
    log: list[str]
    asked: bool = False
    """Whether its end was requested."""
    kernel_kill: KernelKill | None = None
    pressure: HostPressure | None = None
    alone: bool = False
    """Whether the run has no other rank."""
    reason: str = ""
    """The reason in its output for which native code aborted it; empty: none, or another ending."""
    generating: bool = False
    """Whether it, or a rank that lost its connection to it, was generating."""

    @property
    def by_signal(self) -> int | None:
        """The signal that ended it, from either form of exit status."""
        return self.signal or (-self.exit_code if self.exit_code is not None and self.exit_code < 0 else None)


class LauncherEnded(msgspec.Struct, frozen=True):
    """A job's command that ended before its ranks."""

    exit_code: int | None
    """Negative for a signal; None: it was never started."""
    left: int
    """Number of processes that it left running."""
    processes: list[str]


class Ended(msgspec.Struct, frozen=True):
    """Added later: exit status of the process; both None: unknown."""

    exit_code: int | None
    signal: int | None

    @property
    def is_known(self) -> bool:
        """Return whether the exit status is known."""
        return self.exit_code is not None or self.signal is not None


class LastLog(msgspec.Struct, frozen=True):
    """Added: the rank's last lines, once all have arrived."""

    log: list[str]


class Follower(msgspec.Struct, frozen=True):
    """A rank that failed or ended because another rank did."""

    after_s: float
    events: list[Ended | str]
    """Its exceptions, then its end."""


class Followed(msgspec.Struct, frozen=True):
    """Added later: consequences, by rank."""

    followers: dict[int, Follower]
