"""Interface of code inside a rank to its probe: the recipe, scripts with ``ftmon.watch()``."""

from collections.abc import Generator
from contextlib import contextmanager
from math import exp
from time import time
from typing import Any

from ...protocol.messages.telemetry import Activity, Checkpoint, CheckpointFailed, EarlyStop, Evaluation, Plan
from .device import cuda
from .guard import guarded
from .loop.training import Training
from .phases.tracker import BatchCounts, StopRequest


class Probe:
    """One rank's probe as its script sees it; there is at most one in a process (``active.current()``).

    An error in here switches the probe off with one line in ``logs/probe.log``; the training continues.
    """

    def __init__(self, training: Training, stop: StopRequest) -> None:
        self.guard, self.rank = training.guard, training.rank.rank
        self._introduction, self._outbox, self._stop = training.introduction, training.outbox, stop
        self._phases, self._state = training.phases, training.state
        self._tracker, self._updates = training.tracker, training.updates
        self.begin_cell, self.end_cell = training.begin_cell, training.end_cell

    @property
    def step(self) -> int:
        """The last finished step."""
        return self._tracker.step

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Be in phase ``name`` (one of ``protocol.messages.telemetry.PHASES``) for the length of a ``with`` block.

        Hooks do not change the phase inside it; an optimizer update inside still ends the step.
        """
        before = self._phases.open(name) if self.guard.is_training_thread() else None
        try:
            yield
        finally:
            if before is not None:
                self._phases.close(before)

    def plan(
        self,
        total_steps: int,
        epochs: float | None = None,
        output_dir: str = "",
        *,
        evaluate_every: int = 0,
        evaluate_at_end: bool = False,
        checkpoint_every: int = 0,
        checkpoint_at_end: bool = False,
        first_step: int = 0,
    ) -> None:
        """Report the planned number of optimizer updates, and the evaluations and checkpoints between them.

        Steps before a resume (``first_step``) are included. ``evaluate_every`` and ``checkpoint_every`` are steps
        between two of them (0: none), ``..._at_end``: there is one after the last step.
        """
        self._introduction.plan = Plan(
            self.rank,
            int(total_steps),
            epochs,
            str(output_dir),
            evaluate_every=max(0, int(evaluate_every)),
            evaluate_at_end=evaluate_at_end,
            checkpoint_every=max(0, int(checkpoint_every)),
            checkpoint_at_end=checkpoint_at_end,
            first_step=max(0, int(first_step)),
        )
        self._outbox.hand_over(self._introduction.plan)

    @guarded
    def micro_batch(
        self, tokens: int, label_tokens: int, pairs: int = 0, longest: int = 0, samples: int | None = None
    ) -> None:
        """Report the exact counts of one micro-batch; they replace the hooks' counts for this step.

        ``tokens`` are without padding; ``label_tokens`` those that the loss is a mean over, by which the rank is
        weighted in the mean over ranks unless losses are normalised over all ranks already; ``pairs`` those of query
        and key that attention computes (``protocol.host.machine.causal_pairs``), ``longest`` the longest
        document's tokens (0: not known); ``samples`` are rows, for ranks that share rows this one's part (None: those
        of the forward's batch).
        """
        labels = 0 if self._state.normalised_over_ranks else int(label_tokens)
        self._tracker.own_notes().counts.append(BatchCounts(int(tokens), labels, int(pairs), int(longest), samples))

    def normalise_over_ranks(self) -> None:
        """Report that losses are divided by the label tokens of all ranks, so that ranks count alike in the mean."""
        self._state.normalised_over_ranks = True

    def evaluation(
        self,
        loss: float | None,
        *,
        name: str = "evaluation",
        label_tokens: int = 0,
        seconds: float = 0.0,
        best: bool = False,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Report the result of an evaluation over all ranks; one rank does, once for each split.

        ``loss`` is a mean over the ``label_tokens`` of all ranks, each counted once; ``name`` the split or data set;
        ``best``: no evaluation of this name had a lower loss before; ``metrics`` are other results. Without ``step`` it
        is the last finished one.
        """
        loss = None if loss is None else float(loss)
        ppl = exp(loss) if loss is not None and loss < 700 else None  # beyond it a float overflows
        known = {str(key)[:100]: float(value) for key, value in (metrics or {}).items()}
        figures = (name[:256], loss, ppl, int(label_tokens), float(seconds), best, known)
        self._outbox.hand_over(Evaluation(self.rank, self._at(step), time(), *figures))

    def checkpoint(
        self, path: str, *, size: int = 0, seconds: float = 0.0, best: bool = False, step: int | None = None
    ) -> None:
        """Report that a checkpoint is complete on disk; one rank does.

        ``size`` is the bytes of all its files (0: not known), ``seconds`` the time that it took; ``best``: it has the
        lowest evaluation loss so far. Without ``step`` it has the last finished one.
        """
        self._outbox.hand_over(
            Checkpoint(self.rank, self._at(step), time(), str(path), int(size), float(seconds), best)
        )

    def checkpoint_failed(self, path: str, error: str, *, kept: str = "", step: int | None = None) -> None:
        """Report that a checkpoint could not be written, and that training continues; one rank does.

        ``kept`` is the newest complete checkpoint; empty: there is none.
        """
        words = (str(path), str(error)[:500], str(kept))
        self._outbox.hand_over(CheckpointFailed(self.rank, self._at(step), time(), *words))

    def stopped_early(
        self, evaluations: int, best_loss: float | None = None, best_step: int = 0, *, step: int | None = None
    ) -> None:
        """Report that the training ends now because ``evaluations`` in a row had no new lowest loss; one rank does.

        ``best_step`` is the step the lowest loss was found after; 0: not known.
        """
        figures = (int(evaluations), best_loss, int(best_step))
        self._outbox.hand_over(EarlyStop(self.rank, self._at(step), time(), *figures))

    def activity(
        self, name: str, text: str = "", done: int = 0, total: int = 0, over: bool = False, seconds: float = 0.0
    ) -> None:
        """Report work of the run besides its steps: at its beginning, now and then meanwhile, at its end.

        ``name`` is ``rehearsal``, ``evaluation``, ``checkpoint``, ``export``, ``data`` ...; ``text`` a detail for a
        person; ``done`` of ``total`` parts are done (0: not known); ``over``: it has ended, ``seconds`` after its
        start.
        """
        self._outbox.hand_over(
            Activity(self.rank, time(), name[:256], self._tracker.step, text[:500], done, total, over, seconds)
        )

    def _at(self, step: int | None) -> int:
        return self._tracker.step if step is None else step

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Exclude a ``with`` block from training: its updates end no steps, and it is part of ``init``."""
        before = self._phases.open("init") if self.guard.is_training_thread() and not self._state.rehearsing else None
        if before is None:
            yield
            return
        self._state.rehearsing = True
        try:
            yield
        finally:
            self._updates.end_rehearsal(before)

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
        flops: float | None = None,
    ) -> None:
        """Report figures of the current step that hooks cannot know; tensors are read later, without waiting.

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
            flops: FLOPs of the model for this rank's tokens of the step, forward and backward, without recomputation.
        """
        notes = self._tracker.own_notes()
        if isinstance(loss, float):
            notes.reported_loss = loss
        elif loss is not None:
            notes.reported.append(cuda.fetch_values(loss))
        if lr is not None:
            notes.lr = lr
        if grad_norm is not None:
            notes.grad_norm = cuda.fetch_values(grad_norm)
        if loss_scale is not None:
            notes.loss_scale = loss_scale
        if step is not None:
            self._tracker.step = step
        if batch_shape is not None:
            notes.shape = list(batch_shape)
        if attention_mask is not None:
            notes.tokens.append(cuda.fetch_count(attention_mask))
        elif tokens is not None:
            notes.tokens.append(tokens)
        notes.samples += samples or 0
        notes.padded_tokens += padded_tokens or 0
        if flops is not None:
            notes.flops = float(flops)

    def support_stops(self) -> None:
        """Promise to ask ``stop_requested`` after each step."""
        self._stop.supported = True

    def stop_is_asked(self) -> bool:
        """Return whether the run was asked to save and end, after whatever step: for a script without a step so far."""
        self._stop.supported = True
        return self._stop.after is not None

    def stopping(self) -> None:
        """Declare that the script ends because it was asked to, without another step."""
        self._stop.supported = True
        self._stop.after = self._stop.after or 0

    def stop_requested(self) -> bool:
        """Return whether the run was asked to save and end after the current step.

        True on every rank from the same step on, when the request names the step (``ftmon stop`` does).
        """
        return self._stop.is_due(self._tracker.step)
