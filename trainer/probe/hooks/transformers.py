"""Hooks into transformers: a callback in every ``Trainer``, and its evaluation and checkpoint phases."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import guard
from ..active import mine
from ..replace import replace
from .eval_mode import evaluating
from .torch import scoped


def install_trainer(module: ModuleType) -> None:
    """Hook into ``transformers.trainer.Trainer``."""
    trainer: Any = module.Trainer
    replace(trainer, "__init__", _making)
    for name in ("evaluate", "predict"):
        replace(trainer, name, scoped("eval"))
    for name in ("_save_checkpoint", "save_model"):
        replace(trainer, name, scoped("checkpoint"))
    replace(trainer, "training_step", _training_step)


def install_modeling(module: ModuleType) -> None:
    """Hook into ``PreTrainedModel.save_pretrained``, and its own ``eval``."""
    replace(module.PreTrainedModel, "save_pretrained", scoped("checkpoint"))
    replace(module.PreTrainedModel, "eval", evaluating)


def install_generation(module: ModuleType) -> None:
    """Hook into ``GenerationMixin.generate``: outside an evaluation it is the rollout of a step."""
    replace(module.GenerationMixin, "generate", scoped("generate"))


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        add_callback(self)
        owner = next(kind for kind in type(self).__mro__ if "training_step" in vars(kind))
        code = getattr(inspect.unwrap(owner.training_step), "__code__", None)
        if code is not None and "training_step" not in code.co_names:
            replace(owner, "training_step", _training_step)  # it does not call the method of its base class

    return __init__


def add_callback(trainer: Any) -> None:
    """Add the callback to a ``Trainer``, unless it has one."""
    from .callback import callback_class

    try:
        kind = callback_class()
        if not any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(kind())
    except Exception as error:
        guard.log_error("cannot add the callback to a Trainer", error)


def _training_step(original: Any) -> Callable[..., Any]:
    """Wrap ``training_step``: report the micro-step, whose loss a ``Trainer`` divides by the accumulation."""

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, model, inputs, *args, **kwargs)
        with events.trainer_step(model, inputs, over_ranks=_is_normalised_over_ranks(self, *args, **kwargs)):
            loss = original(self, model, inputs, *args, **kwargs)
        events.trainer_loss(loss)
        return loss

    return training_step


def _is_normalised_over_ranks(trainer: Any, num_items_in_batch: Any = None, *_args: Any, **_kwargs: Any) -> bool:
    """Return whether the Trainer divides by all ranks' label tokens, and multiplies by the ranks for DDP's mean."""
    return num_items_in_batch is not None and bool(getattr(trainer.args, "average_tokens_across_devices", False))
