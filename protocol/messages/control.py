"""Messages of the hub (states, alerts, statistics) and of control: commands, their two answers, history queries."""

from typing import Any, Literal

import msgspec

from .bounds import Rank, Time

RankStateName = Literal["starting", "training", "waiting", "hung", "held", "stopped", "gone", "unreachable", "finished"]
RunStateName = Literal["starting", "training", "stopping", "finished", "failed", "stopped"]
Severity = Literal["info", "warning", "error"]
AlertKind = Literal[
    "spike",
    "growth",
    "hang",
    "slow",
    "oom",
    "died",
    "dropped",
    "disk",
    "failure",
    "exit",
    "note",
    "leak",
    "health",
]


class RankState(msgspec.Struct, tag="rank_state", frozen=True, omit_defaults=True):
    """The hub's judgement of one rank, sent when it changes."""

    rank: Rank
    state: RankStateName
    time: Time
    text: str = ""
    """The reason, in a few words: ``not in all_gather #8841, in data loading``."""
    since: Time = 0.0
    pid: int = 0
    exit_code: int | None = None
    signal: int | None = None


class RunState(msgspec.Struct, tag="run_state", frozen=True, omit_defaults=True):
    """The state of the whole run, sent when it changes."""

    state: RunStateName
    time: Time
    text: str = ""
    exit_code: int | None = None

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.state in ("finished", "failed", "stopped")


class Alert(msgspec.Struct, tag="alert", frozen=True, omit_defaults=True):
    """A problem for the user's attention, with its evidence. Sent again with the same ``id`` when it changes."""

    id: int
    kind: AlertKind
    severity: Severity
    time: Time
    title: str
    """One line, for lists: ``rank 1 optimizer +0.9 GiB for 4 ms``."""
    rank: Rank | None = None
    ranks: list[Rank] = []
    step: int | None = None
    phase: str = ""
    text: str = ""
    """Meaning and advice, a few sentences."""
    evidence: dict[str, Any] = {}
    resolved: Time | None = None
    """When it was resolved; None while it is active."""
    count: int = 1
    """Number of occurrences since it was raised."""


class HubStats(msgspec.Struct, tag="hub_stats", frozen=True, omit_defaults=True):
    """The monitor's own health, sent every few seconds."""

    time: Time
    pid: int
    received: int
    recorded: int
    published: int
    lost: dict[str, int] = {}
    """Messages known to be lost, by sender: gaps in its numbering plus messages it reported as dropped."""
    unknown: int = 0
    """Messages of a type this version does not know."""
    refused: int = 0
    """Messages refused: another major version, or not decodable."""
    recording_bytes: int = 0
    recording_error: str = ""
    """Why recording fails, such as a full disk; empty: it works."""
    cpu_percent: float = 0.0
    dropped_traces: int = 0
    """Traces of captured steps that were not analysed, because too many were queued or they were invalid."""


class Command(msgspec.Struct, tag="command", frozen=True, omit_defaults=True):
    """A request to act. ``id`` is unique per sender. Encoded from a ``verbs.Verb``, and decoded to one."""

    id: str
    verb: str
    args: dict[str, Any] = {}


class Accepted(msgspec.Struct, tag="accepted", frozen=True, omit_defaults=True):
    """First answer to a command or query: it is being executed, or it was refused (``text`` gives the reason)."""

    id: str
    ok: bool
    text: str = ""


class Result(msgspec.Struct, tag="result", frozen=True, omit_defaults=True):
    """Last answer to a command: its outcome. Also recorded and published, with the verb and the sender."""

    id: str
    ok: bool
    verb: str = ""
    text: str = ""
    data: dict[str, Any] = {}
    time: Time = 0.0


class Query(msgspec.Struct, tag="query", frozen=True, omit_defaults=True):
    """A request for history: a method of ``ftmon.protocol.recording.reader.Reader``, and its arguments."""

    id: str
    name: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, tag="answer", frozen=True, omit_defaults=True):
    """The answer to a query: ``data`` is the method's result encoded in msgpack, or ``error`` has the reason."""

    id: str
    ok: bool
    data: bytes = b""
    error: str = ""
