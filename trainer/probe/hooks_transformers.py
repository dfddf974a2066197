"""Hooks into transformers: a callback in every ``Trainer``, and its evaluation and checkpoint phases."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from .active import mine
from .hooks_torch import replace, scoped, tell_framework


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
    """Hook into ``PreTrainedModel.save_pretrained``."""
    replace(module.PreTrainedModel, "save_pretrained", scoped("checkpoint"))


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        add_callback(self)

    return __init__


def add_callback(trainer: Any) -> None:
    """Give a ``Trainer`` the callback, unless it has one."""
    from . import guard
    from .callback import make_callback

    try:
        kind = type(make_callback())
        if not any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
            trainer.add_callback(make_callback())
    except Exception as error:
        guard.log_error("cannot add the callback to a Trainer", error)


def _training_step(original: Any) -> Callable[..., Any]:
    """Tell the probe where a micro-step begins, and that a ``Trainer`` has divided its loss by the accumulation."""

    def training_step(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        probe = mine()
        if probe is not None:
            probe.sum_losses = True
            if probe.forward_by != "engine":
                if probe.forward_by != "trainer":
                    probe.expect_forward("trainer")
                    tell_framework("transformers", model)
                probe.forwarding(True, (inputs,), {})
        return original(self, model, inputs, *args, **kwargs)

    return training_step
