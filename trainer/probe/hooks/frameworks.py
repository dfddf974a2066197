"""Hooks into transformers and accelerate: every ``Trainer``, its phases and micro-steps, and prefetching dataloaders.

A callback in each ``Trainer`` reports the plan, evaluations and checkpoints, and honours ``ftmon stop``. Its class is
created on first access, so that importing ftmon does not import transformers.
"""

import functools
import inspect
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sized
from types import ModuleType
from typing import Any

from torch import is_grad_enabled
from torch.compiler import is_compiling

from .. import active
from ..active import current, mine, switched_on
from ..events import OnHost
from ..guard import logged, replace
from .torch import evaluating, scoped


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


def install_masking(module: ModuleType) -> None:
    """Hook into the function in which all models of transformers begin to make their attention masks."""
    if hasattr(module, "_preprocess_mask_arguments"):
        replace(module, "_preprocess_mask_arguments", _attending)


def _attending(original: Any) -> Callable[..., Any]:
    names = list(inspect.signature(original).parameters)
    mask, positions = names.index("attention_mask"), names.index("position_ids")
    cache = next((place for place, name in enumerate(names) if name in ("cache", "past_key_values")), -1)

    def _preprocess_mask_arguments(*args: Any, **kwargs: Any) -> Any:
        events = active.events
        if events is not None and not events.is_followed and not is_compiling() and is_grad_enabled():
            events = mine()
            if events is not None:
                given = [*args, *(kwargs.get(name) for name in names[len(args) :])]
                cached = cache >= 0 and given[cache] is not None
                events.attending(given[0], given[mask], given[positions], sys._getframe(1), cached=cached)
        return original(*args, **kwargs)

    return _preprocess_mask_arguments


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        add_callback(self)
        owner = next(kind for kind in type(self).__mro__ if "training_step" in vars(kind))
        code = getattr(inspect.unwrap(owner.training_step), "__code__", None)
        if code is not None and "training_step" not in code.co_names:
            replace(owner, "training_step", _training_step)  # it does not call the method of its base class

    return __init__


@logged("cannot add the callback to a Trainer")
def add_callback(trainer: Any) -> None:
    """Add the callback to a ``Trainer``, unless it has one."""
    kind = callback_class()
    if not any(isinstance(callback, kind) for callback in trainer.callback_handler.callbacks):
        trainer.add_callback(kind())


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


_UNDER_WAY = 2  # Batches that a loader has fetched when it returns the first of them; earlier ones were left out


def install(module: ModuleType) -> None:
    """Hook into the loaders of ``accelerate.data_loader``, which prefetch one batch."""
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        replace(getattr(module, name), "__iter__", _iterating)


def _iterating(original: Any) -> Callable[..., Any]:
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        batches = original(self)
        prefetched: deque[OnHost] = deque(maxlen=_UNDER_WAY)
        while True:
            events = mine()
            if events is not None:
                events.prefetching(prefetched)
            try:
                batch = next(batches)
            except BaseException as error:
                if events is not None:
                    events.prefetched_all()
                if isinstance(error, StopIteration):
                    return
                raise
            if events is not None:
                events.delivered(batch)
            yield batch

    return __iter__


_harmless = logged("an event of the Trainer's callback")  # What an event raises would end ``Trainer.train``


@functools.cache
def callback_class() -> Any:
    """Return the class of the callback."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        """Reports a ``Trainer``; ``begin`` is called with its arguments if nothing watches this process then."""

        def __init__(self, begin: Callable[[Any], object] | None = None) -> None:
            self._begin = begin
            self._best: dict[str, float] = {}

        @_harmless
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self._begin is not None and current() is None:
                self._begin(args)
            probe, events = current(), switched_on()
            if probe is None or events is None:
                return
            defaults = {
                "micro_batch": int(args.per_device_train_batch_size),
                "grad_accumulation": int(args.gradient_accumulation_steps),
                "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
            }
            probe.support_stops()
            events.trainer(kwargs.get("model"), int(state.global_step), defaults)
            total, epochs = int(state.max_steps), _epochs(args, kwargs.get("train_dataloader"))
            probe.plan(
                total,
                epochs,
                str(args.output_dir),
                evaluate_every=_interval(args, state, "eval", total, epochs),
                evaluate_at_end=_strategy(args, "eval") == "steps",
                checkpoint_every=_interval(args, state, "save", total, epochs),
                checkpoint_at_end=_strategy(args, "save") == "steps",
                first_step=int(state.global_step),
            )

        @_harmless
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            probe = current()
            if probe is not None and probe.stop_requested():
                control.should_save = True
                control.should_training_stop = True
            return control

        @_harmless
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            probe = current()
            if probe is not None and metrics and state.is_world_process_zero:
                self._report(probe, metrics, int(state.global_step))

        @_harmless
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            probe = current()
            if probe is not None and state.is_world_process_zero:
                step = int(state.global_step)
                probe.checkpoint(os.path.join(str(args.output_dir), f"checkpoint-{step}"), step=step)

        def _report(self, probe: Any, metrics: dict[str, Any], step: int) -> None:
            figures = {key: float(value) for key, value in metrics.items() if isinstance(value, int | float)}
            key = next((key for key in figures if key.endswith("_loss")), "")
            prefix = key.removesuffix("_loss") if key else "eval"
            name = prefix.removeprefix("eval").strip("_") or "evaluation"
            loss = figures.get(key)
            best = loss is not None and loss < self._best.get(name, float("inf"))
            if best and loss is not None:
                self._best[name] = loss
            speed = ("runtime", "samples_per_second", "steps_per_second", "loss")
            others = {
                other.removeprefix(f"{prefix}_"): value
                for other, value in figures.items()
                if other != "epoch" and not other.endswith(speed)
            }
            seconds = figures.get(f"{prefix}_runtime", 0.0)
            probe.evaluation(loss, name=name, seconds=seconds, best=best, metrics=others, step=step)

    return Callback


def _strategy(args: Any, what: str) -> str:
    strategy = getattr(args, f"{what}_strategy", None)
    return str(getattr(strategy, "value", strategy))


def _epochs(args: Any, batches: Any) -> float | None:
    """Return the planned epochs of a ``Trainer``; None if its data have no length.

    Not the state's ``num_train_epochs``, which is rounded up, and ``sys.maxsize`` where the data have no length.
    """
    if args.max_steps <= 0:
        return float(args.num_train_epochs)
    if not isinstance(batches, Sized):
        return None
    try:
        steps = -(-len(batches) // int(args.gradient_accumulation_steps))
    except Exception:  # a DataLoader over an iterable data set has a length by name only
        return None
    return args.max_steps / max(1, steps)


def _interval(args: Any, state: Any, what: str, total: int, epochs: float | None) -> int:
    """Return the steps between two evaluations or saves of a ``Trainer``; 0: none, or not known."""
    strategy = _strategy(args, what)
    if strategy == "steps":
        return int(getattr(state, f"{what}_steps", 0) or 0)
    return round(total / epochs) if strategy == "epoch" and epochs else 0
