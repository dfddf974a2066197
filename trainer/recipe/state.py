"""Position of a run: the state in a checkpoint, besides weights and optimizer states, that an exact resume needs."""

import math
from typing import Any

import msgspec


class TrainState(msgspec.Struct):
    """Position of a run; saved with every checkpoint."""

    step: int = 0  # Number of optimizer updates applied. A step with overflowing fp16 gradients does not count.
    batches: int = 0  # Global batches used, those of skipped updates included: the position in the order of examples
    samples: int = 0
    tokens: int = 0  # Tokens without padding, over all ranks
    label_tokens: int = 0  # Tokens that carried loss, over all ranks
    seed: int = 0
    data_key: str = ""
    examples: int = 0  # Number of rows of the encoded examples, which make an epoch
    order: str = ""
    sequence_length: int = 0
    micro_batch: int = 0
    grad_accumulation: int = 0
    ranks: int = 0
    sequence_parallel_size: int = 1

    evaluation_key: str = ""  # Identifier of the examples that the evaluations below are of; empty without evaluation
    best_evaluation: float = math.inf
    best_evaluation_step: int = 0
    evaluations_without_best: int = 0

    @property
    def global_batch(self) -> int:
        """Examples in one global batch."""
        return self.micro_batch * self.grad_accumulation * self.ranks // self.sequence_parallel_size


class StepResult(msgspec.Struct, frozen=True):
    """Result of one optimizer step."""

    loss_sum: Any  # Sum of this rank's token losses: a scalar tensor on the device
    label_tokens: int  # Tokens that carried loss, over all ranks; the step's loss is the sum over ranks divided by it
    lr: float
    skipped: bool
