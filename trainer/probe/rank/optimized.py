"""Finds the model that a bare optimizer trains, if no wrapper, engine or Trainer names it."""

import sys
import weakref
from collections.abc import Iterator, Sequence, Set
from functools import partial
from types import FrameType
from typing import Any

from ..frame_locals import frame_locals, receiver_name
from .model import describe_model, number_of_elements, own_model

_MOST_FRAMES = 24
_MOST_ATTRIBUTES = 200


class Optimized:
    """The models and parameters of the bare optimizers of one training."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._sizes: dict[int, tuple[int, bool]] = {}
        """Number of elements of each parameter, and whether it is trained, by the parameter's id."""
        self._alive: dict[int, weakref.ref[Any]] = {}

    def forget(self) -> None:
        """Forget all optimizers, because another training has begun."""
        self.__init__()

    def add(self, optimizer: Any, frame: FrameType | None) -> dict[str, Any]:
        """Register an optimizer; return the trained models as fields of ``Hello``."""
        own = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        models = _holding(own.keys(), frame) if own else []
        known = [found for reference in self._models if (found := reference()) is not None]
        known += [model for model in models if all(model is not each for each in known)]
        self._models = [weakref.ref(each) for each in known]
        for key, each in {**own, **{key: each for model in models for key, each in _by_id(model)}}.items():
            self._sizes[key] = number_of_elements(each), bool(each.requires_grad)
            self._alive[key] = weakref.ref(each, partial(self._forget, key))
        sizes = list(self._sizes.values())  # a parameter may be freed meanwhile
        return {
            "model": " + ".join(describe_model(each)["model"] for each in known),
            "parameters": sum(size for size, _ in sizes),
            "trainable_parameters": sum(size for size, is_trained in sizes if is_trained),
        }

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        """Forget a parameter that was freed: another one may get its id."""
        if self._alive.get(key) is reference:
            del self._alive[key]
            self._sizes.pop(key, None)


def _by_id(model: Any) -> Iterator[tuple[int, Any]]:
    return ((id(parameter), parameter) for parameter in model.parameters())


def _holding(wanted: Set[int], frame: FrameType | None) -> list[Any]:
    """Return the smallest model with all the parameters in a variable near ``frame``; else several that have them."""
    module_class: Any = sys.modules["torch.nn"].Module
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    for find in (_whole, _parts):
        for each in frames:
            models = {id(model): model for model in _variables(each, module_class)}.values()
            if found := find(wanted, list(models)):
                return [own_model(model) for model in found]
    return []


def _whole(wanted: Set[int], models: Sequence[Any]) -> list[Any]:
    """Return the smallest of the models that has all the parameters, if there is one."""
    held = [(model, {key for key, _ in _by_id(model)}) for model in models]
    return [model for model, own in sorted(held, key=lambda each: len(each[1])) if wanted <= own][:1]


def _parts(wanted: Set[int], models: Sequence[Any]) -> list[Any]:
    """Return the largest models that train nothing but such parameters, if together they have all of them."""
    trained = [(model, {key for key, each in _by_id(model) if each.requires_grad}) for model in models]
    found: list[Any] = []
    missing = set(wanted)
    for model, own in sorted(trained, key=lambda each: -len(each[1])):
        if own and own <= missing:
            found.append(model)
            missing -= own
    return [model for model in models if any(model is each for each in found)] if not missing else []


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
