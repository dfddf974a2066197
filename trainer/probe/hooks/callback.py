"""The ``TrainerCallback`` that reports the plan, evaluations and checkpoints, and honours ``ftmon stop``.

``ftmon run`` adds it to every ``Trainer``. The class is created on first access, so that importing ftmon does not
import transformers.
"""

import functools
import os
from collections.abc import Callable, Sized
from typing import Any

from ..active import switched_on
from ..api import current
from ..guard import log_error


def _harmless(event: Callable[..., Any]) -> Callable[..., Any]:
    """Make an event of the callback log its errors: what it raises would end ``Trainer.train``."""

    @functools.wraps(event)
    def safe(*args: Any, **kwargs: Any) -> Any:
        try:
            return event(*args, **kwargs)
        except Exception as error:
            log_error(f"{event.__name__} of the Trainer's callback", error)
            return None

    return safe


@functools.cache
def callback_class() -> Any:
    """Return the class of the callback."""
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        """Reports a ``Trainer`` to ftmon.

        Args:
            begin: called with the Trainer's arguments when training begins and nothing watches this process yet.
        """

        def __init__(self, begin: Callable[[Any], object] | None = None) -> None:
            self._begin = begin
            self._best: dict[str, float] = {}

        @_harmless
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Report the plan; start watching the process if it is not watched yet."""
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
            """Make the Trainer save and end after this step if that was requested."""
            probe = current()
            if probe is not None and probe.stop_requested():
                control.should_save = True
                control.should_training_stop = True
            return control

        @_harmless
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
            """Report the result of an evaluation."""
            probe = current()
            if probe is not None and metrics and state.is_world_process_zero:
                self._report(probe, metrics, int(state.global_step))

        @_harmless
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Report a checkpoint."""
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
