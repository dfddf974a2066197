"""The monitor's own troubles in words, and a run that ended before it began."""

from typing import Any

from ..findings import Finding
from ..health.hub import LossFacts, NoStepFacts, RecordingFacts
from .words import Words


def telemetry_lost(finding: Finding) -> Words:
    """Messages of ranks that the hub has not received."""
    facts: LossFacts = finding.facts
    names = ", ".join(sorted(map(_sender, facts.sources))[:4]) + (" ..." if len(facts.sources) > 4 else "")
    return Words(
        f"{facts.total} messages of telemetry lost, {facts.new} just now from {names}",
        "What is shown has gaps; the training itself is not touched. A probe drops rather than waits when the "
        "hub was away for long or cannot keep up.",
    )


def not_recording(finding: Finding) -> Words:
    """Nothing is recorded."""
    facts: RecordingFacts = finding.facts
    return Words(
        f"not recording: {facts.error}",
        "The training goes on and the live view too, but what happens now will be missing from the recording.",
        "Free space on that disk; recording resumes by itself.",
    )


def no_step(finding: Finding) -> Words:
    """A run that ended without a step."""
    facts: NoStepFacts = finding.facts
    code = "" if facts.exit_code is None else f", exit code {facts.exit_code}"
    why = (
        f"{facts.ranks} {'rank' if facts.ranks == 1 else 'ranks'} started, and no finished optimizer step was "
        "received. The last lines of the logs say where the script ended."
        if facts.ranks
        else "No rank was seen: the command ended, or failed, before it made a DeepSpeed engine or an optimizer. "
        "The launcher's log has its output."
    )
    return Words(f"the script ended without a recorded step{code}", why)


def evidence(finding: Finding) -> dict[str, Any]:
    """Return what it rests on as plain values."""
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
