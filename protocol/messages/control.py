"""Messages of the hub (states, alerts, statistics) and of control: commands, their two answers, history queries."""

from signal import Signals
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from ..errors import UsageError
from .telemetry import PHASES, Name, Rank, SelfDump, Time, Whole

RankStateName = Literal["starting", "training", "waiting", "hung", "held", "stopped", "gone", "unreachable", "finished"]
RunStateName = Literal["starting", "training", "stopping", "finished", "failed", "stopped"]
Severity = Literal["info", "warning", "error"]
AlertKind = Literal[
    "spike", "growth", "hang", "slow", "oom", "died", "dropped", "disk", "failure", "exit", "note", "leak", "health",
]  # fmt: skip


class RankState(msgspec.Struct, tag="rank_state", frozen=True, omit_defaults=True):
    """The hub's judgement of one rank, sent when it changes."""

    rank: Rank
    state: RankStateName
    time: Time
    text: str = ""  # the reason, in a few words: `not in all_gather #8841, in data loading`
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
    title: str  # one line, for lists: `rank 1 optimizer +0.9 GiB for 4 ms`
    rank: Rank | None = None
    ranks: list[Rank] = []
    step: int | None = None
    phase: str = ""
    text: str = ""  # meaning and advice, a few sentences
    evidence: dict[str, Any] = {}
    resolved: Time | None = None  # when it was resolved; None while it is active
    count: int = 1  # number of occurrences since it was raised


class HubStats(msgspec.Struct, tag="hub_stats", frozen=True, omit_defaults=True):
    """The monitor's own health, sent every few seconds."""

    time: Time
    pid: int
    received: int
    recorded: int
    published: int
    lost: dict[str, int] = {}
    """Messages known to be lost, by sender: gaps in its numbering plus messages it reported as dropped."""
    unknown: int = 0  # messages of a type this version does not know
    refused: int = 0  # messages refused: another major version, or not decodable
    recording_bytes: int = 0
    recording_error: str = ""  # why recording fails, such as a full disk; empty: it works
    cpu_percent: float = 0.0
    dropped_traces: int = 0
    """Traces of captured steps that were not analysed, because too many were queued or they were invalid."""


class ExporterState(msgspec.Struct, tag="exporter", frozen=True, omit_defaults=True):
    """An exporter's own state, sent to the hub every ten seconds and when ``error`` changes."""

    target: Name  # `metrics`, or a target of `--report-to`
    time: Time
    dropped: Whole = 0  # points that did not reach the target since the exporter started: it was slow, or refused them
    missed: Whole = 0  # messages of the hub that did not reach the exporter
    error: str = ""  # why the target accepts nothing, without keys; empty: it does


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


# ``Meta.description`` completes "NAME must be ..." in the refusal of a wrong value.
_Rank = Annotated[int, Meta(description="a rank's number")]
_Ranks = Annotated[list[int], Meta(description="a list of numbers")]
_Step = Annotated[int, Meta(ge=0, description="a step's number")]
_Flag = Annotated[bool, Meta(description="true or false")]
_Text = Annotated[str, Meta(description="text")]
_Signal = Annotated[str, Meta(pattern=r"^((SIG)?(INT|TERM|KILL))?\Z", description="INT, TERM or KILL")]
_Phase = Annotated[str, Meta(pattern=rf"^({'|'.join(PHASES)})?\Z", description=f"empty or one of {', '.join(PHASES)}")]
_Steps = Annotated[int, Meta(ge=1, le=3, description="1, 2 or 3")]
_Code = Annotated[str, Meta(max_length=100_000, description="text of at most 100,000 characters")]
_Targets = Annotated[
    list[tuple[int, int, int, SelfDump | None]], Meta(description="a list of [rank, pid, start ticks, self dump]")
]


