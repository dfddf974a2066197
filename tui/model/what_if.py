"""State of the predicted changes of a run that ran out of memory, each from a dry run of its job."""

from dataclasses import dataclass, field

import msgspec

from ...protocol.messages.telemetry import Oom


class Change(msgspec.Struct, frozen=True):
    """A change of the run; bytes, seconds. A row of ``what_if`` of ``ftmon predict --json``."""

    name: str
    change: str
    fits: bool
    needed_bytes: int
    step_seconds: float = 0.0
    slower: float = 0.0
    """GPU time per sample relative to the unchanged run."""
    refused: str = ""


class CurrentPoint(msgspec.Struct, frozen=True):
    """The unchanged run at one length: an entry of ``points``."""

    sequence_length: int
    needed_bytes: int = 0
    fits: bool | None = None
    fails_in: str = ""


class Answer(msgspec.Struct, frozen=True):
    """The used fields of the answer of ``ftmon predict --what-if --json``."""

    points: list[CurrentPoint]
    what_if: list[Change]
    capacity_bytes: int | None = None
    gpu: str = ""


@dataclass
class WhatIf:
    """The changes of one error's run."""

    state: str = "none"
    """``none``, ``running``, ``done``, ``cancelled`` or ``failed``."""
    since: float = 0.0
    """Start of the dry runs, ``time.monotonic``."""
    done: list[str] = field(default_factory=list[str])
    """Names of the changes predicted so far; the last one is in progress."""
    text: str = ""
    """Reason of a missing answer; else empty."""
    answer: Answer | None = None
    version: int = 0
    """Incremented with every change."""


def capacity_of(oom: Oom) -> int:
    """Return the bytes that PyTorch could reserve on that GPU at that moment: reserved plus still available memory."""
    return oom.reserved_bytes + max(0, oom.room_bytes)


def length_of(oom: Oom) -> int:
    """Return the sequence length of the batch; 0 if unknown."""
    return oom.batch_shape[-1] if len(oom.batch_shape) > 1 and oom.batch_shape[-1] > 0 else 0
