"""Interface of the probe for code inside a rank: the recipe, ``ftmon.watch`` and the TrainerCallback use this alone."""

from . import active
from .probe import Probe

__all__ = ["Probe", "current"]


def current() -> Probe | None:
    """Return this process's probe, or None if it is not watched (or the probe has switched itself off)."""
    probe = active.probe
    return probe if probe is not None and probe.guard.enabled else None
