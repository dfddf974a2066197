"""The hub's own findings, made without a detector: facts, words and records.

They are about the monitor itself (recording, connections, processes without its hook) and about a run's jobs and
processes (no step, ports, actions on hangs, leftover processes).
"""

from collections.abc import Callable
from typing import Any

import msgspec

from ..messages.control import AlertKind
from ..text import duration, gib, kernel_sleep, ranks_in_words, sanitize
from .findings.alerts import RANKS_LISTED
from .findings.finding import Finding, Kind, Shown, only
from .stalls.judge import Verdict
from .stalls.words import of_verdict
from .words import Words, sentence

DEFAULT_PORT = 29500
_LISTED = 8
_MOST_PIDS = 64
_MOST_TITLE = 240


class UnhookedFacts(msgspec.Struct, frozen=True):
    """A process with PyTorch that was started without ftmon's import hook."""

    pid: int
    pythonpath: str | None  # the `PYTHONPATH` it was started with, which lacks the hook's folder; None: it had none


class NoStepFacts(msgspec.Struct, frozen=True):
    """A run that ended without a recorded step."""

    end: str  # how it ended, as in `exit.json`
    exit_code: int | None
    ranks: int  # number of ranks that reported
    error: str = ""  # the exception that ended it; empty: none found
    error_rank: int | None = None  # the rank that raised it; None: it is from the output of the job's command
    error_place: str = ""  # where it was raised
    unhooked: UnhookedFacts | None = None
    last_line: str = ""  # the last line that a rank or the command wrote; empty: unknown, or of no interest
    last_line_rank: int | None = None
    last_lines: list[str] = []  # the last lines of the command's output


class RefusedFacts(msgspec.Struct, frozen=True):
    """A sender whose messages are refused."""

    sender: str
    reason: str


class NotNotifiedFacts(msgspec.Struct, frozen=True):
    """A notification that could not be delivered."""

    target: str  # without a URL's path, which may be secret
    reason: str


class RestartFacts(msgspec.Struct, frozen=True):
    """A hub that continues for an earlier one."""

    last_recorded: float  # time of the last recorded message, seconds since the epoch
    unwatched_s: float


class DamagedRecordingFacts(msgspec.Struct, frozen=True):
    """A recording that could not be continued."""

    error: str
    moved_to: str  # name of the file that it was moved to


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
    listen: str  # address on which the hub listens


class PortFacts(msgspec.Struct, frozen=True):
    """A port that a launcher or a rank could not listen on."""

    port: int  # 0: unknown
    rank: int  # the rank that reported it; -1: the launcher
    error: str
    pid: int | None = None  # the process that listens on the port; 0: it cannot be inspected; None: there is none
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
    rank: int  # a rank number that both jobs have
    command: list[str]


class LeftProcess(msgspec.Struct, frozen=True):
    """A process that could not be ended."""

    pid: int
    name: str
    state: str  # letter of /proc/PID/stat
    kernel_function: str = ""  # the kernel function in which it waits; empty: unknown


class LeftoverFacts(msgspec.Struct, frozen=True):
    """Processes of the run that could not be ended."""

    processes: list[LeftProcess]
    gpu_bytes: dict[int, int] = {}  # GPU memory that they hold, by pid


class LateExit(msgspec.Struct, frozen=True):
    """Processes that still run after ranks have finished."""

    finished: int
    ranks: int  # number of all ranks
    after_s: float  # seconds since the last progress
    left: list[int]  # ranks whose processes are alive; empty: only the launcher's


class HangActionFacts(msgspec.Struct, frozen=True):
    """The hub's action on a hang."""

    action: str  # `stacks`, `stop` or `kill`
    option: str  # the option that requests it
    cause: Verdict | LateExit
    stacks: str  # file with the stacks of all ranks; empty: it could not be written


class UnprovenHangFacts(msgspec.Struct, frozen=True):
    """A hang on which the hub does not act yet."""

    option: str
    missing: str  # the proof that is missing (`stalls.proof`)
    verdict: Verdict


def _refused(facts: RefusedFacts) -> Words:
    return Words(f"messages of {facts.sender} are refused", facts.reason)


def _not_notified(facts: NotNotifiedFacts) -> Words:
    return Words(f"not notified: {facts.target}: {facts.reason}", "")


def _restarted(facts: RestartFacts) -> Words:
    return Words(
        "the hub was restarted", f"The run was not monitored for {facts.unwatched_s:.1f} s; training continued."
    )


def _damaged(facts: DamagedRecordingFacts) -> Words:
    return Words("the recording was damaged", f"{facts.error}. It was moved to {facts.moved_to}; a new one was begun.")


def _removed(facts: RemovedRecordingFacts) -> Words:
    return Words("the recording was removed", facts.notice)


def _not_listening(facts: NotListeningFacts) -> Words:
    return Words("not listening for other hosts", f"{facts.error}. Apps on this host are served.")


