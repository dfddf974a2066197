"""Types of the texts of findings."""

import math
from typing import Any, NamedTuple

PART_LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "master_copies": "master weights",
    "partitions": "ZeRO partitions",
    "buckets": "buckets",
    "activations": "activations",
    "temporaries": "temporaries",
    "other": "other memory",
    "unattributed": "not attributed",
}
"""Labels of ``protocol.messages.memory.PARTS``."""


class Words(NamedTuple):
    """Text of a finding."""

    title: str
    text: str
    """The meaning, with figures, without the remedy."""
    remedy: str = ""
    resolved: str = "It is over."
    """Added to the text when the finding is resolved."""


class Added(NamedTuple):
    """An addition to a finding's text and evidence."""

    name: str
    """Name of the addition; a later one of the same name replaces it."""
    evidence: dict[str, Any]
    text: str = ""
    """A sentence; empty: none."""


def sentence(clause: str) -> str:
    """Return a clause as a sentence; empty for an empty one."""
    return f"{clause[0].upper()}{clause[1:]}." if clause else ""


def stop(clause: str) -> str:
    """Return a clause with a full stop at its end."""
    return clause if clause.endswith(".") else f"{clause}."


def number(value: float | None) -> str:
    """Format a figure in four significant digits; ``?`` for None."""
    if value is None:
        return "?"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
