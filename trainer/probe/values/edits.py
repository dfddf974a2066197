"""Finds changes of parameters inside DeepSpeed's ``GatheredParameters`` that do not last.

Without ``modifier_rank`` they are dropped when the context ends. With it they are written to the ranks' partitions, and
the next update overwrites those from the optimizer's fp32 copy, once there is an engine.
"""

import os
import time
from types import FrameType
from typing import Any

from ....protocol.messages.telemetry import LostEdit
from ..rank.model import Trained

_MOST = 64
"""Parameters of one context that are compared."""
_NAMED = 8


class Edits:
    """Compares parameters at both ends of a context; for the training thread alone."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[str, list[tuple[Any, Any]]]] = {}
        """By context: the script's frame, and the parameters with their sums."""

    def entered(self, owner: Any, frame: FrameType) -> None:
        """Remember the parameters of a context that a frame has entered."""
        parameters = getattr(owner, "params", None) or []
        if not parameters or frame.f_globals.get("__name__", "").partition(".")[0] == "deepspeed":
            return
        where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        self._frames[id(owner)] = where, [(each, _sum(each)) for each in parameters[:_MOST]]

    def leaving(self, owner: Any, kept: bool, trained: Trained, rank: int, step: int) -> LostEdit | None:
        """Return the change that is lost as the context ends, or None.

        Args:
            owner: the context.
            kept: whether one rank's values are written back.
            trained: what the rank trains.
            rank: the rank.
            step: its last finished step.
        """
        where, before = self._frames.pop(id(owner), ("", []))
        engine = trained.engine()
        if not before or (kept and engine is None):
            return None
        changed = [parameter for parameter, was in before if _differs(was, _sum(parameter))]
        if not changed:
            return None
        model = trained.any_model()
        names = {id(parameter): name for name, parameter in model.named_parameters()} if model is not None else {}
        told = [names.get(id(each), str(tuple(each.shape))) for each in changed[:_NAMED]]
        return LostEdit(rank, step, time.time(), told, len(changed), where, kept)


def _sum(parameter: Any) -> Any:
    """Return a number that changes with a parameter's values. It waits for the device, as gathering does anyway."""
    values = parameter.detach()
    return values.float().sum(), values.float().square().sum()


def _differs(before: Any, after: Any) -> bool:
    return any(bool(one != other) for one, other in zip(before, after, strict=True))
