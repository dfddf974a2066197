"""Evaluates a model: mean loss over all label tokens of the evaluation examples, each counted once."""

import math
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data import pipeline
from ..data.batches import padded_length, shift_labels
from ..data.encode import Documents, Encoder
from ..data.pipeline import Examples
from ..data.records import read_records
from ..distributed import World
from ..model.attention import on_device
from ..model.loss import IGNORED, Batch
from ..model.shape import room
from ..model.tokenizer import end_tokens
from ..monitor import Progress, activity, probe
from ..state import TrainState


def held_out(config: Config, world: World, tokens: Any, trained: Path, epochs: float = 1.0) -> Examples | None:
    """Return the examples to evaluate on; None without evaluation. All ranks call this.

    Rank 0 encodes; ``trained`` is the folder of the training's encoded documents, of which ``evaluation.share`` sets
    some aside. ``epochs``: how much will be trained.
    """
    settled = pipeline.settle_share(config, Documents(trained))
    if not settled.evaluation.on:
        return None
    own = settled.evaluation.held_out > 0
    found = pipeline.held_out(trained, settled) if own else _encoded(config, world, tokens)
    return pipeline.evaluated(config, found, epochs)


def _encoded(config: Config, world: World, tokens: Any) -> Examples:
    wanted = msgspec.structs.replace(config, data=config.evaluation.data(config.data))

    def encode() -> Path:
        records = read_records(wanted)
        encoder = Encoder(tokens, wanted, pipeline.record_formats(records, wanted))
        with activity("data", "tokenizing evaluation data", total=len(records)) as progress:
            return pipeline.encode(records, encoder, tokens, wanted, progress=progress.report)

    try:
        return pipeline.examples(pipeline.first_encodes(world, encode), None, wanted)
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None


