"""Facts of the hub's own findings, made without a detector; ``analysis.text`` turns them into text."""

import msgspec

from .stalls.verdicts import Verdict


class UnhookedFacts(msgspec.Struct, frozen=True):
    """A process with PyTorch that was started without ftmon's import hook."""

    pid: int
    pythonpath: str | None
    """The ``PYTHONPATH`` it was started with, which lacks the hook's folder; None: it had none."""


class NoStepFacts(msgspec.Struct, frozen=True):
    """A run that ended without a recorded step."""

    end: str
    """How it ended, as in ``exit.json``."""
    exit_code: int | None
    ranks: int
    """Number of ranks that reported."""
    error: str = ""
    """The exception that ended it; empty: none found."""
    error_rank: int | None = None
    """The rank that raised it; None: it is from the output of the job's command."""
    error_place: str = ""
    """Where it was raised."""
    unhooked: UnhookedFacts | None = None
    last_line: str = ""
    """The last line that a rank or the command wrote; empty: unknown, or of no interest."""
    last_line_rank: int | None = None
    last_lines: list[str] = []
    """The last lines of the command's output."""


class RefusedFacts(msgspec.Struct, frozen=True):
    """A sender whose messages are refused."""

    sender: str
    reason: str


class NotNotifiedFacts(msgspec.Struct, frozen=True):
    """A notification that could not be delivered."""

    target: str
    """Without a URL's path, which may be secret."""
    reason: str


class RestartFacts(msgspec.Struct, frozen=True):
    """A hub that continues for an earlier one."""

    last_recorded: float
    """Time of the last recorded message, seconds since the epoch."""
    unwatched_s: float


class DamagedRecordingFacts(msgspec.Struct, frozen=True):
    """A recording that could not be continued."""

    error: str
    moved_to: str
    """Name of the file that it was moved to."""


class RemovedRecordingFacts(msgspec.Struct, frozen=True):
    """A recording whose file was removed during the run."""

    notice: str


class NotListeningFacts(msgspec.Struct, frozen=True):
    """A hub that cannot listen for other hosts."""

    error: str


class MissingRanksFacts(msgspec.Struct, frozen=True):
    """Ranks that have not reported."""

    missing: list[int]
    world_size: int
    listen: str
    """Address on which the hub listens."""


class PortFacts(msgspec.Struct, frozen=True):
    """A port that a launcher or a rank could not listen on."""

    port: int
    """0: unknown."""
    rank: int
    """The rank that reported it; -1: the launcher."""
    error: str
    pid: int | None = None
    """The process that listens on the port; 0: it cannot be inspected; None: there is none."""
    user: str | None = None
    command: str | None = None


class JobFailedFacts(msgspec.Struct, frozen=True):
    """A job that ran concurrently with the shown one and failed."""

    number: int
    error: str


class ConcurrentJobFacts(msgspec.Struct, frozen=True):
    """A job that started while another one was shown."""

    number: int
    shown: int
    rank: int
    """A rank number that both jobs have."""
    command: list[str]


class LeftProcess(msgspec.Struct, frozen=True):
    """A process that could not be ended."""

    pid: int
    name: str
    state: str
    """Letter of /proc/PID/stat."""
    kernel_function: str = ""
    """The kernel function in which it waits; empty: unknown."""


class LeftoverFacts(msgspec.Struct, frozen=True):
    """Processes of the run that could not be ended."""

    processes: list[LeftProcess]
    gpu_bytes: dict[int, int] = {}
    """GPU memory that they hold, by pid."""


class LateExit(msgspec.Struct, frozen=True):
    """Processes that still run after ranks have finished."""

    finished: int
    ranks: int
    """Number of all ranks."""
    after_s: float
    """Seconds since the last progress."""
    left: list[int]
    """Ranks whose processes are alive; empty: only the launcher's."""


class HangActionFacts(msgspec.Struct, frozen=True):
    """The hub's action on a hang."""

    action: str
    """``stacks``, ``stop`` or ``kill``."""
    option: str
    """The option that requests it."""
    cause: Verdict | LateExit
    stacks: str
    """File with the stacks of all ranks; empty: it could not be written."""


class UnprovenHangFacts(msgspec.Struct, frozen=True):
    """A hang on which the hub does not act yet."""

    option: str
    missing: str
    """The proof that is missing (``stalls.proof``)."""
    verdict: Verdict
