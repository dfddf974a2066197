"""Detects whether a loop trains on each batch by itself, or on several with one backward."""


class OneEach:
    """Counts backwards after one batch and after several; true while most followed one batch."""

    def __init__(self) -> None:
        self._one = self._several = 0

    def __bool__(self) -> bool:
        return self._one > self._several

    @property
    def known(self) -> bool:
        """Whether any backward was counted."""
        return bool(self._one or self._several)

    def trained(self, batches: int) -> None:
        """Count a backward, the first one after ``batches`` batches."""
        if batches == 1:
            self._one += 1
        elif batches:
            self._several += 1
