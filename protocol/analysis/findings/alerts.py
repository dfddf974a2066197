"""The alert store: one alert per condition, sent when it is raised, changed and resolved, at a limited rate.

The key of a condition is its kind, rank (None for several ranks), phase and ``evidence["rule"]``. Raising it again
increments its count. An alert is sent at once if it is new, if its severity rises, or if it is resolved. Other
changes are limited per alert by a token bucket: ``BURST`` tokens, one more every ``RESEND_S``; without a token the
change waits for ``tick``. At most ``FRESH_LIMIT`` new alerts are raised in ``FRESH_WINDOW_S``; the rest are counted
in one note.

Diagnostic requests of detectors to ranks: queued here, sent by the hub.

A capture costs the rank time (stacks make allocations slower), so requests are limited: for spikes, at most
``PER_RANK`` per rank and run, with growing pauses unless the next spike can be predicted, and ``RANKS_A_PHASE`` ranks
per phase; for a transient of every step, one per phase. Only ranks on a GPU are asked: the CPU allocator has no trace.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ...messages import control
from ...messages.control import Alert, AlertKind, Severity
from ...messages.telemetry import PHASES, Hello

RESEND_S = 5.0
BURST = 3
FRESH_LIMIT = 40
FRESH_WINDOW_S = 60.0
RANKS_LISTED = 64  # maximum length of evidence and rank lists
PER_RANK = 3
PAUSE_S = 30.0
LONGER = 4.0  # factor between consecutive pauses
RANKS_A_PHASE = 4
LEAK_STEPS = 3

LASTING = ("dropped", "disk", "note", "health")
"""Kinds of alert about the monitor and the hosts, or that their detectors resolve at the end of a job."""
FATAL = ("died", "failure", "oom", "exit")  # kinds that remain active after their job, until a later one makes a step

Key = tuple[AlertKind, int | None, str, str]
_RAISED = ""
_OVER = "over"
_SEVERITY = {"info": 0, "warning": 1, "error": 2}


class _Entry:
    def __init__(self, alert: Alert, now: float, *, restored: bool = False) -> None:
        self.alert = alert
        self.parts = {_RAISED: alert.text}  # parts of the text, in order: as raised, additions by name, resolution
        self.restored = restored  # whether it is from a recording: its text as raised then includes earlier additions
        self.spare = BURST - 1.0
        self.at = now

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.parts.values()))

    def may_send(self, now: float) -> bool:
        """Take one token; return whether there was one."""
        self.spare = min(float(BURST), self.spare + max(0.0, now - self.at) / RESEND_S)
        self.at = now
        if self.spare < 1.0:
            return False
        self.spare -= 1.0
        return True


def key_of(alert: Alert) -> Key:
    """Return the key of an alert's condition, as in ``AlertStore.raise_alert``."""
    return alert.kind, alert.rank, alert.phase, str(alert.evidence.get("rule", ""))


def _with_rule(key: Key, evidence: Mapping[str, Any]) -> dict[str, Any]:
    return {"rule": key[3], **evidence} if key[3] else dict(evidence)


