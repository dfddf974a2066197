"""The probe of a rank: what every hook calls, and what code inside the rank may ask.

Methods that hooks call are guarded: whatever goes wrong in them switches the probe off with one line in
``logs/probe.log``, and the training never notices.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch

from ...protocol.telemetry import LogLine, Plan, SelfDump
from . import active, batch, guard, values
from .about import About
from .device import Device
from .guarded import guarded
from .hold import Hold
from .oom import report_failed_allocation, watch_cuda
from .oomhistory import OomHistory
from .phasemarks import PhaseMarks
from .raw import StepRaw
from .tracker import Tracker

OUTBOX_LIMIT = 20_000
"""Items waiting for the publisher; beyond it they are dropped and counted: a stuck publisher costs no memory."""


_is_grad_enabled = torch.is_grad_enabled


def _nothing() -> None:
    return None


class Probe:
    """One rank's probe; there is at most one in a process (``api.current()``).

    Args:
        about: who this rank is.
        sends_logs: whether it sends its own log lines.
    """

    def __init__(self, about: About, sends_logs: bool = False) -> None:
        self.about = about
        self.sends_logs = sends_logs
        self.enabled = True
        self.thread = get_ident()
        """The training thread. Only it moves phases."""
        self.outbox: deque[Any] = deque()
        self.folding: deque[StepRaw] = deque()
        """Steps the publisher has taken and not sent yet: the device has not come past their ends."""
        self.overflowed = 0
        self.device = Device(self._note_script_reset)
        self.tracker = Tracker(self.device.memory, self.device.mark_event, active.counts, self._finish_step)
        self.engine_steps = False
        """A DeepSpeed engine makes the updates, so a bare optimizer's step is a part of one."""
        self.in_update = False
        self.in_backward = False
        self.updater: Any = None
        """The bare optimizer that is updating."""
        self.forward_by = ""
        """What tells where the forward begins (``engine``, ``trainer``, ``parallel``), so that ``data`` goes on until
        then; empty: nothing does, and the forward is what lies between a batch and its backward."""
        self.sum_losses = False
        self.primary: Any = None
        """The optimizer whose updates are the steps, where no engine makes them."""
        self.engine: Callable[[], Any] = _nothing
        """The DeepSpeed engine, once there is one and while it lives."""
        self.model: Callable[[], Any] = _nothing
        """The model, once it is known and while it lives."""
        self.plan_message: Plan | None = None
        self.can_stop = False
        """Somebody in this process heeds ``stop_requested``."""
        self.stop_at: int | None = None
        self.failed = ""
        self.self_dump: SelfDump | None = None
        """How its stacks are had from outside, once that is prepared."""
        self.hold = Hold()
        self.oom_history = OomHistory()
        self.phase_marks = PhaseMarks()
        self.steps_done = 0
        """Steps this process has finished, whatever their numbers."""
        self.ooms = 0
        """Allocations that failed so far."""
        self.step_sent = 0
        """The last step whose message has been sent; for the publisher thread."""
        self.step_seconds = 0.0
        """How long a step takes, as far as the publisher knows: the median of the last ones."""
        self._unscaled: tuple[int, Any] | None = None
        self._fetched: Any = None
        """The latest batch of a dataloader, until its forward begins."""
        self._last_iterator: Callable[[], Any] = _nothing

    # For code inside the rank ------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Be in phase ``name`` (one of ``protocol.telemetry.PHASES``) for the length of a ``with`` block.

        Whatever hooks see inside does not change the phase; an optimizer update inside still ends the step.
        """
        before = self._open(name) if self.thread == get_ident() else None
        try:
            yield
        finally:
            if before is not None:
                self._close(before)

    def plan(self, total_steps: int, epochs: float | None = None, output_dir: str = "") -> None:
        """Say how many optimizer updates the run means to make, over how many epochs, and where it writes."""
        self.plan_message = Plan(self.about.rank, int(total_steps), epochs, str(output_dir))
        self.hand_over(self.plan_message)

    @guarded
    def report(
        self,
        loss: Any = None,
        lr: float | None = None,
        grad_norm: Any = None,
        loss_scale: float | None = None,
        step: int | None = None,
        attention_mask: Any = None,
        batch_shape: list[int] | None = None,
        samples: int | None = None,
        tokens: int | None = None,
        padded_tokens: int | None = None,
    ) -> None:
        """Say what the hooks cannot know about the step in the making; tensors are read later, without waiting.

        Args:
            loss: the step's loss, or one micro-step's loss tensor (several are averaged).
            lr: the learning rate.
            grad_norm: the gradient norm.
            loss_scale: the loss scale.
            step: the number of the last finished step, after a resume.
            attention_mask: of one micro-batch; its non-zero elements are counted as tokens.
            batch_shape: of the micro-batch's input ids.
            samples: to add to the step's samples.
            tokens: to add to the step's tokens, padding excluded.
            padded_tokens: to add to the step's tokens, padding included.
        """
        notes = self.tracker.notes
        if isinstance(loss, float):
            notes.reported_loss = loss
        elif loss is not None:
            notes.losses.append(values.fetch(loss))
        if lr is not None:
            notes.lr = lr
        if grad_norm is not None:
            notes.grad_norm = values.fetch(grad_norm)
        if loss_scale is not None:
            notes.loss_scale = loss_scale
        if step is not None:
            self.tracker.step = step
        if batch_shape is not None:
            notes.shape = list(batch_shape)
        if attention_mask is not None:
            notes.tokens.append(values.fetch_count(attention_mask))
        elif tokens is not None:
            notes.tokens.append(tokens)
        notes.samples += samples or 0
        notes.padded_tokens += padded_tokens or 0

    def stop_requested(self) -> bool:
        """Tell whether somebody asked the run to save and end after the current step.

        True on every rank from the same step on, when the request names the step (``ftmon stop`` does).
        """
        self.can_stop = True
        return self.stop_at is not None and self.tracker.step >= self.stop_at

    # For hooks ---------------------------------------------------------------------------------------------------

    @guarded
    def fetching(self, iterator: Any) -> None:
        """The training thread asks a dataloader for a batch; inside ``no_grad`` or an eval's loader it is ``eval``."""
        tracker = self.tracker
        if tracker.depth or self.in_update:
            return
        if not _is_grad_enabled() or (tracker.phase == "eval" and getattr(iterator, "_ftmon_eval", False)):
            iterator._ftmon_eval = True
            tracker.enter("eval")
        else:
            self._enter("data")
        self._last_iterator = weakref.ref(iterator)  # a strong one would keep its workers alive

    @guarded
    def fetched(self, found: Any) -> None:
        """A batch has come: without a forward hook, the forward begins now."""
        if self.forward_by:
            if self.device.events is not None:
                self._fetched = found
        elif self.tracker.phase == "data":
            start = perf_counter_ns()
            batch.note(self.tracker.notes, found, is_forward=False, later=self.device.events is not None)
            self.tracker.cost_ns += perf_counter_ns() - start
            self._enter("forward")

    @guarded
    def forwarding(self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model's forward begins."""
        if not training or not _is_grad_enabled():
            if not self.tracker.depth:
                if self.tracker.phase in ("data", "forward"):
                    iterator = self._last_iterator()
                    if iterator is not None:
                        iterator._ftmon_eval = True
                    self.tracker.rename("eval")
                else:
                    self.tracker.enter("eval")
            return
        self._enter("forward")
        start = perf_counter_ns()
        fetched, self._fetched = self._fetched, None
        batch.note(self.tracker.notes, (args, kwargs), True, self.device.events is not None, fetched)
        self.tracker.cost_ns += perf_counter_ns() - start

    @guarded
    def expect_forward(self, by: str) -> None:
        """From now on ``by`` tells where a forward begins; a batch noted as it was fetched will be noted there."""
        self.forward_by = by
        notes = self.tracker.notes
        notes.shape, notes.tokens, notes.samples, notes.padded_tokens = [], [], 0, 0

    @guarded
    def going_backward(self, loss: Any, scaled: bool | None = None) -> bool:
        """A backward begins; returns whether it is an outermost one.

        Args:
            loss: what it starts from.
            scaled: True: the script divides by the accumulation steps itself; None: judge by the loss's last operation.
        """
        if self.in_backward or self.in_update:
            return False
        self.in_backward = True
        tracker = self.tracker
        if not self.forward_by and tracker.phase == "idle" and not tracker.depth:
            tracker.rename("forward")
        self._enter("backward")
        start = perf_counter_ns()
        notes = self.tracker.notes
        notes.micro_steps += 1
        unscaled, self._unscaled = self._unscaled, None
        if unscaled is not None and unscaled[0] == id(loss):
            loss = unscaled[1]
        if scaled is None:
            scaled = type(getattr(loss, "grad_fn", None)).__name__ == "DivBackward0"
        notes.sum_losses = self.sum_losses or scaled
        if loss is not None:
            notes.losses.append(values.fetch(loss))
        self.tracker.cost_ns += perf_counter_ns() - start
        return True

    @guarded
    def went_backward(self) -> None:
        """An outermost backward is over."""
        self.in_backward = False
        if self.tracker.phase == "backward":
            self._enter("idle")

    @guarded
    def note_scaling(self, scaled: Any, original: Any) -> None:
        """A loss was multiplied by a loss scale: the backward of ``scaled`` is that of ``original``."""
        self._unscaled = (id(scaled), original)

    @guarded
    def updating(self, lr: Any) -> None:
        """An optimizer update begins."""
        self._enter("optimizer")
        self.in_update = True
        if lr is not None:
            self.tracker.notes.lr = values.fetch(lr)

    @guarded
    def updated(
        self, number: int | None = None, grad_norm: Any = None, loss_scale: Any = None, overflow: bool = False
    ) -> None:
        """An optimizer update is over, and with it the step."""
        notes = self.tracker.notes
        if grad_norm is not None:
            start = perf_counter_ns()
            notes.grad_norm = values.fetch(grad_norm)
            self.tracker.cost_ns += perf_counter_ns() - start
        if loss_scale is not None:
            notes.loss_scale = values.fetch(loss_scale)
        notes.overflow = overflow
        self.in_update = False
        self.updater = None
        self.tracker.end_step(number)

    @guarded
    def skipped_update(self, optimizer: Any) -> None:
        """A loss scaler did not let the optimizer update."""
        if self.primary is None or optimizer is self.primary:
            self._enter("optimizer")
            self.tracker.notes.overflow = True
            self.tracker.end_step()

    @guarded
    def not_updated(self) -> None:
        """What looked like an update was none (another optimizer than the one that makes the steps)."""
        self.in_update = False
        self.updater = None
        self._enter("idle")

    @guarded
    def open_scope(self, name: str) -> str:
        """Begin an explicit phase; the result goes to ``close_scope``."""
        return self._open(name)

    @guarded
    def close_scope(self, before: str) -> None:
        """End an explicit phase."""
        self._close(before)

    @guarded
    def adopt_thread(self) -> None:
        """The caller's thread is the one that trains."""
        self.thread = get_ident()

    @guarded
    def look_at_device(self) -> None:
        """Find out now whether the script has CUDA running."""
        if not self.device.settled:
            self._settle_device()

    @guarded
    def saw_error(self, error: BaseException) -> None:
        """An exception came through a hook: report it if it is an allocation that failed."""
        report_failed_allocation(self, error)

    # For everybody -----------------------------------------------------------------------------------------------

    def hand_over(self, item: Any) -> None:
        """Give an item to the publisher: never waits."""
        if len(self.outbox) < OUTBOX_LIMIT:
            self.outbox.append(item)
        else:
            self.overflowed += 1

    def unsent_steps(self) -> list[StepRaw]:
        """List the finished steps that nobody has made a message of yet, oldest first; any thread."""
        for _ in range(5):
            with contextlib.suppress(RuntimeError):  # the publisher took one meanwhile
                return [*self.folding, *(item for item in self.outbox if isinstance(item, StepRaw))]
        return []

    def hand_over_line(self, stream: Any, text: str, time: float) -> None:
        """Give a line of output to the publisher."""
        self.hand_over(LogLine(self.about.rank, time, stream, text))

    def disable(self, error: BaseException) -> None:
        """Switch the probe off after an error of its own."""
        self.enabled = False
        guard.log_error("the probe has switched itself off", error)

    def _enter(self, phase: str) -> None:
        if not self.device.settled:
            self._settle_device()
        self.tracker.enter(phase)

    def _open(self, phase: str) -> str:
        if not self.device.settled:
            self._settle_device()
        return self.tracker.open_scope(phase)

    def _close(self, before: str) -> None:
        self.tracker.close_scope(before)

    def _settle_device(self) -> None:
        if self.device.settle():
            self.tracker.switch(self.device.memory, self.device.mark_event, self.device.blank)
            watch_cuda(self)
            self.say_hello()

    def say_hello(self) -> None:
        """Have the publisher introduce this rank, anew if it has already."""
        self.hand_over("hello")

    def _note_script_reset(self, stats: Any) -> None:
        if self.enabled and self.thread == get_ident():
            self.tracker.note_reset(stats)

    def _finish_step(self, raw: StepRaw) -> None:
        self.steps_done += 1
        self.hand_over(raw)
