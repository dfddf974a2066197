"""Text about the code that caused a spike: its stacks, and the hub's verdict on them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...protocol.code_owner import library_of
from ...protocol.messages.blocks import StackGroup
from ...protocol.messages.control import Alert
from ...protocol.messages.memory import Cause
from ...protocol.text import duration, gib, sanitize

_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+) (?P<name>.*)")


@dataclass(frozen=True, slots=True)
class SpikeVerdict:
    """The hub's verdict on a spike."""

    pattern: str = ""
    """Such as ``foreach temporaries``; empty if unknown."""
    where: str = ""
    remedy: str = ""
    """What to try."""
    saves_bytes: int = 0


def split_frame(frame: str) -> tuple[str, str, str]:
    """Return file, line and function of ``file:line function``; text of another form counts as the function."""
    text = sanitize(frame, 1000)
    found = _FRAME.fullmatch(text)
    return (found["file"], found["line"], found["name"]) if found is not None else ("", "", text[:400])


def frame_parts(frame: str) -> tuple[str, str]:
    """Split ``file:line function`` into ``function  file:line`` and its package (empty: user code)."""
    filename, line, name = split_frame(frame)
    if not filename:
        return name, ""
    short = filename.replace("\\", "/").rpartition("/")[2]
    return f"{name}  {short}:{line}", library_of(filename)


def innermost(group: StackGroup) -> str:
    """Return the innermost function of a group's stack; empty without a stack."""
    return split_frame(group.frames[-1])[2] if group.frames else ""


def group_parts(group: StackGroup) -> tuple[str, str]:
    """Return where a group was allocated: the innermost call, and the innermost in user code (empty: the same)."""
    frames = [frame_parts(frame) for frame in group.frames]
    if not frames:
        return "allocated by native code", ""
    own = next((words for words, library in reversed(frames) if not library), "")
    return frames[-1][0], "" if own == frames[-1][0] else own


def shown_bytes(cause: Cause, group: StackGroup) -> int:
    """Return the bytes of a group that count as explained: the transient part, or for leaks and growth all of it."""
    passing = group.bytes - group.kept_bytes
    return group.bytes if cause.reason == "leak" or passing <= 0 else passing


def evidence_words(cause: Cause) -> str:
    """Return text about the share that has stacks, and the cost of recording them."""
    parts: list[str] = []
    if cause.transient_bytes > 0:
        share = min(1.0, max(0.0, cause.attributed_bytes / cause.transient_bytes))
        parts.append(f"{share * 100:.0f} % of it has stacks")
    if cause.armed_us:
        took = f"with stacks recorded the phase took {duration(cause.armed_us * 1e-6)}"
        parts.append(f"{took}, usually {duration(cause.usual_us * 1e-6)}" if cause.usual_us else took)
    return "; ".join(parts) or "no stacks were recorded"


CAUSE_EVIDENCE = ("stacks", "remedy", "mend", "saves_bytes", "armed_us", "usual_us", "read_us")
"""Keys of an alert's evidence that are shown as its cause, in addition to those starting with ``cause_``."""


def other_evidence(alert: Alert) -> dict[str, Any]:
    """Return the evidence of an alert that is not shown as its cause."""
    return {
        key: value
        for key, value in alert.evidence.items()
        if key not in CAUSE_EVIDENCE
        and not key.startswith("cause_")
        and not (key == "mends" and "remedies" in alert.evidence)
    }


def cause_of_alert(alert: Alert, causes: Mapping[int, Mapping[str, Cause]]) -> Cause | None:
    """Return the cause of an alert's stacks among the last causes by rank and phase."""
    if alert.kind not in ("spike", "leak"):
        return None
    cause_rank = alert.evidence.get("cause_rank")
    ranks = [cause_rank] if isinstance(cause_rank, int) else [alert.rank] if alert.rank is not None else alert.ranks
    found = [causes[rank][alert.phase] for rank in ranks if alert.phase in causes.get(rank, {})]
    return max(found, key=lambda cause: cause.transient_bytes, default=None)


def spike_alert(alerts: Iterable[Alert], rank: int, phase: str) -> Alert | None:
    """Return the alert about a rank's spikes in a phase: preferably one with a verdict, then the newest."""
    found = [
        alert
        for alert in alerts
        if alert.kind in ("spike", "leak")
        and alert.phase == phase
        and (alert.rank == rank or rank in alert.ranks or (alert.rank is None and not alert.ranks))
    ]
    return max(found, key=lambda alert: (bool(verdict_of(alert)), alert.time), default=None)


def verdict_of(alert: Alert | None) -> SpikeVerdict | None:
    """Return the hub's verdict from an alert's evidence; None if there is none."""
    evidence = alert.evidence if alert is not None else {}
    pattern, remedy = _text(evidence.get("cause_pattern")), _text(evidence.get("remedy") or evidence.get("mend"))
    saves = evidence.get("saves_bytes")
    if not pattern and not remedy:
        return None
    size = saves if isinstance(saves, int) else 0
    return SpikeVerdict(pattern.replace("_", " "), _text(evidence.get("cause_where")), remedy, size)


def verdict_words(verdict: SpikeVerdict) -> list[str]:
    """Return a verdict's text, with what to try."""
    where = f", in {verdict.where}" if verdict.where else ""
    found = [f"{verdict.pattern}{where}"] if verdict.pattern else []
    if verdict.remedy:
        saves = f", which would save {gib(verdict.saves_bytes)}" if verdict.saves_bytes > 0 else ""
        found.append(f"try: {verdict.remedy}{saves}")
    return found


def evidence_groups(alert: Alert) -> list[StackGroup]:
    """Return the stacks in an alert's evidence; empty if there are none or they are invalid."""
    try:
        return msgspec.convert(alert.evidence.get("stacks") or [], list[StackGroup])
    except msgspec.ValidationError:
        return []


def _text(value: object) -> str:
    return sanitize(value, 400) if isinstance(value, str) else ""
