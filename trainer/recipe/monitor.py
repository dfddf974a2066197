"""The recipe's side of the probe: the same calls whether or not something watches this process."""

from contextlib import AbstractContextManager, nullcontext

from ..probe import api


class Monitor:
    """What the loop tells the probe, and asks it. Without a probe nothing happens."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase of the training thread."""
        probe = api.current()
        return probe.phase(name) if probe is not None else nullcontext()

    def plan(self, total_steps: int, epochs: float, output_dir: str) -> None:
        """Say how long the run means to go on."""
        probe = api.current()
        if probe is not None:
            probe.plan(total_steps, epochs, output_dir)

    def resumed(self, step: int) -> None:
        """Say that training goes on after optimizer step ``step`` of an earlier run."""
        probe = api.current()
        if probe is not None:
            probe.report(step=step)

    def stop_requested(self) -> bool:
        """Tell whether somebody asked for a checkpoint and an end after the current step."""
        probe = api.current()
        return probe is not None and probe.stop_requested()
