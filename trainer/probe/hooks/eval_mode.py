"""Hooks into ``Module.eval`` and ``Module.train``: between the two calls a script evaluates its model."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from ..active import mine
from ..replace import replace

_evaluated: weakref.ref[Module] | None = None
"""The model whose evaluation began last."""


def install() -> None:
    """Hook into ``Module.eval``."""
    replace(Module, "eval", evaluating)


def evaluating(original: Any) -> Callable[..., Any]:
    """Wrap ``eval``, that of ``Module`` or of a class that overrides it."""

    def call(self: Module) -> Module:
        global _evaluated
        model = original(self)
        events = mine()
        if events is not None and events.evaluating(self):
            _evaluated = weakref.ref(self)
            replace(Module, "train", _training_again)
        return model

    return call


def _training_again(original: Any) -> Callable[..., Any]:
    """Wrap ``train`` until its next call: it recurses into all modules, and many loops call it at each step."""

    def train(self: Module, mode: bool = True) -> Module:
        if mode and _evaluated is not None and self is _evaluated():
            if Module.train is train:
                Module.train = original
            events = mine()
            if events is not None:
                events.evaluated()
        return original(self, mode)

    return train
