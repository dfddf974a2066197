"""Changes of a run that ran out of memory, each predicted by a dry run of this job: what is known of them so far."""

from dataclasses import dataclass, field

import msgspec

from ...protocol.telemetry import Oom


class Change(msgspec.Struct, frozen=True):
    """A change of the run; bytes, seconds. A row of ``what_if`` of ``ftmon predict --json``."""

    name: str
    change: str
    fits: bool
    needed_bytes: int
    step_seconds: float = 0.0
    slower: float = 0.0
    """GPU time a sample over that of the run as it is."""
    refused: str = ""


class CurrentPoint(msgspec.Struct, frozen=True):
    """The run as it is, at one length: an entry of ``points``."""

    sequence_length: int
    needed_bytes: int = 0
    fits: bool | None = None
    fails_in: str = ""


class Answer(msgspec.Struct, frozen=True):
    """What is used of the answer of ``ftmon predict --what-if --json``."""

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
    """When the dry runs began, monotonic."""
    done: list[str] = field(default_factory=list[str])
    """What was predicted so far, and is now: the last one."""
    text: str = ""
    """Why there is no answer."""
    answer: Answer | None = None
    version: int = 0
    """Incremented with every change."""


def capacity_of(oom: Oom) -> int:
    """Return what PyTorch could reserve on that GPU in that moment: what it had, and what it could still have got."""
    return oom.reserved_bytes + max(0, oom.room_bytes)


def length_of(oom: Oom) -> int:
    """Return the sequence length of the batch; 0 where it is not known."""
    return oom.batch_shape[-1] if len(oom.batch_shape) > 1 and oom.batch_shape[-1] > 0 else 0
