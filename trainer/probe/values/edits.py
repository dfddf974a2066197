"""Finds changes of parameters inside DeepSpeed's ``GatheredParameters`` that do not last, and loads that change none.

Without ``modifier_rank`` they are dropped when the context ends. With it they are written to the ranks' partitions, and
the next update overwrites those from the optimizer's fp32 copy, once there is an engine.
"""

import os
import time
from itertools import islice
from types import FrameType
from typing import Any

import torch

from ....protocol.messages.telemetry import LostEdit
from ..rank.model import Trained

_MOST = 64  # Parameters of one context that are compared
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
        """Return the change that is lost as a context ends, or None; ``kept``: one rank's values are written back."""
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


def partitions_of(engine: Any) -> list[Any]:
    """Return copies of the first elements of this rank's partitions of a ZeRO-3 engine's parameters."""
    parts = [getattr(each, "ds_tensor", None) for each in islice(engine.module.parameters(), _MOST)]
    return [each.detach().flatten()[:_MOST].clone() for each in parts if each is not None and each.numel()]


def are_as_before(engine: Any, before: list[Any]) -> bool:
    """Return whether these are still the engine's (``partitions_of``)."""
    after = partitions_of(engine)
    return bool(before) and len(after) == len(before) and all(map(torch.equal, before, after))


def _sum(parameter: Any) -> Any:
    """Return numbers that change with a parameter's values, without a copy of them.

    It waits for the device, as gathering does anyway.
    """
    values = parameter.detach()
    total = values.sum(dtype=torch.float32)
    is_real = values.is_floating_point()
    return total, torch.linalg.vector_norm(values, dtype=torch.float32) if is_real else total


def _differs(before: Any, after: Any) -> bool:
    pairs = zip(before, after, strict=True)
    return not all(torch.equal(one, other) or bool(one.isnan() & other.isnan()) for one, other in pairs)
