"""Cause of a failed run, by its alerts."""

from collections.abc import Iterable

from ..messages.control import Alert, AlertKind

FATAL: tuple[AlertKind, ...] = ("failure", "died", "oom")
"""Kinds of alerts that a rank ends with."""


def standing(alerts: Iterable[Alert], *kinds: AlertKind) -> list[Alert]:
    """Return the errors of these kinds that were not resolved."""
    return [each for each in alerts if each.kind in kinds and each.severity == "error" and each.resolved is None]


def first_failure(alerts: Iterable[Alert]) -> Alert | None:
    """Return the alert that explains why a run failed: a port that was taken, or else the first; None: there is none.

    An alert that ended an earlier job, and was resolved when a later one trained, does not count.
    """
    return min(
        standing(alerts, *FATAL, "exit"),
        key=lambda alert: ("port" not in alert.evidence, alert.time, alert.id),
        default=None,
    )
