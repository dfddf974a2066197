"""The recipe's interface to the probe; the calls have no effect in an unwatched process."""

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..probe import api

SEND_SECONDS = 0.5
"""Minimum interval of an activity's progress reports."""


class Progress:
    """Progress of an activity; ``report`` is cheap and may be called often."""

    def __init__(self, name: str, total: int) -> None:
        self._name = name
        self._total = total
        self._text = ""
        self._begun = self._sent_at = time.monotonic()

    def report(self, done: int = 0, text: str = "") -> None:
        """Report the number of finished parts; sent at most twice a second."""
        if time.monotonic() - self._sent_at >= SEND_SECONDS:
            self.send(done, text)

    def send(self, done: int = 0, text: str = "", over: bool = False) -> None:
        """Report at once; an empty ``text`` keeps the previous one."""
        self._text = text or self._text
        probe = api.current()
        if probe is not None and probe.rank == 0:
            self._sent_at = time.monotonic()
            seconds = self._sent_at - self._begun
            probe.activity(self._name, self._text, done, self._total, over, seconds)


class Monitor:
    """Sends the training loop's reports to the probe, and reads its requests. Without a probe it does nothing."""

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Mark a phase of the training thread."""
        probe = api.current()
        return probe.phase(name) if probe is not None else nullcontext()

    def plan(
        self,
        total_steps: int,
        epochs: float,
        output_dir: str,
        *,
        evaluate_every: int = 0,
        evaluate_at_end: bool = False,
        checkpoint_every: int = 0,
        checkpoint_at_end: bool = False,
        first_step: int = 0,
    ) -> None:
        """Report the planned steps, and the steps between evaluations and between checkpoints (0: none)."""
        probe = api.current()
        if probe is not None:
            probe.plan(
                total_steps,
                epochs,
                output_dir,
                evaluate_every=evaluate_every,
                evaluate_at_end=evaluate_at_end,
                checkpoint_every=checkpoint_every,
                checkpoint_at_end=checkpoint_at_end,
                first_step=first_step,
            )

    def micro_batch(
        self, tokens: int, label_tokens: int, pairs: int = 0, longest: int = 0, samples: int | None = None
    ) -> None:
        """Report the exact counts of a micro-batch of this rank, before or after its forward.

        Args:
            tokens: tokens without padding.
            label_tokens: labels that the loss is a mean over.
            pairs: ``protocol.messages.throughput.causal_pairs`` of the lengths of its documents; 0: not known.
            longest: tokens of the longest document; 0: not known.
            samples: rows, for ranks that share rows this one's part; None: as many as the forward's batch has.
        """
        probe = api.current()
        if probe is not None:
            probe.micro_batch(tokens, label_tokens, pairs, longest, samples)

    def normalised_over_ranks(self) -> None:
        """Report that losses are divided by the label tokens of all ranks: the shown loss is their plain mean."""
        probe = api.current()
        if probe is not None:
            probe.normalise_over_ranks()

    def evaluation(
        self,
        loss: float,
        *,
        name: str = "evaluation",
        label_tokens: int = 0,
        seconds: float = 0.0,
        best: bool = False,
        metrics: dict[str, float] | None = None,
        step: int | None = None,
    ) -> None:
        """Report an evaluation's result over all ranks, once for each split; on rank 0. See ``Probe.evaluation``."""
        probe = api.current()
        if probe is not None:
            probe.evaluation(
                loss, name=name, label_tokens=label_tokens, seconds=seconds, best=best, metrics=metrics, step=step
            )

    def checkpoint(
        self, path: str, *, size: int = 0, seconds: float = 0.0, best: bool = False, step: int | None = None
    ) -> None:
        """Report that a checkpoint of ``size`` bytes is complete; on rank 0, from any thread."""
        probe = api.current()
        if probe is not None:
            probe.checkpoint(path, size=size, seconds=seconds, best=best, step=step)

    def checkpoint_failed(self, path: str, error: str, *, kept: str = "", step: int | None = None) -> None:
        """Report that a checkpoint could not be written; on rank 0, from any thread. See ``Probe``."""
        probe = api.current()
        if probe is not None:
            probe.checkpoint_failed(path, error, kept=kept, step=step)

    def stopped_early(self, evaluations: int, best_loss: float, best_step: int, *, step: int) -> None:
        """Report that training stops early after ``step``; on rank 0. See ``Probe``."""
        probe = api.current()
        if probe is not None:
            probe.stopped_early(evaluations, best_loss, best_step, step=step)

    @contextmanager
    def activity(self, name: str, text: str = "", total: int = 0) -> Generator[Progress]:
        """Report an activity besides the steps for the length of a ``with`` block; only rank 0 sends it.

        Args:
            name: ``rehearsal``, ``evaluation``, ``checkpoint``, ``export``, ``data`` ...
            text: detail for a person.
            total: number of its parts, which the block may report as they finish; 0: not known.
        """
        progress = Progress(name, total)
        progress.send(0, text)
        try:
            yield progress
        finally:
            progress.send(total, text, over=True)

    @contextmanager
    def rehearsal(self) -> Generator[None]:
        """Exclude a ``with`` block from training: its updates end no steps. On every rank."""
        probe = api.current()
        with probe.rehearsal() if probe is not None else nullcontext():
            yield

    def resumed(self, step: int) -> None:
        """Report that training resumes after optimizer step ``step`` of an earlier run."""
        probe = api.current()
        if probe is not None:
            probe.report(step=step)

    def stop_requested(self) -> bool:
        """Return whether the run was asked to save a checkpoint and end after the current step."""
        probe = api.current()
        return probe is not None and probe.stop_requested()
