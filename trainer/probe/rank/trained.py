"""Objects that a rank trains: engine, model and optimizer, as found by hooks."""

from collections.abc import Callable
from typing import Any


def _nothing() -> None:
    return None


class Trained:
    """Objects that this rank trains. Hooks set them on the training thread; any thread may read them."""

    __slots__ = ("engine", "model", "partitions", "primary", "shifts_labels")

    def __init__(self) -> None:
        self.engine: Callable[[], Any] = _nothing
        """The DeepSpeed engine, once there is one and while it lives."""
        self.model: Callable[[], Any] = _nothing
        """The model, once it is known and while it lives."""
        self.primary: Any = None
        """The optimizer whose updates are the steps, where no engine makes them."""
        self.partitions = 1
        """Number of ranks over which ZeRO partitions the optimizer's state."""
        self.shifts_labels = False
        """The model predicts the next token from labels that are passed unshifted."""
