"""What ftmon said of a scene, against what happened: from the alerts of the recording, all of them, at any time.

A verdict is *wrong* when any alert, however short it stood, names a rank that is not at fault. One that names the
culprit, with the words that the kind asks for, is *right*; a hang that names nobody is ``cannot tell``. A hang that was
called in an honest run is a ``false alarm``. ``none`` means that nothing was said in time.
"""

from dataclasses import dataclass
from typing import Any

from ftmon.protocol.messages.control import Alert

from .kinds import Kind

ACCUSING = ("hang", "died", "failure", "oom")


@dataclass(frozen=True)
class Judgement:
    """``verdict``: right, cannot tell, wrong, false alarm or none; ``at``: when the alert that decides was raised."""

    verdict: str
    at: float | None = None
    title: str = ""


def named(alert: Alert) -> set[int]:
    """Give the ranks that an alert blames."""
    hung = alert.evidence.get("hung")
    if hung is not None:
        return set(hung)
    return {alert.rank} if alert.rank is not None else set()


def judge(kind: Kind, culprit: int | None, history: list[tuple[float, Alert]], end: Any) -> Judgement:
    """Judge a run.

    Args:
        kind: what was made to happen.
        culprit: the rank at fault, where there is one.
        history: every state of every alert since the fault, with the time the hub had it.
        end: the run's ``exit.json``, None while it goes on.
    """
    accusing = (*ACCUSING, "slow") if kind.expect in ("slow", "honest") else ACCUSING
    accused = [(t, alert) for t, alert in history if alert.kind in accusing and alert.severity != "info"]
    guilty = set() if culprit is None else {culprit}
    if kind.expect == "cut":
        return _cut_off(guilty, history, accused)
    for t, alert in accused:
        who = named(alert)
        if kind.expect in ("honest", "well"):
            return Judgement("false alarm", t, alert.title)
        if not who <= guilty and not (kind.expect == "sizes" and alert.kind in ("died", "failure")):
            return Judgement("wrong", t, alert.title)
    if kind.expect == "honest":
        finished = end is not None and end.state == "finished"
        return Judgement("right" if finished else "none", None, "" if finished else f"it did not finish: {end}")
    if kind.expect in ("health", "well"):
        return _health(kind, guilty, history, end)
    if kind.expect == "resolves":
        return _resolved(accused, end)
    if kind.expect == "ended":
        failed = end is not None and end.state == "failed" and kind.words in end.text
        return Judgement("right", end.time, end.text) if failed else Judgement("none", None, str(end))
    for t, alert in history:
        if _says(kind, guilty, alert):
            return Judgement("right", t, alert.title)
    vague = next(((t, alert) for t, alert in accused if alert.kind == "hang" or kind.expect == "sizes"), None)
    return Judgement("cannot tell", vague[0], vague[1].title) if vague else Judgement("none")


def _says(kind: Kind, guilty: set[int], alert: Alert) -> bool:
    """Tell whether an alert is the right verdict."""
    who = named(alert)
    rule = alert.evidence.get("rule")
    text = f"{alert.title} {alert.text} {alert.evidence}"
    if kind.ends:
        return alert.kind == "hang" and who <= guilty and kind.words in alert.title
    if kind.expect == "stall":
        return alert.kind == "hang" and who == guilty and rule != "exit"
    if kind.expect == "tangle":
        return alert.kind == "hang" and (who == guilty if who else rule in ("mismatch", "deadlock", "lock"))
    if kind.expect == "sizes":
        words = f"{alert.title} {alert.text}".lower()
        return alert.kind in ACCUSING and any(word in words for word in ("shape", "size", "elements"))
    if kind.expect == "exit":
        return alert.kind == "hang" and who == guilty and rule == "exit"
    wanted = {"death": "died", "failure": "failure", "slow": "slow"}[kind.expect]
    return alert.kind == wanted and who == guilty and kind.words in text


def _health(kind: Kind, guilty: set[int], history: list[tuple[float, Alert]], end: Any) -> Judgement:
    """Judge findings: the one that is expected, of whom it is expected, and none besides."""
    found = [(t, alert, str(alert.evidence.get("finding"))) for t, alert in history if alert.kind == "health"]
    for t, alert, name in found:
        if name not in (kind.words, "disk_filling", *_FOLLOWS.get(kind.words, ())):
            return Judgement("wrong" if kind.expect == "health" else "false alarm", t, alert.title)
    mine = [(t, alert) for t, alert, name in found if name == kind.words and _at(kind, alert)]
    for t, alert in mine:
        blamed = set(alert.evidence.get("first_ranks", alert.ranks))
        if guilty and blamed != guilty and (kind.ranks > 2 or kind.words == "nan_loss"):
            return Judgement("wrong", t, alert.title)
    if mine:
        return Judgement("right", mine[0][0], mine[0][1].title)
    finished = end is not None and end.state == "finished"
    if kind.expect == "well":
        return Judgement("right" if finished else "none", None, "" if finished else f"it did not finish: {end}")
    return Judgement("none")


_FOLLOWS = {
    "nan_loss": ("nan_gradient",),
    "scaler_floor": ("scaler_skipping",),
}
"""Findings that a fault brings with it."""


def _at(kind: Kind, alert: Alert) -> bool:
    """Tell whether a finding is about what the scene does: other disks of the machine may be low too."""
    return kind.words != "disk_filling" or "scene-disk" in str(alert.evidence.get("path"))


def _cut_off(ranks: set[int], history: list[tuple[float, Alert]], accused: list[tuple[float, Alert]]) -> Judgement:
    """A host that is cut off: what its ranks do is not known, so that is what has to be said, and nobody is named."""
    wrong = next(((t, alert) for t, alert in accused if named(alert) or alert.kind != "hang"), None)
    if wrong is not None:
        return Judgement("wrong", wrong[0], wrong[1].title)
    said = [(t, a) for t, a in history if a.evidence.get("rule") == "unreachable" and "is cut off" in a.title]
    told = next(((t, alert.title) for t, alert in said if alert.kind == "note" and set(alert.ranks) == ranks), None)
    waits = next(((t, alert.title) for t, alert in said if alert.kind == "hang"), None)
    if told and waits:
        return Judgement("right", *told)
    vague = told or next(((t, alert.title) for t, alert in accused), None)
    return Judgement("cannot tell", *vague) if vague else Judgement("none")


def _resolved(accused: list[tuple[float, Alert]], end: Any) -> Judgement:
    """A stall that ends: what was said of it has to be taken back in words."""
    last = {alert.id: alert for _, alert in accused}
    standing = [alert for alert in last.values() if alert.resolved is None]
    if end is None or end.state != "finished":
        return Judgement("none", None, f"it did not finish: {end}")
    if standing:
        return Judgement("wrong", None, f"still standing after the end: {standing[0].title}")
    first = accused[0] if accused else None
    return Judgement("right", first[0] if first else None, first[1].title if first else "nothing said")
