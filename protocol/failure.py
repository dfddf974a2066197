"""What a failed run failed of, by its alerts."""

from collections.abc import Iterable

from .control import Alert, AlertKind

FATAL: tuple[AlertKind, ...] = ("failure", "died", "oom")
"""Kinds of alerts that a rank ends with."""


def standing(alerts: Iterable[Alert], *kinds: AlertKind) -> list[Alert]:
    """Return the errors of these kinds that were not resolved."""
    return [each for each in alerts if each.kind in kinds and each.severity == "error" and each.resolved is None]


def first_failure(alerts: Iterable[Alert]) -> Alert | None:
    """Return the alert that says why a run failed: of a port that was taken, or else the first; None: none says it.

    What ended an earlier job of the run, and was resolved when a later one trained, is not to blame for its end.
    """
    return min(
        standing(alerts, *FATAL, "exit"),
        key=lambda alert: ("port" not in alert.evidence, alert.time, alert.id),
        default=None,
    )
