"""Text of failures and deaths."""

import signal as signals
from typing import Any

import msgspec

from ...messages.hosts import KernelKill
from ...run.end import ending_in_words, exhausted_memory, signal_name
from ...text import counted, duration, first_line, gib, ranks_in_words, sanitize
from ..findings.alerts import RANKS_LISTED
from ..findings.finding import Finding, Kind, Shown, only
from ..words import Added, Words, sentence, stop
from .detector import Ended, EndedEarly, Followed, HostPressure, LastLog, LauncherEnded, ProcessDeath, ScriptFailure

_SIGNAL_HINTS = {
    "SIGKILL": "a person, a job scheduler, or the kernel's out-of-memory killer may have sent it (see dmesg)",
    "SIGSEGV": "a crash in native code",
    "SIGBUS": "a crash in native code, or /dev/shm is full",
    "SIGABRT": "native code aborted: an assertion, or NCCL's watchdog after a timeout",
    "SIGTERM": "it was asked to end: by a launcher, a job scheduler or a person",
    "SIGINT": "it was interrupted from a keyboard or by its launcher",
    "SIGFPE": "a crash in native code: an arithmetic error",
    "SIGHUP": "its terminal was closed",
}
_MEMORY_REMEDY = "Give it more memory (the limit, the host), or hold less: fewer workers, smaller batches, no offload."
_SYNCED = (
    "Under ZeRO-3 and FSDP each forward of a generation is a collective, and a rank whose texts end early leaves the "
    "others alone in it: pass synced_gpus=True to generate."
)
_MOST_ERROR = 500  # characters. Errors of ftmon's own trainer end with the remedy and must not be cut off.


def _failure(facts: ScriptFailure, finding: Finding) -> Words:
    where = f" in {finding.phase}" if finding.phase else ""
    why = ", its peer killed as asked" if facts.peer_killed else ""
    return Words(
        f"rank {finding.rank} failed{where}{why}: {first_line(facts.error, _MOST_ERROR)}",
        f"An exception ended the script in step {finding.step}: {stop(first_line(facts.error, 1000))}",
        sentence(_library_hint(facts.error)),
    )


def _ended_early(facts: EndedEarly, finding: Finding) -> Words:
    who, steps = ranks_in_words(list(facts.last_steps)), sorted(set(facts.last_steps.values()))
    after = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return Words(
        f"{who} ended early, after {after}; rank {facts.lost} lost the connection in step {finding.step}",
        f"The script of {who} ended without an error after {after}, while rank {facts.lost} continued and "
        f"communicated with it in step {finding.step}: {stop(first_line(facts.error))}",
        "Give every rank the same number of batches (DistributedSampler, drop_last, "
        "torch.distributed.algorithms.Join), and end with a barrier.",
    )


def _died(facts: ProcessDeath, finding: Finding) -> Words:
    ending, signal = ending_in_words(facts.exit_code, facts.signal), facts.by_signal
    how = ending if signal else f"ended: {ending}"
    possible = _SIGNAL_HINTS.get(signal_name(signal)) if signal else None
    hint = f"Possibly: {possible}." if possible else ""
    if signal == signals.SIGKILL and not facts.asked:
        how, hint = _killer(how, hint, facts)
    synced = ""
    if facts.reason:
        how = f"aborted{' in generate' if facts.generating else ''}: {first_line(facts.reason, _MOST_ERROR)}"
        hint = sentence(_library_hint(facts.reason))
        synced = _SYNCED if facts.generating else ""
    others = "" if facts.alone else " The other ranks cannot continue without it; launchers end them too."
    return Words(
        f"rank {finding.rank} {how}{', as asked' if facts.asked else ''}",
        f"The process of rank {finding.rank} (pid {facts.pid}) is gone: {facts.state or ending}."
        f"{f' {hint}' if hint and not facts.asked else ''}{others}",
        synced,
    )


def _launcher_ended(facts: LauncherEnded, _: Finding) -> Words:
    how = _launcher(facts)
    return Words(
        f"the job's command ended ({how}) before its ranks",
        f"The command that was started ({how}) left {counted(facts.left, 'process')} behind. ftmon ended "
        "the remaining processes; no rank is the cause.",
    )


def _launcher_evidence(finding: Finding) -> dict[str, Any]:
    facts: LauncherEnded = finding.facts
    return {"ended": _launcher(facts), "left": facts.left, "processes": ", ".join(facts.processes)}


def _death_evidence(finding: Finding) -> dict[str, Any]:
    facts: ProcessDeath = finding.facts
    found = only("pid", "exit_code", "signal", "log", *(("reason", "generating") if facts.reason else ()))(finding)
    if (kill := facts.kernel_kill) is not None:
        why = _kill_evidence(kill, facts.pid)
        found["kernel_kill"] = {**msgspec.to_builtins(kill), "text": exhausted_memory(kill), "why": why}
    if facts.pressure is not None:
        found["memory_before"] = _pressure(facts.pressure)
    return found


