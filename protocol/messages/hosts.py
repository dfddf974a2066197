"""Messages about the other hosts of a run: between an agent there and the hub, and from the hub to the apps.

An agent forwards its ranks' telemetry over the ``agents`` channel. It numbers each forwarded message, and keeps it
until the hub confirms that this number is recorded.
"""

import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ProtocolError
from .telemetry import Name, Rank, Time, Whole

HostStateName = Literal["reachable", "cut off", "left"]
_NUMBERS = struct.Struct(">QQ")
_Text = Annotated[str, Meta(max_length=1024)]


class KernelKill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Evidence for or against a kill by the kernel's OOM killer."""

    sure: bool  # the kernel log names the process
    exhausted: Literal["", "group", "host"] = ""
    """The memory that ran out: the control group's limit, or the host's; empty: the evidence is against a kill."""
    name: _Text = ""  # the process's name in the kernel log
    killed_bytes: Whole = 0  # the process's anonymous resident memory according to the kernel log
    limits_bytes: Annotated[list[Whole], Meta(max_length=16)] = []  # memory limits of its control groups
    kills: Whole = 0  # out-of-memory kills counted by its control group; 0: the count is not the evidence
    recent_kills: Whole = 0  # kills counted just before it died
    resident_bytes: Whole = 0  # its resident memory at the last sample; 0: unknown


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one rank's process from an agent, at most a second old."""

    rank: Rank
    pid: Whole
    start_ticks: Whole
    alive: bool  # the process (pid and start time) exists and is not a zombie
    proc_state: str = ""  # the state letter of /proc/PID/stat
    exit_code: Whole | None = None
    signal: Whole | None = None
    kernel_kill: KernelKill | None = None
    """For a process ended by SIGKILL: evidence for or against the kernel's OOM killer, from its host."""


class AgentBeat(msgspec.Struct, tag="agent_beat", frozen=True, omit_defaults=True):
    """An agent's heartbeat: sent once a second, and when the state of a rank's process changed."""

    host: str
    pid: Whole
    start_ticks: Whole
    version: str
    time: Time  # seconds since the epoch on the agent's clock
    processes: list[ProcessState] = []
    waiting: Whole = 0  # messages that the hub has not confirmed
    waiting_bytes: Whole = 0
    dropped: Whole = 0  # messages dropped because too many were waiting
    clock_offset: float | None = None  # seconds to add to this host's clock to get the hub's; None until it is measured
    round_trip: float | None = None
    """Round-trip time in seconds of the offset's measurement; the offset's error is at most half of it."""
    leaving: bool = False  # the agent is about to end; this is its last message
    boot_id: str = ""  # boot id of the host: distinguishes hosts of the same name


class AgentAck(msgspec.Struct, tag="agent_ack", frozen=True, omit_defaults=True):
    """The hub's acknowledgement to an agent: sent for each beat, and when more of its messages are on disk."""

    number: Whole  # all messages up to this number of the agent are recorded
    time: Time  # seconds since the epoch on the hub's clock
    beat: float = 0.0  # `time` of the beat that is answered; 0: none
    over: bool = False  # the run is over: the agent ends the remaining processes on its host, then itself
    grace: float = 0.0  # if the run is over: seconds that remaining processes have to end by themselves


class HostState(msgspec.Struct, tag="host", frozen=True, omit_defaults=True):
    """State of another host of the run, as known to the hub; sent when it changes."""

    host: str
    state: HostStateName  # `cut off`: no message from its agent for some seconds; `left`: its agent announced its end
    time: Time
    rank: Rank = -1  # the lowest rank there; -1: none known yet
    ranks: list[Rank] = []
    text: str = ""
    since: Time = 0.0
    version: str = ""  # version of ftmon there
    clock_offset: float | None = None  # seconds to add to that host's times to get the hub's
    round_trip: float | None = None
    dropped: Whole = 0  # total messages dropped by its agent; gaps in the senders' numbering show which


def encode_numbers(number: int, oldest: int) -> bytes:
    """Encode the first frame of a forwarded message: its number, and the oldest number that its agent still keeps."""
    return _NUMBERS.pack(number, oldest)


