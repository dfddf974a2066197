"""Finds the model that a bare optimizer trains, if no wrapper, engine or Trainer names it."""

import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..frame_locals import frame_locals, receiver_name
from .model import describe_model, own_model

_MOST_FRAMES = 24
_MOST_ATTRIBUTES = 200


class Optimized:
    """The models and parameters of the bare optimizers of one training."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._sizes: dict[int, tuple[int, bool]] = {}
        """Number of elements of each parameter, and whether it is trained, by the parameter's id."""

    def forget(self) -> None:
        """Forget all optimizers, because another training has begun."""
        self.__init__()

    def add(self, optimizer: Any, frame: FrameType | None) -> dict[str, Any]:
        """Register an optimizer; return the trained models as fields of ``Hello``.

        Args:
            optimizer: the optimizer, with its parameters.
            frame: the frame that creates it; the model is searched in the variables of it and of its callers.
        """
        own = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        model = _holding(own.keys(), frame) if own else None
        known = [found for reference in self._models if (found := reference()) is not None]
        if model is not None and all(model is not each for each in known):
            known.append(model)
            self._models = [weakref.ref(each) for each in known]
        parameters = {**own, **(dict(_by_id(model)) if model is not None else {})}
        self._sizes.update(
            {key: (int(each.numel()), bool(each.requires_grad)) for key, each in parameters.items()},
        )
        return {
            "model": " + ".join(describe_model(each)["model"] for each in known),
            "parameters": sum(size for size, _ in self._sizes.values()),
            "trainable_parameters": sum(size for size, is_trained in self._sizes.values() if is_trained),
        }


def _by_id(model: Any) -> Iterator[tuple[int, Any]]:
    return ((id(parameter), parameter) for parameter in model.parameters())


def _holding(wanted: Any, frame: FrameType | None) -> Any:
    """Return the smallest model with all the parameters in a variable near ``frame``; None if there is none."""
    module_class: Any = sys.modules["torch.nn"].Module
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        found = [
            (sum(1 for _ in held), model)
            for model in _variables(frame, module_class)
            if wanted <= (held := {key for key, _ in _by_id(model)})
        ]
        if found:
            return own_model(min(found, key=lambda each: each[0])[1])
        frame = frame.f_back
    return None


def _variables(frame: FrameType, module_class: Any) -> Iterator[Any]:
    """Yield the modules among a frame's variables and among the attributes of its ``self``."""
    variables = frame_locals(frame)
    for value in list(variables.values()):
        if isinstance(value, module_class):
            yield value
    attributes = getattr(variables.get(receiver_name(frame)), "__dict__", None)
    if isinstance(attributes, dict):
        for value in list(attributes.values())[:_MOST_ATTRIBUTES]:
            if isinstance(value, module_class):
                yield value