class AlertStore:
    """All alerts of the run, active and resolved. Ids count from 1 and continue after ``restore``."""

    def __init__(self) -> None:
        self._entries: dict[Key, _Entry] = {}
        self._next_id = 1
        self._fresh: deque[float] = deque()
        self._dirty: set[Key] = set()
        self._past: list[_Entry] = []  # active alerts that ended earlier jobs, until a later job makes a step

    def begin_job(self, now: float) -> list[Alert]:
        """Resolve the alerts of the previous job, except for the one that ended it."""
        alerts: list[Alert] = []
        for key, entry in list(self._entries.items()):
            if entry.alert.kind in LASTING:
                continue
            if key in self._dirty:
                alerts += self._send(key, entry, now, at_once=True)
            if entry.alert.resolved is None and entry.alert.kind in FATAL:
                self._past.append(entry)
            else:
                alerts += self.resolve(now, key, "Its job has ended.")
            del self._entries[key]
        return alerts

    def resolve_past(self, now: float) -> list[Alert]:
        """Resolve the alerts that ended earlier jobs, because a later job has made a step."""
        past, self._past = [entry.alert for entry in self._past], []
        later = "A later job of the run has made a step since."
        return [msgspec.structs.replace(one, resolved=now, text=f"{one.text} {later}".strip()) for one in past]

    def raise_alert(
        self,
        now: float,
        key: Key,
        severity: Severity,
        title: str,
        text: str,
        evidence: Mapping[str, Any],
        ranks: Sequence[int] = (),
        step: int | None = None,
        *,
        repeat: bool = True,
    ) -> list[Alert]:
        """Raise an alert, or record its repetition or change; return the messages to send now.

        The severity of an active alert never falls. ``repeat``: increment its count, not only update its text and
        evidence.
        """
        kind, rank, phase, _ = key
        listed, found = list(ranks[:RANKS_LISTED]), _with_rule(key, evidence)
        entry = self._entries.get(key)
        if entry is None:
            if not self._admit(now):
                return self._overflow(now)
            alert = Alert(self._next_id, kind, severity, now, title, rank, listed, step, phase, text, found)
            self._next_id += 1
            self._entries[key] = _Entry(alert, now)
            return [alert]
        known = entry.alert
        worse = _SEVERITY[severity] > _SEVERITY[known.severity]
        again = known.resolved is not None
        changed = msgspec.structs.replace(
            known,
            severity=severity if worse or again else known.severity,
            title=title,
            ranks=listed,
            step=step,
            text=text,
            evidence=found,
            resolved=None,
            count=known.count + 1 if repeat or again else known.count,
        )
        if changed == known:
            return []
        entry.alert, entry.parts, entry.restored = changed, {_RAISED: text}, False
        return self._send(key, entry, now, at_once=worse)

    def update(self, now: float, key: Key, title: str, text: str, evidence: Mapping[str, Any]) -> list[Alert]:
        """Replace title, text and evidence of an alert, active or resolved; return no message if it does not exist.

        The text of its resolution is kept.
        """
        entry = self._entries.get(key)
        if entry is None:
            return []
        over = entry.parts.get(_OVER)
        entry.parts = {_RAISED: text, _OVER: over} if over else {_RAISED: text}
        return self._change(key, entry, now, title=title, text=entry.text, evidence=_with_rule(key, evidence))

    def annotate(self, now: float, key: Key, name: str, evidence: dict[str, Any], text: str = "") -> list[Alert]:
        """Add evidence (and a sentence) to an alert; return no message if it does not exist.

        An earlier sentence with the same ``name`` is replaced.
        """
        entry = self._entries.get(key)
        if entry is None:
            return []
        found = {**entry.alert.evidence, **evidence}
        if text and not (entry.restored and name not in entry.parts and found == entry.alert.evidence):
            entry.parts[name] = text
        return self._change(key, entry, now, evidence=found, text=entry.text)

    def _change(self, key: Key, entry: _Entry, now: float, **fields: Any) -> list[Alert]:
        changed = msgspec.structs.replace(entry.alert, **fields)
        if changed == entry.alert:
            return []
        entry.alert = changed
        return self._send(key, entry, now, at_once=False)

    def resolve(self, now: float, key: Key, text: str = "") -> list[Alert]:
        """Resolve an alert; return the messages to send: none if it does not exist or is already resolved."""
        entry = self._entries.get(key)
        if entry is None or entry.alert.resolved is not None:
            return []
        entry.parts.pop(_OVER, None)
        entry.parts[_OVER] = text
        entry.alert = msgspec.structs.replace(entry.alert, resolved=now, text=entry.text)
        return self._send(key, entry, now, at_once=True)

    def standing(self, kind: AlertKind) -> list[Alert]:
        """Return the active alerts of a kind, oldest first."""
        alerts = [entry.alert for entry in self._entries.values()]
        return [alert for alert in alerts if alert.kind == kind and alert.resolved is None]

    def tick(self, now: float, *, everything: bool = False) -> list[Alert]:
        """Return delayed changes whose alerts have a token again; with ``everything`` (end of the run), all of them."""
        dirty = [(key, self._entries[key]) for key in self._dirty]
        return [alert for key, entry in dirty for alert in self._send(key, entry, now, at_once=everything)]

    def restore(self, alert: Alert) -> bool:
        """Restore an alert from the recording, so that it continues under the same id.

        Returns whether it belongs to the current job: False for the resolution of an alert that ended an earlier job.
        """
        standing = [entry for entry in self._past if entry.alert.id != alert.id]
        if len(standing) < len(self._past):
            self._past = standing
            return False
        self._entries[key_of(alert)] = _Entry(alert, alert.time, restored=True)
        self._next_id = max(self._next_id, alert.id + 1)
        return True

    def _send(self, key: Key, entry: _Entry, now: float, *, at_once: bool) -> list[Alert]:
        if not at_once and not entry.may_send(now):
            self._dirty.add(key)
            return []
        self._dirty.discard(key)
        return [entry.alert]

    def _admit(self, now: float) -> bool:
        fresh = self._fresh
        while fresh and now - fresh[0] > FRESH_WINDOW_S:
            fresh.popleft()
        if len(fresh) >= FRESH_LIMIT:
            return False
        fresh.append(now)
        return True

    def _overflow(self, now: float) -> list[Alert]:
        key: Key = ("note", None, "", "overflow")
        if key not in self._entries:
            # The note itself is always admitted.
            self._fresh.popleft()
        title = f"more than {FRESH_LIMIT} alerts within a minute: the rest are only counted here"
        text = "Many alerts at once; the first ones show where it began."
        return self.raise_alert(now, key, "warning", title, text, {})


