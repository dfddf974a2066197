"""What the hub holds each rank, and the run, to be doing: fed with messages and with facts about processes."""

import msgspec


class ProcessFact(msgspec.Struct, frozen=True):
    """What the supervisor saw of one rank's process, at most a second ago.

    A fact about another process than the one the rank's Hello named (``pid`` and ``start_ticks``) is ignored.
    """

    rank: int
    pid: int
    start_ticks: int
    alive: bool
    """The very process (pid and start time) exists and is no zombie."""
    proc_state: str = ""
    """The state letter of /proc/PID/stat (proc(5)): R S D T t Z X; empty when it could not be read."""
    exit_code: int | None = None
    """Exit code, when the process has ended and its parent told us."""
    signal: int | None = None
    """The signal that ended it, likewise."""
