"""Turns findings into text, and is the only place that does: title, meaning, remedy, resolution."""

from collections.abc import Callable
from typing import Any

import msgspec

from ...messages.control import Alert
from ...text import duration
from ..deaths.facts import Ended, Followed, LastLog
from ..findings import Finding
from ..findings.finding import Resolution
from ..memory.facts import GrowthFacts, LeakFacts, SpikeFacts, SteadyFacts
from ..oom.detector import Released, Uncaught
from ..stalls.hang_detector import WaitingRanks
from . import deaths, health, memory, monitor, oom, run, stalls, stragglers
from .words import Added as Added
from .words import Words as Words

_WORDS: dict[str, Callable[[Finding], Words]] = {
    **health.WORDS,
    "spike": memory.spike,
    "steady_transient": memory.steady,
    "state_growth": memory.growth,
    "leak": memory.leak,
    "straggler": stragglers.words,
    "failure": deaths.failure,
    "ended_early": deaths.ended_early,
    "died": deaths.died,
    "launcher_ended": deaths.launcher_ended,
    "oom": oom.failed_allocation,
    "oom_failure": oom.uncaught,
    "hang": stalls.hang,
    "stopped": stalls.stopped,
    "unreachable": stalls.unreachable,
    "telemetry_lost": monitor.telemetry_lost,
    "not_recording": monitor.not_recording,
    "messages_refused": monitor.refused,
    "not_notified": monitor.not_notified,
    "hub_restarted": monitor.restarted,
    "recording_damaged": monitor.damaged,
    "recording_removed": monitor.removed,
    "not_listening": monitor.not_listening,
    "missing_ranks": monitor.missing_ranks,
    "unhooked": monitor.unhooked,
    "no_step": run.no_step,
    "port_taken": run.port_taken,
    "job_failed": run.job_failed,
    "concurrent_job": run.concurrent_job,
    "leftover_processes": run.leftovers,
    "hang_action": run.hang_action,
    "unproven_hang": run.unproven_hang,
}
_OF_THE_MONITOR = (
    *("telemetry_lost", "not_recording", "messages_refused", "not_notified", "hub_restarted", "recording_damaged"),
    *("recording_removed", "not_listening", "missing_ranks", "unhooked"),
)
_OF_THE_RUN = (
    *("no_step", "port_taken", "job_failed", "concurrent_job"),
    *("leftover_processes", "hang_action", "unproven_hang"),
)
_EVIDENCE: dict[str, Callable[[Finding], dict[str, Any]]] = {
    "spike": memory.evidence,
    "steady_transient": memory.evidence,
    "state_growth": memory.evidence,
    "leak": memory.evidence,
    "straggler": stragglers.evidence,
    **dict.fromkeys(("failure", "ended_early", "died", "launcher_ended"), deaths.evidence),
    **dict.fromkeys(("oom", "oom_failure"), oom.evidence),
    **dict.fromkeys(("hang", "stopped", "unreachable"), stalls.evidence),
    **dict.fromkeys(_OF_THE_MONITOR, monitor.evidence),
    **dict.fromkeys(_OF_THE_RUN, run.evidence),
}
_ADDED: dict[type, Callable[[Any], Added]] = {
    Ended: deaths.ended,
    LastLog: deaths.log_read,
    Followed: deaths.followed,
    Uncaught: oom.not_caught,
    Released: oom.let_go,
    WaitingRanks: stalls.awaited,
}
_FACTS: dict[str, Callable[[Alert], Any]] = {
    "spike": lambda alert: msgspec.convert(alert.evidence, SpikeFacts),
    "steady_transient": lambda alert: msgspec.convert(alert.evidence, SteadyFacts),
    "state_growth": lambda alert: msgspec.convert(alert.evidence, GrowthFacts),
    "leak": lambda alert: msgspec.convert(alert.evidence, LeakFacts),
    "straggler": stragglers.facts,
    "hang": stalls.since,
}
_OVER = {
    ("spike", "calm"): "Not seen again in {0} steps.",
    ("leak", "calm"): "It stopped growing by step {0}.",
    ("leak", "rank_ended"): "The rank has ended.",
    ("oom", "caught"): "The script caught it and finished step {0}.",
    ("oom_failure", "caught"): "The script caught it and finished step {0}.",
    ("straggler", "calm"): "As fast as the others again at step {0}.",
    ("straggler", "rank_ended"): "The rank ended.",
    ("straggler", "restarted"): "The ranks started anew.",
    ("hang", "resumed"): "It resolved after {1}.",
    ("hang", "run_ended"): "It ended with the run, after {1}.",
    ("hang", "superseded"): "The evidence has changed: see the next alert.",
    ("died", "run_ended"): "The run finished after that: what had started the process ended it.",
    ("stopped", "resumed"): "It runs again.",
    ("stopped", "rank_ended"): "Its process is gone.",
    ("unreachable", "resumed"): "It reports again, or ended.",
    ("telemetry_lost", "calm"): "None lost since.",
    ("not_recording", "resumed"): "Recording again.",
    ("missing_ranks", "resumed"): "All ranks have reported.",
    ("unhooked", "resumed"): "A rank has reported since.",
    ("leftover_processes", "calm"): "All of them are gone now.",
    ("unproven_hang", "resumed"): "The hang is over.",
}


def words(finding: Finding) -> Words:
    """Return the text of a finding.

    Raises:
        KeyError: the finding's kind has no text.
    """
    return _WORDS[finding.kind](finding)


def over(finding: Finding) -> str:
    """Return the text of a finding's resolution."""
    if isinstance(finding.facts, Resolution):
        return _OVER[finding.kind, finding.facts.why].format(finding.facts.number, duration(finding.facts.number))
    return words(finding).over


def added(finding: Finding) -> Added:
    """Return the text of an addition to a finding."""
    return _ADDED[type(finding.facts)](finding.facts)


def evidence(finding: Finding) -> dict[str, Any]:
    """Return a finding's figures as plain values."""
    return _EVIDENCE.get(finding.kind, health.evidence)(finding)


def facts(kind: str, alert: Alert) -> Any:
    """Return a finding's facts from the evidence of its recorded alert.

    None if they are not needed to continue, or if another version recorded different figures.
    """
    make = _FACTS.get(kind)
    try:
        return make(alert) if make is not None else None
    except msgspec.ValidationError:
        return None