def _failure_evidence(finding: Finding) -> dict[str, Any]:
    found = only("error", "traceback", "log")(finding)
    if isinstance(facts := finding.facts, EndedEarly):
        steps = {str(rank): step for rank, step in list(facts.last_steps.items())[:RANKS_LISTED]}
        return {"last_step": steps, "lost": facts.lost, **found}
    return found


def _library_hint(text: str) -> str:
    """Return the meaning of a communication library's last message; empty if unknown."""
    if "op.preamble.length" in text:  # gloo: a peer sent more than was expected
        return "gloo aborted because ranks entered one collective with tensors of different sizes (shapes)"
    if "Watchdog caught collective operation timeout" in text:
        return "NCCL's watchdog aborted it: a rank did not enter this collective in time, or entered another one"
    return ""


def _ended(facts: Ended) -> Added:
    ending = ending_in_words(facts.exit_code, facts.signal)
    return Added("ended", {"ended": ending}, f"It ended: {ending}." if facts.is_known else "")


def _followed(facts: Followed) -> Added:
    then: dict[str, str] = {}
    for rank, one in facts.followers.items():
        first, *later = (
            ending_in_words(event.exit_code, event.signal) if isinstance(event, Ended) else first_line(event)
            for event in one.events
        )
        then[str(rank)] = ", then ".join([f"{first} after {duration(one.after_s)}", *later])
    return Added("followed", {"then": then})


def _launcher(facts: LauncherEnded) -> str:
    code = facts.exit_code
    return "never began" if code is None else f"exit code {code}" if code >= 0 else ending_in_words(code, None)


def _killer(how: str, hint: str, facts: ProcessDeath) -> tuple[str, str]:
    """Return the likely sender of a SIGKILL, as text for the title and as a sentence."""
    kill = facts.kernel_kill
    why = "; ".join(_kill_evidence(kill, facts.pid)) if kill is not None else ""
    if kill is not None and kill.exhausted:
        memory = exhausted_memory(kill)
        return (
            f"{how}{'' if kill.sure else ', probably'} by the kernel: out of memory",
            f"{memory[:1].upper()}{memory[1:]}: {why}. {_MEMORY_REMEDY}",
        )
    if kill is not None:
        return how, f"Not by the kernel's OOM killer: {why}. A person or a job scheduler sent it."
    if facts.pressure is not None:
        why = f"Neither log nor counter could be read; {_pressure(facts.pressure)}."
        return f"{how}, probably by the kernel: out of memory", why
    return how, hint


def _kill_evidence(kill: KernelKill, pid: int) -> list[str]:
    """Return the evidence for or against a kill by the kernel, as clauses."""
    if not kill.exhausted:
        return ["the kernel log has no out-of-memory kill of this process"]
    found: list[str] = []
    if kill.sure:
        name = sanitize(kill.name, 64)
        found.append(f"the kernel log records the kill of pid {pid} ({name}), {gib(kill.killed_bytes)}")
    if kill.kills:
        recent = f"{kill.recent_kills} of them just before"
        found.append(f"its control group counts {counted(kill.kills, 'out-of-memory kill')}, {recent}")
    found += [f"the group may use {gib(limit)}" for limit in kill.limits_bytes]
    if kill.resident_bytes:
        found.append(f"its resident memory was {gib(kill.resident_bytes)} at the last sample")
    return found


def _pressure(facts: HostPressure) -> str:
    return (
        f"{facts.age_s:.1f} s before, {gib(facts.used_bytes)} of {gib(facts.total_bytes)} of the "
        f"host's (or control group's) memory were in use, {gib(facts.rank_bytes)} of it by this rank"
    )


KINDS = (
    Kind(
        "failure",
        ScriptFailure,
        _failure,
        "failure",
        "exception",
        evidence=_failure_evidence,
        shown={
            "log": Shown("last output"),
            "exit_code": Shown("exit status"),
            "ended": Shown("its end"),
            "then": Shown("after it", by="rank"),
            "left": Shown("processes left"),
            "last_step": Shown("last step", by="rank"),
            "lost": Shown("messages lost"),
            "kernel_kill": Shown("killed by the kernel"),
            "text": Shown("in words"),
            "exhausted": Shown("what was full"),
            "killed_bytes": Shown("memory of the process", "bytes"),
            "kills": Shown("kills so far"),
        },
        added={Ended: _ended, LastLog: lambda facts: Added("log", {"log": facts.log}), Followed: _followed},
        counted=True,
    ),
    Kind("ended_early", EndedEarly, _ended_early, "failure", "ended-early", evidence=_failure_evidence, counted=True),
    Kind(
        "died",
        ProcessDeath,
        _died,
        "died",
        "process",
        evidence=_death_evidence,
        resolved={"run_ended": "The run finished after that: what had started the process ended it."},
    ),
    Kind("launcher_ended", LauncherEnded, _launcher_ended, "died", "launcher", evidence=_launcher_evidence),
)
