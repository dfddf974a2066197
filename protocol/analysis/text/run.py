"""Text of alerts about a run's jobs and processes: no step, ports, actions on hangs, leftover processes."""

from collections.abc import Callable
from typing import Any

from ...text import duration, gib, kernel_sleep, ranks_in_words, sanitize
from ..findings import Finding
from ..hub_facts import (
    ConcurrentJobFacts,
    HangActionFacts,
    JobFailedFacts,
    LateExit,
    LeftoverFacts,
    LeftProcess,
    NoStepFacts,
    PortFacts,
    UnprovenHangFacts,
)
from ..stalls.verdicts import Verdict
from . import monitor
from .stalls import of_verdict
from .words import Words, sentence

DEFAULT_PORT = 29500
_LISTED = 8
_MOST_PIDS = 64
_MOST_TITLE = 240


def no_step(finding: Finding) -> Words:
    """Return the text for a run that ended without a recorded step."""
    facts: NoStepFacts = finding.facts
    if facts.error:
        source = "its output" if facts.error_rank is None else f"rank {facts.error_rank}"
        place = f", raised at {facts.error_place}" if facts.error_place else ""
        ranks = "Its ranks reported, and" if facts.ranks else "No rank reported;"
        return Words(
            f"ended before its first step: {facts.error}",
            f"{ranks} none finished an optimizer step ({facts.end}). {source}: {facts.error}{place}",
        )
    if facts.unhooked is not None and not facts.ranks:
        cause = monitor.without_hook(facts.unhooked)
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
    return Words(
        f"ended without a recorded step: {what}{last}",
        f"{sentence(f'{what} ({facts.end})')} {why}",
        "The last lines of its output may show the cause." if facts.last_lines else "",
    )


def port_taken(finding: Finding) -> Words:
    """Return the text for a port that another process listens on."""
    facts: PortFacts = finding.facts
    name = f"port {facts.port}" if facts.port else "a port"
    by = "The launcher" if facts.rank < 0 else f"Rank {facts.rank}"
    holder = f" by {sanitize(_holder(facts))}" if facts.pid is not None else ""
    free = ", no process holds it any more" if facts.port and not holder else ""
    default = (
        f" {facts.port} is the launchers' default: another training of this host has it."
        if facts.port == DEFAULT_PORT
        else ""
    )
    end = f", or end that process: kill {facts.pid}" if facts.pid else ""
    return Words(
        f"{name} is taken{holder}{free}"[:_MOST_TITLE],
        f"{by} could not listen there: {sanitize(facts.error)[:500]}.{default}",
        "Give the job another port: 'deepspeed --master_port PORT', 'torchrun --master-port PORT' (or torchrun "
        f"--standalone, which finds a free one), 'accelerate launch --main_process_port PORT'{end}.",
    )


def _holder(facts: PortFacts) -> str:
    if facts.pid:
        return f"{facts.command or 'a process'} (pid {facts.pid}, user {facts.user})"
    return f"a process of user {facts.user} whose details need root (ss -ltnp)"


def job_failed(finding: Finding) -> Words:
    """Return the text for a failed job that was not shown."""
    facts: JobFailedFacts = finding.facts
    return Words(
        f"job {facts.number} failed: {facts.error}",
        "It ran at the same time as the job that is shown; its steps and peaks are in the table of jobs.",
    )


def concurrent_job(finding: Finding) -> Words:
    """Return the text for a job that started while another one ran."""
    facts: ConcurrentJobFacts = finding.facts
    number, shown = facts.number, facts.shown
    return Words(
        f"job {number} runs at the same time as job {shown}",
        f"Both have a rank {facts.rank}. The screens, the alerts and the recorded steps are of job {shown}. Of job "
        f"{number}, ftmon only counts steps, peaks and its end until job {shown} ends ('ftmon status'); then it shows "
        f"job {number}. Both write their output to the same files.",
        "To watch both, start each with an 'ftmon run' of its own.",
    )


def leftovers(finding: Finding) -> Words:
    """Return the text for processes that could not be ended."""
    facts: LeftoverFacts = finding.facts
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


def hang_action(finding: Finding) -> Words:
    """Return the text of the hub's action on a hang."""
    facts: HangActionFacts = finding.facts
    why = hang_cause(facts.cause)
    what = "stacks saved" if facts.action == "stacks" else f"ending the run ({facts.option})"
    return Words(f"{what}: {why}", f"Stacks: {facts.stacks}." if facts.stacks else "")


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


def unproven_hang(finding: Finding) -> Words:
    """Return the text for a hang on which the hub does not act yet."""
    facts: UnprovenHangFacts = finding.facts
    return Words(
        f"{facts.option} waits for proof: {facts.missing}", f"The hang so far: {of_verdict(facts.verdict).title}."
    )


def evidence(finding: Finding) -> dict[str, Any]:
    """Return the evidence as plain values."""
    return _EVIDENCE[type(finding.facts)](finding.facts)


def _no_step_evidence(facts: NoStepFacts) -> dict[str, Any]:
    found: dict[str, Any] = {"exit_code": facts.exit_code, "ranks": facts.ranks, "last_lines": facts.last_lines}
    if facts.error:
        found |= {"error": facts.error, "error_rank": facts.error_rank, "error_place": facts.error_place}
    if facts.unhooked is not None:
        found["pid"] = facts.unhooked.pid
    return found


def _port_evidence(facts: PortFacts) -> dict[str, Any]:
    command = None if facts.command is None else sanitize(facts.command)
    return {"port": facts.port, "pid": facts.pid, "user": facts.user, "command": command}


_EVIDENCE: dict[type, Callable[[Any], dict[str, Any]]] = {
    NoStepFacts: _no_step_evidence,
    PortFacts: _port_evidence,
    JobFailedFacts: lambda facts: {"job": facts.number},
    ConcurrentJobFacts: lambda facts: {"command": facts.command},
    LeftoverFacts: lambda facts: {
        "pids": [process.pid for process in facts.processes[:_MOST_PIDS]],
        "gpu_bytes": facts.gpu_bytes,
    },
    HangActionFacts: lambda facts: {"action": facts.action, "option": facts.option, "stacks": facts.stacks},
    UnprovenHangFacts: lambda facts: {"option": facts.option, "missing": facts.missing},
}
