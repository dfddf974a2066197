"""Text of alerts about the monitor itself: telemetry, recording, connections, unmonitored processes."""

from typing import Any

import msgspec

from ...text import counted, sanitize
from ..findings import Finding
from ..findings.alert_store import RANKS_LISTED
from ..health.hub import LossFacts, RecordingFacts
from ..hub_facts import (
    DamagedRecordingFacts,
    MissingRanksFacts,
    NotListeningFacts,
    NotNotifiedFacts,
    RefusedFacts,
    RemovedRecordingFacts,
    RestartFacts,
    UnhookedFacts,
)
from .words import Words


def telemetry_lost(finding: Finding) -> Words:
    """Return the text for telemetry messages that did not reach the hub."""
    facts: LossFacts = finding.facts
    names = ", ".join(sorted(map(_sender, facts.sources))[:4]) + (" ..." if len(facts.sources) > 4 else "")
    return Words(
        f"{counted(facts.total, 'message')} of telemetry lost, {facts.new} just now from {names}",
        "Charts and tables have gaps; the training is not affected. A probe drops messages instead of waiting when "
        "the hub is down for long or cannot keep up.",
    )


def not_recording(finding: Finding) -> Words:
    """Return the text for a recording that cannot be written."""
    facts: RecordingFacts = finding.facts
    return Words(
        f"not recording: {facts.error}",
        "The training and the live view continue, but the recording will lack this part of the run.",
        "Free space on that disk; recording resumes by itself.",
    )


def refused(finding: Finding) -> Words:
    """Return the text for a sender whose messages are refused."""
    facts: RefusedFacts = finding.facts
    return Words(f"messages of {facts.sender} are refused", facts.reason)


def not_notified(finding: Finding) -> Words:
    """Return the text for a notification that was not delivered."""
    facts: NotNotifiedFacts = finding.facts
    return Words(f"not notified: {facts.target}: {facts.reason}", "")


def restarted(finding: Finding) -> Words:
    """Return the text for a hub that continues for an earlier one."""
    facts: RestartFacts = finding.facts
    return Words(
        "the hub was restarted",
        f"The run was not monitored for {facts.unwatched_s:.1f} s; training continued.",
    )


def damaged(finding: Finding) -> Words:
    """Return the text for a recording that could not be continued."""
    facts: DamagedRecordingFacts = finding.facts
    return Words("the recording was damaged", f"{facts.error}. It was moved to {facts.moved_to}; a new one was begun.")


def removed(finding: Finding) -> Words:
    """Return the text for a recording whose file was removed."""
    facts: RemovedRecordingFacts = finding.facts
    return Words("the recording was removed", facts.notice)


def not_listening(finding: Finding) -> Words:
    """Return the text for a hub that other hosts cannot reach."""
    facts: NotListeningFacts = finding.facts
    return Words("not listening for other hosts", f"{facts.error}. Apps on this host are served.")


def missing_ranks(finding: Finding) -> Words:
    """Return the text for ranks that have not reported."""
    facts: MissingRanksFacts = finding.facts
    return Words(
        f"{len(facts.missing)} of {facts.world_size} ranks have not reported",
        f"The first is rank {facts.missing[0]}. On its host ftmon must be installed in the job's environment, the "
        f"run's join.json must be readable, and the hub must be reachable at {sanitize(facts.listen, 80)} and the "
        "five ports after it.",
        "In the run's directory on that host, hosts/HOST/logs/agent.log shows which condition fails.",
    )


def unhooked(finding: Finding) -> Words:
    """Return the text for a process that is not recorded."""
    found = without_hook(finding.facts)
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


def evidence(finding: Finding) -> dict[str, Any]:
    """Return the evidence as plain values."""
    facts = finding.facts
    if isinstance(facts, LossFacts):
        return {"total": facts.total, "new": facts.new, "by_sender": facts.by_sender}
    if isinstance(facts, RecordingFacts):
        return {"error": facts.error, "recorded": facts.recorded}
    if isinstance(facts, RestartFacts):
        return {"last_recorded": facts.last_recorded}
    if isinstance(facts, MissingRanksFacts):
        return {"missing": facts.missing[:RANKS_LISTED]}
    if isinstance(facts, UnhookedFacts):
        return {"pid": facts.pid}
    return msgspec.to_builtins(facts)


def _sender(source: str) -> str:
    """Shorten a probe's identity, ``rank-3-4711-123456``, to ``rank 3``."""
    parts = source.split("-")
    return f"rank {parts[1]}" if len(parts) == 4 and parts[0] == "rank" else source
