"""Context shared by a rank's step captures, stack captures and memory snapshots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ....protocol.messages import wire
from ..phases.pace import Pace
from ..phases.tracker import Tracker
from ..rank.context import RankContext
from ..rank.trained import Trained
from .history import Recording

Answer = Callable[[bool, str, dict[str, Any]], None]
"""Called with the result of a request: success, a text, and figures by name."""


@dataclass(frozen=True, slots=True)
class CaptureContext:
    """A rank, its phases and models, PyTorch's recorder, and the function that sends messages."""

    rank: RankContext
    tracker: Tracker
    trained: Trained
    """Engine, model and optimizer, whose storages are walked."""
    pace: Pace
    """Usual time of a step."""
    recording: Recording
    send: Callable[[wire.Message], None]
