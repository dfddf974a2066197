"""Messages about the other hosts of a run: between an agent there and the hub, and from the hub to the apps.

An agent forwards its ranks' telemetry over the ``agents`` channel. Each forwarded message has a number of the agent's
own, and is kept by the agent until the hub confirms that this number is recorded.
"""

import struct
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ProtocolError
from .bounds import Rank, Time, Whole

HostStateName = Literal["reachable", "cut off", "left"]

_NUMBERS = struct.Struct(">QQ")
_Text = Annotated[str, Meta(max_length=1024)]


class KernelKill(msgspec.Struct, frozen=True, omit_defaults=True):
    """Evidence for or against a kill by the kernel's OOM killer."""

    sure: bool
    """The kernel log names the process."""
    exhausted: Literal["", "group", "host"] = ""
    """The memory that ran out: the control group's limit, or the host's; empty: the evidence is against a kill."""
    name: _Text = ""
    """The process's name in the kernel log."""
    killed_bytes: Whole = 0
    """Its anonymous resident memory according to the kernel log."""
    limits_bytes: Annotated[list[Whole], Meta(max_length=16)] = []
    """Memory limits of its control groups."""
    kills: Whole = 0
    """Out-of-memory kills that its control group counts; 0: not the evidence."""
    recent_kills: Whole = 0
    """Those of them just before it died."""
    resident_bytes: Whole = 0
    """Its resident memory at the last sample; 0: unknown."""


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of one rank's process from an agent, at most a second old."""

    rank: Rank
    pid: Whole
    start_ticks: Whole
    alive: bool
    """The very process (pid and start time) exists and is no zombie."""
    proc_state: str = ""
    """The state letter of /proc/PID/stat."""
    exit_code: Whole | None = None
    signal: Whole | None = None
    kernel_kill: KernelKill | None = None
    """Of a process that SIGKILL ended: what is known there of the kernel's part in it."""


class AgentBeat(msgspec.Struct, tag="agent_beat", frozen=True, omit_defaults=True):
    """An agent's introduction and sign of life: once a second, and when a process of its ranks changed."""

    host: str
    pid: Whole
    start_ticks: Whole
    version: str
    time: Time
    """Seconds since the epoch on the agent's clock."""
    processes: list[ProcessState] = []
    waiting: Whole = 0
    """Messages that the hub has not confirmed."""
    waiting_bytes: Whole = 0
    dropped: Whole = 0
    """Messages given up because too many were waiting."""
    clock_offset: float | None = None
    """Seconds to add to this host's clock to get the hub's; None before it was measured."""
    round_trip: float | None = None
    """Seconds a question and its answer took when the offset was measured: it is known to half of that."""
    leaving: bool = False
    """Its last word: it ends now."""
    boot_id: str = ""
    """That host's boot: identifies one of two hosts of the same name."""


class AgentAck(msgspec.Struct, tag="agent_ack", frozen=True, omit_defaults=True):
    """The hub's word to an agent: an answer to each beat, and whenever more of its messages are on disk."""

    number: Whole
    """Everything up to this number of the agent's is recorded."""
    time: Time
    """Seconds since the epoch on the hub's clock."""
    beat: float = 0.0
    """``time`` of the beat that is answered; 0 where none is."""
    over: bool = False
    """The run is over: the agent ends what is left of it on its host, and itself."""
    grace: float = 0.0
    """When it is over: seconds in which what is left may still end by itself."""


class HostState(msgspec.Struct, tag="host", frozen=True, omit_defaults=True):
    """Another host of the run, as the hub sees it; sent when it changes."""

    host: str
    state: HostStateName
    """``cut off``: no message of its agent for some seconds; ``left``: its agent announced its end."""
    time: Time
    rank: Rank = -1
    """The lowest rank there; -1 before any is known."""
    ranks: list[Rank] = []
    text: str = ""
    since: Time = 0.0
    version: str = ""
    """Version of ftmon there."""
    clock_offset: float | None = None
    """Seconds to add to that host's times to get the hub's."""
    round_trip: float | None = None
    dropped: Whole = 0
    """Messages that its agent gave up, in all; the numbering of their senders shows which."""


def encode_numbers(number: int, oldest: int) -> bytes:
    """Encode the first frame of a message passed on: its number, and the oldest number its agent still holds."""
    return _NUMBERS.pack(number, oldest)


def decode_numbers(frame: bytes) -> tuple[int, int]:
    """Decode what ``encode_numbers`` made.

    Raises:
        ProtocolError: it is nothing of that kind.
    """
    try:
        return _NUMBERS.unpack(frame)
    except struct.error:
        raise ProtocolError("not the numbers of a message that was passed on") from None
