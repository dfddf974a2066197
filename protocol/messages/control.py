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
    """Why, in a few words: ``not in all_gather #8841, in data loading``."""
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
    """Something a person should know, with its evidence. Sent again with the same ``id`` when it changes."""

    id: int
    kind: AlertKind
    severity: Severity
    time: Time
    title: str
    """One line, fit for a list: ``rank 1 optimizer +0.9 GiB for 4 ms``."""
    rank: Rank | None = None
    ranks: list[Rank] = []
    step: int | None = None
    phase: str = ""
    text: str = ""
    """What it means and what to do, a few sentences."""
    evidence: dict[str, Any] = {}
    resolved: Time | None = None
    """When it ended by itself; None while it stands."""
    count: int = 1
    """How often it repeated since it was raised."""


class HubStats(msgspec.Struct, tag="hub_stats", frozen=True, omit_defaults=True):
    """The monitor's own health, once in a few seconds."""

    time: Time
    pid: int
    received: int
    recorded: int
    published: int
    lost: dict[str, int] = {}
    """Messages known lost, by sender: gaps in its numbering plus those it reported as dropped."""
    unknown: int = 0
    """Messages of a type this version does not know."""
    refused: int = 0
    """Messages refused: another major version, or not decodable."""
    recording_bytes: int = 0
    recording_error: str = ""
    """Why nothing is being recorded (a full disk, say); empty: recording works."""
    cpu_percent: float = 0.0
    dropped_traces: int = 0
    """Traces of captured steps that were not analysed: too many waited, or they were none."""


class Command(msgspec.Struct, tag="command", frozen=True, omit_defaults=True):
    """A request to act. ``id`` is unique to its sender; made from a ``verbs.Verb``, and decoded to one."""

    id: str
    verb: str
    args: dict[str, Any] = {}


class Accepted(msgspec.Struct, tag="accepted", frozen=True, omit_defaults=True):
    """First answer to a command or query: it was understood and is under way, or it was refused and why."""

    id: str
    ok: bool
    text: str = ""


class Result(msgspec.Struct, tag="result", frozen=True, omit_defaults=True):
    """Last answer to a command: what happened. Recorded and published too, with the verb and who asked."""

    id: str
    ok: bool
    verb: str = ""
    text: str = ""
    data: dict[str, Any] = {}
    time: Time = 0.0


class Query(msgspec.Struct, tag="query", frozen=True, omit_defaults=True):
    """A request for history: ``name`` is a method of ``ftmon.protocol.recording.reader.Reader``, ``args`` its own."""

    id: str
    name: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, tag="answer", frozen=True, omit_defaults=True):
    """The answer to a query: ``data`` is the method's result encoded in msgpack, or ``error`` says why not."""

    id: str
    ok: bool
    data: bytes = b""
    error: str = ""
