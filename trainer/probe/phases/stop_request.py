"""Request to end the script after a step."""


class StopRequest:
    """A request to save and end; the publisher sets it, the training thread reads it."""

    def __init__(self) -> None:
        self.supported = False
        """Whether the script checks for requests."""
        self.after: int | None = None
        """The step to stop after; None: no stop is requested."""

    def is_due(self, step: int) -> bool:
        """Return whether to end after step ``step``; the call shows that the script supports requests."""
        self.supported = True
        return self.after is not None and step >= self.after
