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
"""Labels of ``protocol.messages.memory.PARTS`` and of what is in none."""


class Words(NamedTuple):
    """A finding in words."""

    title: str
    text: str
    """What it means, with its figures, without the remedy."""
    remedy: str = ""
    over: str = "It is over."
    """Added to the text when the finding is resolved."""


class Added(NamedTuple):
    """An addition to a finding's text and evidence."""

    name: str
    """Name of the addition; a later one of the same name replaces it."""
    evidence: dict[str, Any]
    text: str = ""
    """A sentence; empty: none."""


def sentence(clause: str) -> str:
    """Make a sentence of a clause; empty for an empty one."""
    return f"{clause[0].upper()}{clause[1:]}." if clause else ""


def stop(clause: str) -> str:
    """End a clause with a full stop, unless it ends with one."""
    return clause if clause.endswith(".") else f"{clause}."


def number(value: float | None) -> str:
    """Format a figure in four significant digits; ``?`` for None."""
    if value is None:
        return "?"
    return f"{value:.4g}" if math.isfinite(value) else str(value)
