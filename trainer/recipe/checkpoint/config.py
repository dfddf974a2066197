"""Configuration of checkpoints."""

from typing import Literal

import msgspec

from ..config.fields import AtLeast0, AtLeast1, Section

Change = Literal["seed", "data", "sequence_length", "micro_batch", "grad_accumulation", "ranks"]


class Checkpoint(Section, frozen=True):
    """Checkpoints that a run resumes from; the final model is written as well."""

    every: AtLeast0 = 0
    """Steps between checkpoints; 0: only when asked to stop, and of the best evaluation (`keep_best`)."""
    keep: AtLeast1 = 2
    """How many to keep; older ones are removed when a new one is complete."""
    keep_best: bool = True
    """Write one after each evaluation with a new lowest loss, and keep the best, where there are evaluations."""
    at_end: bool = False
    """Write one at the end of training too."""
    background: bool = True
    """Write from a copy in host memory while training continues, where that memory is free."""
    rehearse: bool = True
    """Write one in the rehearsal (`training.rehearsal`) too, read it back and compare it; it is deleted again."""
    resume: str = "never"
    """never; auto: from the newest in `output.dir` when there is one; or the path of a checkpoint or output folder."""
    allow: list[Change] = msgspec.field(default_factory=list[Change])
    """Differences from the checkpoint to accept although the run then differs from an uninterrupted one: seed,
    data, sequence_length, micro_batch, grad_accumulation, ranks."""