def _missing_ranks(facts: MissingRanksFacts) -> Words:
    return Words(
        f"{len(facts.missing)} of {facts.world_size} ranks have not reported",
        f"The first is rank {facts.missing[0]}. On its host ftmon must be installed in the job's environment, the "
        f"run's join.json must be readable, and the hub must be reachable at {sanitize(facts.listen, 80)} and the "
        "five ports after it.",
        "In the run's directory on that host, hosts/HOST/logs/agent.log shows which condition fails.",
    )


def _unhooked(facts: UnhookedFacts) -> Words:
    found = without_hook(facts)
    return found._replace(title=f"not watched: {found.title}")


def without_hook(facts: UnhookedFacts) -> Words:
    """Return the text for a process that cannot be recorded because ``PYTHONPATH`` was replaced."""
    given = sanitize(facts.pythonpath or "", 60)
    started = f"with PYTHONPATH={given}" if given else "without PYTHONPATH"
    remedy = f"use PYTHONPATH={given}:$PYTHONPATH" if given else "leave PYTHONPATH as it is"
    return Words(
        f"pid {facts.pid} was started {started}, so without ftmon's import hook; {remedy}",
        "The hook is a folder on PYTHONPATH, which the command has replaced; the process and what it starts are not "
        "recorded.",
    )


def _no_step(facts: NoStepFacts) -> Words:
    if facts.error:
        source = "its output" if facts.error_rank is None else f"rank {facts.error_rank}"
        place = f", raised at {facts.error_place}" if facts.error_place else ""
        ranks = "Its ranks reported, and" if facts.ranks else "No rank reported;"
        return Words(
            f"ended before its first step: {facts.error}",
            f"{ranks} none finished an optimizer step ({facts.end}). {source}: {facts.error}{place}",
        )
    if facts.unhooked is not None and not facts.ranks:
        cause = without_hook(facts.unhooked)
        return Words(
            f"ended without a recorded step: no rank reported; {cause.title}",
            f"No rank reported: {cause.title} ({facts.end}). {cause.text}",
        )
    if facts.ranks:
        what = "its ranks reported, but no finished optimizer step was received from them"
        why = (
            "The script may have ended before its first step. Steps of other processes that a rank started are not "
            "recorded. Ranks that are killed lose up to a tenth of a second of steps."
        )
    else:
        what = "no rank reported"
        why = "ftmon saw no DeepSpeed engine and no PyTorch optimizer in it."
    wrote = "it" if facts.last_line_rank is None else f"rank {facts.last_line_rank}"
    last = f"; the last line that {wrote} wrote: {facts.last_line}" if facts.last_line else ""
    remedy = "The last lines of its output may show the cause." if facts.last_lines else ""
    if facts.ranks and facts.exit_code == 0:
        remedy = "A script without an optimizer has no steps: 'ftmon memory RUN' shows what its passes held."
    return Words(f"ended without a recorded step: {what}{last}", f"{sentence(f'{what} ({facts.end})')} {why}", remedy)


def _no_step_evidence(finding: Finding) -> dict[str, Any]:
    facts: NoStepFacts = finding.facts
    found = only("exit_code", "ranks", "last_lines", *(("error", "error_rank", "error_place") if facts.error else ()))
    return found(finding) | ({"pid": facts.unhooked.pid} if facts.unhooked is not None else {})


def _port_taken(facts: PortFacts) -> Words:
    name = f"port {facts.port}" if facts.port else "a port"
    by = "The launcher" if facts.rank < 0 else f"Rank {facts.rank}"
    holder = f" by {sanitize(_holder(facts))}" if facts.pid is not None else ""
    free = ", no process holds it any more" if facts.port and not holder else ""
    default = f" {facts.port} is the launchers' default: another training of this host has it."
    end = f", or end that process: kill {facts.pid}" if facts.pid else ""
    return Words(
        f"{name} is taken{holder}{free}"[:_MOST_TITLE],
        f"{by} could not listen there: {sanitize(facts.error)[:500]}.{default if facts.port == DEFAULT_PORT else ''}",
        "Give the job another port: 'deepspeed --master_port PORT', 'torchrun --master-port PORT' (or torchrun "
        f"--standalone, which finds a free one), 'accelerate launch --main_process_port PORT'{end}.",
    )


def _port_evidence(finding: Finding) -> dict[str, Any]:
    command: str | None = finding.facts.command
    return {**only("port", "pid", "user")(finding), "command": None if command is None else sanitize(command)}


def _holder(facts: PortFacts) -> str:
    if facts.pid:
        return f"{facts.command or 'a process'} (pid {facts.pid}, user {facts.user})"
    return f"a process of user {facts.user} whose details need root (ss -ltnp)"


def _job_failed(facts: JobFailedFacts) -> Words:
    return Words(
        f"job {facts.number} failed: {facts.error}",
        "It ran at the same time as the job that is shown; its steps and peaks are in the table of jobs.",
    )


def _concurrent_job(facts: ConcurrentJobFacts) -> Words:
    number, shown = facts.number, facts.shown
    return Words(
        f"job {number} runs at the same time as job {shown}",
        f"Both have a rank {facts.rank}. The screens, the alerts and the recorded steps are of job {shown}. Of job "
        f"{number}, ftmon only counts steps, peaks and its end until job {shown} ends ('ftmon status'); then it shows "
        f"job {number}. Both write their output to the same files.",
        "To watch both, start each with an 'ftmon run' of its own.",
    )


