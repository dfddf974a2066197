"""The cause of a failed run, derived from its alerts."""

from collections.abc import Iterable

from ..messages.control import Alert, AlertKind

FATAL: tuple[AlertKind, ...] = ("failure", "died", "oom")
"""Kinds of alerts that a rank ends with."""


def standing(alerts: Iterable[Alert], *kinds: AlertKind) -> list[Alert]:
    """Return the unresolved errors of these kinds."""
    return [each for each in alerts if each.kind in kinds and each.severity == "error" and each.resolved is None]


def first_failure(alerts: Iterable[Alert]) -> Alert | None:
    """Return the alert that explains why a run failed: a port in use, else the first alert; None if there is none.

    Resolved alerts do not count, such as those of an earlier job, which are resolved when a later job trains.
    """
    return min(
        standing(alerts, *FATAL, "exit"),
        key=lambda alert: ("port" not in alert.evidence, alert.time, alert.id),
        default=None,
    )