class Verb(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of the verbs of commands: a verb's fields are the arguments, encoded as ``Command.args``.

    A receiver decodes a command once, with the tuple of verbs that it accepts. Unknown arguments are ignored, because a
    newer sender may have more.
    """

    @property
    def name(self) -> str:
        """``Command.verb``."""
        return name_of(type(self))

    def command(self, number: str) -> Command:
        """Return the command of this verb whose id is ``number``."""
        return Command(number, self.name, msgspec.to_builtins(self))


class OnRanks(Verb, frozen=True):
    """Base of the verbs that concern ranks."""

    ranks: _Ranks = []  # the ranks; empty for all


class Kill(OnRanks, frozen=True):
    """Saves stacks, then signals processes and their descendants; to an agent, those on its host."""

    signal: _Signal = ""  # `INT`, `TERM` or `KILL`, with or without `SIG`; empty to go through all three
    on_gpu: _Flag = False  # to an agent only: the ranks use GPUs, so check that their memory is free afterwards
    reason: _Text = ""  # why the hub itself ends the run; such a command is only recorded

    @property
    def number(self) -> Signals | None:
        """The signal to send; None to escalate."""
        return Signals[f"SIG{self.signal.removeprefix('SIG')}"] if self.signal else None


class Stop(Verb, frozen=True):
    """Has the trainer save a checkpoint and end after a step; to an agent: interrupts the ranks on its host."""

    step: _Step = 0  # to a rank: the step to stop after; 0: the ranks of the host agree on one
    reason: _Text = ""  # why the hub or the launcher ends the run; such a command is only recorded


class Stacks(OnRanks, frozen=True):
    """Has ranks send their Python stacks."""

    reason: _Text = ""  # `reason` of the `stacks` messages
    native: _Flag = False  # to the hub: also native frames, where py-spy is installed
    calls: _Flag = False  # to a rank: also return the collectives it entered and the lock file it waits for
    activity: _Flag = False  # to a rank: also return its process's activity
    quiet: _Flag = False  # to a rank: return them only in the result, without a `stacks` message


class Snapshot(OnRanks, frozen=True):
    """Has ranks write a memory snapshot."""

    reason: _Text = "asked"  # `reason` of the `snapshot` messages


class Identify(Verb, frozen=True):
    """Has a rank send its hello again."""


class Ping(Verb, frozen=True):
    """Proves that the receiver answers."""


class Shutdown(Verb, frozen=True):
    """Ends only the hub; the ranks continue to train."""


class Arm(OnRanks, frozen=True):
    """Records Python stacks of allocations."""

    phase: _Phase = ""  # a phase; empty for the whole step
    steps: _Steps = 1  # number of steps, 1 to 3
    from_step: _Step = 0  # not before this step; 0: the next one
    reason: _Text = "asked"  # `asked`, `spike`, `leak` (searches for memory that stays allocated) or `oom`


class Release(OnRanks, frozen=True):
    """Releases ranks that are held at an out-of-memory error."""


class Console(Verb, frozen=True):
    """Runs code in the failing frame of a held rank."""

    code: _Code  # code in Python, at most 100,000 characters
    rank: _Rank = -1  # the rank


class Compose(OnRanks, frozen=True):
    """Captures the next step."""

    reason: _Text = "asked"  # `asked`, `spike` or `leak`


class Look(Verb, frozen=True):
    """Has an agent inspect ranks of its host."""

    targets: _Targets = []  # rank, process id, start ticks and `self_dump` of each
    silent: _Ranks = []  # ranks to signal, so that they write their stacks


ALL = (Kill, Stop, Stacks, Snapshot, Identify, Ping, Shutdown, Arm, Release, Console, Compose, Look)
"""Every verb, in the order of docs/protocol.md."""
HUB = (Kill, Stop, Stacks, Snapshot, Ping, Shutdown, Arm, Release, Console, Compose)  # what a hub accepts from apps
RANK = (Stop, Stacks, Snapshot, Identify, Ping, Arm, Release, Console, Compose)  # what a rank accepts from its hub
AGENT = (Kill, Stop, Ping, Look)  # what an agent accepts from its hub
READ_ONLY = ("ping",)  # names of the verbs that a read-only hub accepts
V = TypeVar("V", bound=Verb)


def name_of(kind: type[Verb]) -> str:
    """Return ``Command.verb`` for a verb."""
    return kind.__name__.lower()


def decode(command: Command, known: tuple[type[V], ...]) -> V:
    """Decode a command to one of the ``known`` verbs; raise ``UsageError`` for another verb or a wrong argument.

    An argument that is nil counts as absent.
    """
    kind = next((kind for kind in known if name_of(kind) == command.verb), None)
    if kind is None:
        raise UsageError(f"unknown command {command.verb[:40]!r}; known here: {', '.join(map(name_of, known))}")
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = command.args.get(field.name)
        if value is None and not field.required:
            continue
        try:
            found[field.name] = msgspec.convert(value, field.type, strict=False)  # 1 for true, "3" for 3
        except msgspec.ValidationError:
            must = get_args(field.type)[1].description
            raise UsageError(f"{command.verb}: {field.name} must be {must}, not {repr(value)[:40]}") from None
    return kind(**found)
