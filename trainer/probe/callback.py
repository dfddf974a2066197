"""A Hugging Face ``TrainerCallback``: tells the monitor the plan, and lets ``ftmon stop`` end a ``Trainer`` in order.

``ftmon run`` adds it to every ``Trainer`` by itself; ``Trainer(..., callbacks=[ftmon.Callback()])`` watches a script
that is started without ftmon. The class is made when it is first asked for, so that importing ftmon imports no
transformers.
"""

import functools
from typing import TYPE_CHECKING, Any

from .api import current

if TYPE_CHECKING:
    from transformers import TrainerCallback as Callback
else:

    def __getattr__(name: str) -> Any:
        """Make ``Callback`` when it is first asked for."""
        if name == "Callback":
            return _callback_class()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Callback", "make_callback"]


def make_callback() -> Any:
    """Make a callback that uses the probe that is there, and starts none."""
    return _callback_class()(start=False)


@functools.cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    class Callback(TrainerCallback):
        """Reports a ``Trainer`` to ftmon.

        Args:
            start: begin to watch when nothing watches this process yet.
        """

        def __init__(self, start: bool = True) -> None:
            self._start = start

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Tell the plan; begin to watch where that is still to be done."""
            if self._start and current() is None:
                from .watch import watch

                watch(None, name=_run_name(args))
            probe = current()
            if probe is None:
                return
            facts = probe.about.facts
            facts["framework"] = "transformers"
            facts.setdefault("micro_batch", int(args.per_device_train_batch_size))
            facts.setdefault("grad_accumulation", int(args.gradient_accumulation_steps))
            facts.setdefault("precision", "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
            probe.tracker.step = max(probe.tracker.step, int(state.global_step))
            probe.can_stop = True
            if not probe.forward_by:
                probe.expect_forward("trainer")
            probe.plan(int(state.max_steps), float(state.num_train_epochs), str(args.output_dir))
            probe.say_hello()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            """Save and end after this step when somebody asked for it."""
            probe = current()
            if probe is not None and probe.stop_requested():
                control.should_save = True
                control.should_training_stop = True
            return control

    return Callback


def _run_name(args: Any) -> str:
    return str(getattr(args, "run_name", None) or "")  # empty: after the script