def _leftovers(facts: LeftoverFacts) -> Words:
    count, names = len(facts.processes), [left_process(one) for one in facts.processes[:_LISTED]]
    held = sum(facts.gpu_bytes.values())
    gpu = f" They hold {gib(held)} of GPU memory." if held else ""
    return Words(
        f"{count} process{'es' if count > 1 else ''} of the run could not be ended: {names[0]}",
        f"{'; '.join(names)}.{gpu} They are watched; 'ftmon cleanup' finds them later.",
    )


def left_process(process: LeftProcess) -> str:
    """Return the state of a process that could not be ended."""
    name = f"pid {process.pid} ({sanitize(process.name, 40)})"
    if process.state == "D":
        return f"{name} is {kernel_sleep(process.kernel_function)}: it ends when the kernel returns"
    return f"{name} is still alive in state {process.state}"


def _hang_action(facts: HangActionFacts) -> Words:
    what = "stacks saved" if facts.action == "stacks" else f"ending the run ({facts.option})"
    return Words(f"{what}: {hang_cause(facts.cause)}", f"Stacks: {facts.stacks}." if facts.stacks else "")


def hang_cause(cause: Verdict | LateExit) -> str:
    """Return the reason of the hub's action."""
    if isinstance(cause, Verdict):
        return of_verdict(cause).title
    left = ranks_in_words(cause.left) if cause.left else "the launcher"
    were = "were" if len(cause.left) > 1 else "was"
    return (
        f"{cause.finished} of {cause.ranks} ranks finished, and {left} {were} still running "
        f"{duration(cause.after_s)} later"
    )


def _unproven_hang(facts: UnprovenHangFacts) -> Words:
    return Words(
        f"{facts.option} waits for proof: {facts.missing}", f"The hang so far: {of_verdict(facts.verdict).title}."
    )


def _kind(name: str, facts: type, words: Callable[[Any], Words], alert: AlertKind, rule: str, **more: Any) -> Kind:
    return Kind(name, facts, lambda facts, _: words(facts), alert, rule, **more)


KINDS = (
    _kind(
        "no_step",
        NoStepFacts,
        _no_step,
        "exit",
        "before_first_step",
        evidence=_no_step_evidence,
        shown={
            "last_recorded": Shown("last recorded", "moment"),
            "unwatched_s": Shown("not watched for", "s"),
            "notice": Shown("what happened"),
            "world_size": Shown("ranks expected"),
            "listen": Shown("address"),
            "pythonpath": Shown("PYTHONPATH"),
            "error_rank": Shown("error on", "rank"),
            "error_place": Shown("error at"),
            "gpu_bytes": Shown("GPU memory by process", "bytes", "pid"),
        },
    ),
    _kind("messages_refused", RefusedFacts, _refused, "note", "refused"),
    _kind("not_notified", NotNotifiedFacts, _not_notified, "note", "notify"),
    _kind("hub_restarted", RestartFacts, _restarted, "note", "restarted", evidence=only("last_recorded")),
    _kind("recording_damaged", DamagedRecordingFacts, _damaged, "disk", "damaged"),
    _kind("recording_removed", RemovedRecordingFacts, _removed, "disk", "removed"),
    _kind("not_listening", NotListeningFacts, _not_listening, "note", "listen"),
    _kind(
        "missing_ranks",
        MissingRanksFacts,
        _missing_ranks,
        "note",
        "unheard",
        evidence=lambda finding: {"missing": finding.facts.missing[:RANKS_LISTED]},
        resolved={"resumed": "All ranks have reported."},
    ),
    _kind(
        "unhooked",
        UnhookedFacts,
        _unhooked,
        "note",
        "unhooked",
        evidence=only("pid"),
        resolved={"resumed": "A rank has reported since."},
    ),
    _kind("port_taken", PortFacts, _port_taken, "failure", "port", evidence=_port_evidence),
    _kind(
        "job_failed",
        JobFailedFacts,
        _job_failed,
        "failure",
        "job",
        evidence=lambda finding: {"job": finding.facts.number},
    ),
    _kind("concurrent_job", ConcurrentJobFacts, _concurrent_job, "note", "beside", evidence=only("command")),
    _kind(
        "leftover_processes",
        LeftoverFacts,
        _leftovers,
        "note",
        "leftover",
        evidence=lambda finding: {
            "pids": [process.pid for process in finding.facts.processes[:_MOST_PIDS]],
            "gpu_bytes": finding.facts.gpu_bytes,
        },
        resolved={"calm": "All of them are gone now."},
    ),
    _kind("hang_action", HangActionFacts, _hang_action, "note", "on-hang", evidence=only("action", "option", "stacks")),
    _kind(
        "unproven_hang",
        UnprovenHangFacts,
        _unproven_hang,
        "note",
        "on-hang-proof",
        evidence=only("option", "missing"),
        resolved={"resumed": "The hang is over."},
    ),
)