def prompt_of(row: dict[str, list[int]]) -> list[int]:
    """Return the tokens before the first one that carries loss; of a plain text, its first quarter."""
    learned = next((place for place, label in enumerate(row["labels"]) if label != IGNORED), 0)
    return [int(token) for token in row["input_ids"][: learned if learned > 1 else max(1, len(row["input_ids"]) // 4)]]


def generate(
    engine: Any,
    tokens: Any,
    rows: list[dict[str, list[int]]],
    longest: int,
    trained: int,
    world: World,
    *,
    together: bool,
) -> list[tuple[str, str]]:
    """Return each row's prompt and the model's most probable answer; empty in ranks that do not generate.

    With ``together`` (ZeRO-3) every rank must run every forward. An answer has at most ``longest`` tokens, fewer if the
    model has no more positions.
    """
    if not (together or world.is_first):
        return []
    result: list[tuple[str, str]] = []
    engine.eval()
    try:
        for row in rows:
            ids = prompt_of(row)
            inputs = torch.tensor([ids], device=world.device)
            with torch.no_grad():
                made = engine.module.generate(
                    input_ids=inputs,
                    attention_mask=torch.ones_like(inputs),
                    max_new_tokens=room(engine.module.config, len(ids), longest, trained),
                    do_sample=False,
                    pad_token_id=tokens.pad_token_id,
                    eos_token_id=end_tokens(engine.module, tokens),
                )
            answer = made[0, len(ids) :].tolist()
            result.append((tokens.decode(ids), tokens.decode(answer)))
    finally:
        engine.train()
    return result


def divided(config: Config, tokens: Any) -> list[list[int]]:
    """Return the rows of each batch, given the tokens of all rows; the largest batch first, which fails at once.

    Rows of a batch have similar lengths. Where the micro-batch is of packed rows, which are full, a batch of other rows
    takes as many as have its tokens: a few short ones would leave the device idle.
    """
    given, training = config.evaluation.micro_batch, config.training
    left = sorted(range(len(tokens)), key=lambda row: (-int(tokens[row]), row))
    batches: list[tuple[int, list[int]]] = []
    while left:
        length = padded_length(int(tokens[left[0]]), training.sequence_length)
        size = given or training.micro_batch
        if not given and config.data.packing:
            size = max(size, training.micro_batch * training.sequence_length // length)
        batches.append((length * min(size, len(left)), left[:size]))
        left = left[size:]
    return [rows for _, rows in sorted(batches, key=lambda batch: -batch[0])]


class Evaluated(msgspec.Struct, frozen=True):
    """Result of one evaluation, equal on all ranks."""

    loss: float  # Mean cross entropy over the label tokens, in nats
    label_tokens: int
    seconds: float
    best: bool  # Whether no earlier evaluation of this run had a lower loss

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinity if that is too large for a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Evaluator:
    """Evaluates one engine on one set of examples; all ranks call its methods together."""

    def __init__(
        self,
        config: Config,
        world: World,
        engine: Any,
        tokens: Any,
        examples: Examples,
        collate: Callable[[list[dict[str, list[int]]]], Batch],
    ) -> None:
        self._settings = config.evaluation
        self._stage = config.zero.stage
        self._sequence_length = config.training.sequence_length
        self._world = world
        self._engine = engine
        self._tokens = tokens
        self.examples = examples
        self._collate = collate
        self._batches = divided(config, examples.tokens)

    def due(self, step: int, last: bool) -> bool:
        """Return whether an evaluation follows optimizer step ``step``."""
        every = self._settings.interval
        return bool(every and step % every == 0) or (last and self._settings.at_end)

    def run(self, state: TrainState) -> Evaluated:
        """Evaluate, print and report the result, and record in ``state`` whether it is the best."""
        began = time.perf_counter()
        batches = -(-len(self._batches) // self._world.data_ranks)
        with probe().phase("eval"), activity("evaluation", total=batches) as progress:
            loss, label_tokens = self.loss(progress=progress)
            if self._settings.samples:
                progress.send(batches, "samples")
            texts = self._samples()
        best = loss < state.best_evaluation
        if best:
            state.best_evaluation, state.best_evaluation_step = loss, state.step
        state.evaluations_without_best = 0 if best else state.evaluations_without_best + 1
        result = Evaluated(loss, label_tokens, time.perf_counter() - began, best)
        self._world.log(
            f"evaluation after step {state.step}: loss {loss:.4f}  perplexity {result.perplexity:,.2f}  "
            f"{label_tokens:,} tokens{'  (best)' if best else ''}"
        )
        for prompt, answer in texts:
            self._world.log(f"sample: {prompt!r} -> {answer!r}")
        if self._world.is_first:
            probe().evaluation(loss, label_tokens=label_tokens, seconds=result.seconds, best=best, step=state.step)
        return result

    def report_best(self, state: TrainState) -> None:
        """Report the best evaluation before a resume, for comparison with later ones; on rank 0 only."""
        if state.best_evaluation_step:
            probe().evaluation(state.best_evaluation, best=True, step=state.best_evaluation_step)

    def stop_early(self, state: TrainState) -> bool:
        """Return whether ``evaluation.patience`` is exhausted."""
        return 0 < self._settings.patience <= state.evaluations_without_best

    def loss(self, most_batches: int | None = None, progress: Progress | None = None) -> tuple[float, int]:
        """Return the mean loss over the label tokens of all examples, and their number.

        With ``most_batches`` of the largest batches of each rank only.
        """
        # A sum over millions of tokens: fp32 would round off a batch's share.
        sums = torch.zeros(2, dtype=torch.float64, device=self._world.device)
        self._engine.eval()
        try:
            with torch.no_grad():
                for done, (batch, label_tokens) in enumerate(islice(self.batches(), most_batches)):
                    if progress is not None:
                        progress.report(done)
                    loss: torch.Tensor = self._engine(**batch, use_cache=False).loss
                    sums[0] += loss
                    sums[1] += label_tokens
        finally:
            self._engine.train()
        dist.all_reduce(sums)
        total, count = sums.tolist()
        return total / max(1.0, count), int(count)

    def batches(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield this rank's batches on the device, with their label tokens; every rank yields equally many.

        If batches do not divide by ranks, the other ranks repeat one without labels: under ZeRO-3 each forward gathers
        parameters from all ranks. Ranks that share sequences count the labels of their slices.
        """
        ranks = self._world.data_ranks
        for first in range(0, len(self._batches), ranks):
            mine = first + self._world.data_rank
            counted = mine < len(self._batches)
            rows = [self.examples.rows[row] for row in self._batches[mine if counted else first]]
            if not counted:
                rows = [{**row, "labels": [IGNORED] * len(row["labels"])} for row in rows]
            batch = self._collate(rows)
            yield on_device(batch, self._world), int((shift_labels(batch) != IGNORED).sum())

    def _samples(self) -> list[tuple[str, str]]:
        rows = [self.examples.rows[row] for row in range(min(self._settings.samples, len(self.examples.rows)))]
        if not rows:
            return []
        longest, trained = self._settings.sample_tokens, self._sequence_length
        return generate(self._engine, self._tokens, rows, longest, trained, self._world, together=self._stage == 3)
