"""Text of alerts about the monitor itself (lost telemetry, no recording), and of a run that ended without a step."""

from typing import Any

from ...text import sanitize
from ..findings import Finding
from ..health.hub import LossFacts, NoStepFacts, RecordingFacts, UnhookedFacts
from .words import Words


def telemetry_lost(finding: Finding) -> Words:
    """Telemetry messages that did not reach the hub."""
    facts: LossFacts = finding.facts
    names = ", ".join(sorted(map(_sender, facts.sources))[:4]) + (" ..." if len(facts.sources) > 4 else "")
    return Words(
        f"{facts.total} messages of telemetry lost, {facts.new} just now from {names}",
        "Charts and tables have gaps; the training is not affected. A probe drops messages instead of waiting when "
        "the hub is down for long or cannot keep up.",
    )


def not_recording(finding: Finding) -> Words:
    """A recording that cannot be written."""
    facts: RecordingFacts = finding.facts
    return Words(
        f"not recording: {facts.error}",
        "The training and the live view continue, but the recording will lack this part of the run.",
        "Free space on that disk; recording resumes by itself.",
    )


def no_step(finding: Finding) -> Words:
    """A run that ended without a step."""
    facts: NoStepFacts = finding.facts
    code = "" if facts.exit_code is None else f", exit code {facts.exit_code}"
    why = (
        f"{facts.ranks} {'rank' if facts.ranks == 1 else 'ranks'} started, and no finished optimizer step was "
        "received. The last lines of the logs show where the script ended."
        if facts.ranks
        else "No rank started: the command ended, or failed, before it created a DeepSpeed engine or an optimizer. "
        "The launcher's log has its output."
    )
    return Words(f"the script ended without a recorded step{code}", why)


def unhooked(facts: UnhookedFacts) -> Words:
    """A process that cannot be recorded, because ``PYTHONPATH`` was replaced."""
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
    return {"exit_code": facts.exit_code, "ranks": facts.ranks}


def _sender(source: str) -> str:
    """Shorten a probe's identity, ``rank-3-4711-123456``, to ``rank 3``."""
    parts = source.split("-")
    return f"rank {parts[1]}" if len(parts) == 4 and parts[0] == "rank" else source