def decode_numbers(frame: bytes) -> tuple[int, int]:
    """Decode a frame of ``encode_numbers``; raise ``ProtocolError`` if it has another size."""
    try:
        return _NUMBERS.unpack(frame)
    except struct.error:
        raise ProtocolError("not the numbers of a message that was passed on") from None


JobStateName = Literal["starting", "training", "finished", "failed", "stopped", "ended"]
"""``ended``: its processes are gone, and how they ended is unknown."""
OVER = ("finished", "failed", "stopped", "ended")  # states of a job that has ended


class JobPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """One phase of one rank over a whole job."""

    name: str
    allocated_peak: Whole  # highest allocated bytes
    reserved_peak: Whole
    resident_peak: Whole | None = None  # highest resident set size (CPU only)
    peak_step: Whole = 0
    """The step of the highest peak (of the resident set where it is measured, else of allocated memory)."""
    host_us: Whole = 0  # host time, summed over the job's steps

    @property
    def peak(self) -> int:
        """Highest peak of the resident set where it is measured, else of allocated memory."""
        return self.resident_peak if self.resident_peak is not None else self.allocated_peak


class JobRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank of a job."""

    rank: Rank
    pid: Whole
    start_ticks: Whole
    host: Name = ""
    step: Whole = 0  # the last step it finished
    steps: Whole = 0  # steps it finished in this job
    host_us: Whole = 0  # host time of those steps
    loss: float | None = None  # the last step's loss
    state: str = ""  # its final state in this job; empty while the job runs
    text: str = ""  # reason of that state, in a few words
    exit_code: int | None = None
    signal: int | None = None
    phases: list[JobPhase] = []

    @property
    def peak_phase(self) -> JobPhase | None:
        """The phase with the highest peak; None before the first step."""
        return max(self.phases, key=lambda phase: phase.peak, default=None)

    @property
    def peak(self) -> int:
        """That peak; 0 before the first step."""
        return max((phase.peak for phase in self.phases), default=0)


class Job(msgspec.Struct, tag="job", frozen=True, omit_defaults=True):
    """One job of a run: sent at its start, every few seconds while it makes steps, and at its end.

    A job is one process group of ranks, with its own steps, peaks, loss and end. A driver script that starts
    ``deepspeed`` once per configuration has one job per start, and ``torchrun --max-restarts`` has one job per attempt.
    The hub numbers jobs from 1 in the order in which their first rank reported.
    """

    number: Whole  # 1 for the run's first job
    time: Time
    state: JobStateName
    started: Time  # when its first rank reported
    ended: Time | None = None
    text: str = ""  # why it failed, in a few words
    world_size: Whole = 0
    restart: Whole = 0  # number of the restart by `torchrun --max-restarts`; 0 for the first attempt
    argv: list[str] = []  # the command line of its lowest rank
    model: str = ""
    shown: bool = True
    """True: its telemetry is in the stream. False: it ran at the same time as that job, and is only counted."""
    first_step: Whole = 0
    step: Whole = 0  # the last step that every rank has finished
    steps: Whole = 0  # optimizer updates of the rank that made most
    loss: float | None = None  # mean over ranks of the last loss
    step_us: Whole = 0  # mean host time of a step, without the first step if there are others
    ranks: list[JobRank] = []
    failed_rank: Rank | None = None  # the rank that failed first; None: none, or unknown

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in OVER

    @property
    def peak_rank(self) -> JobRank | None:
        """The rank with the highest peak; None before the first step."""
        return max((rank for rank in self.ranks if rank.phases), key=lambda rank: rank.peak, default=None)

    @property
    def allocated_peak(self) -> int:
        """Highest allocated bytes of any rank."""
        return max((phase.allocated_peak for rank in self.ranks for phase in rank.phases), default=0)

    @property
    def reserved_peak(self) -> int:
        """Highest reserved bytes of any rank."""
        return max((phase.reserved_peak for rank in self.ranks for phase in rank.phases), default=0)

    @property
    def peak(self) -> int:
        """Highest peak (``JobPhase.peak``) of any rank; 0 before the first step."""
        return max((rank.peak for rank in self.ranks), default=0)
