"""Text about a run's progress: its epoch, and its activity besides steps."""

from ...protocol.messages.telemetry import EarlyStop
from ...protocol.text import sanitize
from .run import RunModel

_ACTIVITY_SECONDS = 1.0
"""Seconds after which a phase without an ``activity`` message is named in the summary."""

_PHASE_ACTIVITIES = {"eval": "evaluation", "checkpoint": "checkpoint"}


def activity_words(model: RunModel) -> str:
    """Return the run's activity besides steps, with its progress; empty while it trains, or after its end."""
    if model.state not in ("starting", "training"):
        return ""
    activity = model.training.activity
    if activity is not None:
        part = f" {activity.done:,}/{activity.total:,}" if activity.total else ""
        return f"{sanitize(activity.name, 20)}{part}"
    for rank in model.ranks.values():
        beat = rank.beat
        if beat is not None and beat.phase in _PHASE_ACTIVITIES and rank.alive:
            begun = beat.phase_started + rank.clock_offset
            return _PHASE_ACTIVITIES[beat.phase] if model.now - begun >= _ACTIVITY_SECONDS else ""
    return ""


def epoch_words(model: RunModel) -> str:
    """Return completed and planned epochs: ``1.25 / 3``; empty if unknown."""
    if model.epoch is None or model.plan is None or not model.plan.epochs:
        return ""
    planned = f"{model.plan.epochs:.2f}".rstrip("0").rstrip(".")
    return f"{model.epoch:.2f} / {planned}"


def early_stop_words(stop: EarlyStop) -> str:
    """Return the reason of an early end of training: ``stopped early at step 14: no lower loss in ...``."""
    words = f"stopped early at step {stop.step:,}: no lower loss in {stop.evaluations:,} evaluation"
    words += "s" if stop.evaluations != 1 else ""
    if stop.best_loss is not None:
        words += f"; best {stop.best_loss:.4f}" + (f" at step {stop.best_step:,}" if stop.best_step else "")
    return words
