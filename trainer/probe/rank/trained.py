"""Objects that a rank trains: engine, model and optimizer, as found by hooks."""

from collections.abc import Callable
from typing import Any

from ..guard import nothing
from .batch_share import WHOLE


class Trained:
    """Objects that this rank trains. Hooks set them on the training thread; any thread may read them."""

    __slots__ = ("engine", "model", "partitions", "primary", "shifts_labels", "tensor_parallel")

    def __init__(self) -> None:
        self.engine: Callable[[], Any] = nothing
        """Returns the DeepSpeed engine; None before there is one, and after it was freed."""
        self.model: Callable[[], Any] = nothing
        """Returns the model; None while unknown, and after it was freed."""
        self.primary: Callable[[], Any] = nothing
        """Returns the optimizer whose updates are the steps, if there is no engine; None once it was freed."""
        self.partitions = 1
        """Number of ranks over which ZeRO partitions the optimizer's state."""
        self.tensor_parallel = WHOLE
        """This rank's part of the batches that the ranks of its tensor-parallel group train on together."""
        self.shifts_labels = False
        """The model predicts the next token from labels that are passed unshifted."""