class Action(NamedTuple):
    """A command that a detector requests from the hub."""

    verb: control.Verb
    ranks: tuple[int, ...]
    why: str


class DiagnosticRequests:
    """The queue of requests and its limits. Times are passed in."""

    def __init__(self) -> None:
        self._queue: list[Action] = []
        self._cuda: set[int] = set()
        self._asked: dict[int, tuple[int, float]] = {}  # by rank: number of requests, and time of the last one
        self._awaited: dict[int, int] = {}  # by rank: the predicted step for which a capture was requested
        self._ranks: dict[str, set[int]] = {}
        self._steady: set[str] = set()
        self._leak_asked = 0

    def drain(self) -> list[Action]:
        """Return the requests since the last call."""
        found, self._queue = self._queue, []
        return found

    def add(self, action: Action) -> None:
        self._queue.append(action)

    def hello(self, hello: Hello) -> None:
        """Record whether a rank's allocator has a trace."""
        (self._cuda.add if hello.memory_measure == "cuda" else self._cuda.discard)(hello.rank)

    def spike(self, t: float, rank: int, phase: str, steps: list[int]) -> None:
        """Request a capture of a phase in the step in which its next spike is predicted; ``steps``: those before."""
        ranks = self._ranks.setdefault(phase, set())
        times, last = self._asked.get(rank, (0, 0.0))
        if rank not in self._cuda or phase not in PHASES or times >= PER_RANK:
            return
        expected = next_step(steps)
        # The pause applies only to spikes that cannot be predicted.
        if times and not expected and t - last < PAUSE_S * LONGER ** (times - 1):
            return
        if (rank not in ranks and len(ranks) >= RANKS_A_PHASE) or steps[-1] <= self._awaited.get(rank, -1):
            return
        self._awaited[rank] = expected
        ranks.add(rank)
        self._asked[rank] = times + 1, t
        self._arm(rank, phase, expected, f"a spike in {phase}, step {steps[-1]}")

    def steady(self, rank: int, phase: str) -> None:
        """Request one capture of a phase whose transient is large in every step."""
        if phase not in self._steady and rank in self._cuda and phase in PHASES:
            self._steady.add(phase)
            self._arm(rank, phase, 0, f"a transient of every {phase}")

    def leak(self, rank: int) -> None:
        """Request a capture of whole steps of a rank whose memory grows."""
        if rank in self._cuda and self._leak_asked < PER_RANK:
            self._leak_asked += 1
            arm = control.Arm(steps=LEAK_STEPS, reason="leak")
            self.add(Action(arm, (rank,), "memory that grows step over step"))

    def _arm(self, rank: int, phase: str, from_step: int, why: str) -> None:
        self.add(Action(control.Arm(phase=phase, from_step=from_step, reason="spike"), (rank,), why))
        self.add(Action(control.Compose(reason="spike"), (rank,), why))


def next_step(steps: list[int]) -> int:
    """Return the step of the next spike if the last ones were evenly spaced; 0: unknown."""
    if len(steps) < 3:
        return 0
    first, second = steps[-1] - steps[-2], steps[-2] - steps[-3]
    return steps[-1] + first if first == second > 1 else 0
