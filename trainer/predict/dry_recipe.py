"""The recipe's own engine, batches and step in a dry run.

Import it after DeepSpeed has its CUDA accelerator, and outside fake tensors, as modules make tensors at import.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..recipe.config.schema import Config
from ..recipe.data.collate import Batch, Collate
from ..recipe.engine.distributed import World
from ..recipe.engine.make import make_engine
from ..recipe.model import fused, load, tokenizer
from ..recipe.optim.adamw import SmallStateAdamW
from ..recipe.step import Stepper, make_collate
from . import quantized

Mark = Callable[[str], None]
"""Called with the name of a phase."""
_GPUS_OF_A_HOST = 8


class DryWorld(World):
    """A world of one rank, whose agreements need no other ranks."""

    has_values = False

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank = rank
        self.local_rank = 0
        self.size = ranks
        self.local_size = min(ranks, _GPUS_OF_A_HOST)
        self.on_gpu = True
        self.device = torch.device("cuda", 0)
        self.host_group = None
        self.logged: list[str] = []
        """Lines that the recipe would print."""

    def log(self, text: str) -> None:
        """Keep a line, except those of timers, which are about slow machines."""
        if threading.current_thread() is threading.main_thread():
            self.logged.append(text)

    def barrier(self) -> None:
        """Do nothing."""

    def share_text(self, text: str) -> str:
        """Return the text."""
        return text

    def first_text(self, text: str) -> str:
        """Return the text."""
        return text

    def all_agree(self, mine: bool) -> bool:
        """Return ``mine``."""
        return mine

    def leave(self) -> None:
        """Do nothing."""


class Tokens:
    """The attributes of a tokenizer that the recipe reads to make a model."""

    pad_token_id = eos_token_id = bos_token_id = 0

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def tokens_of(config: Config) -> tuple[Any, str]:
    """Return the part of a tokenizer that determines the model's shape, and an assumption (or empty).

    Raises:
        ConfigError: ``tokenizer.name`` cannot be loaded.
    """
    if config.model.name or "vocab_size" in config.model.config:
        return Tokens(0), ""
    if config.tokenizer.name:
        return tokenizer.load(config, None), ""
    size = config.tokenizer.vocab_size
    return Tokens(size), f"the tokenizer is trained on the data: {size:,} tokens assumed (tokenizer.vocab_size)"


class DryStep:
    """The engine that ``ftmon train`` makes, and its step."""

    def __init__(self, config: Config, world: DryWorld, tokens: Any, begin: Mark, end: Mark, update: Any) -> None:
        """Make the engine, under fake tensors. ``update`` receives the tensors that a compiled optimizer updates.

        Raises:
            ConfigError: the recipe, transformers or peft refuse the configuration.
        """
        world.share_sequences(config.training.sequence_parallel_size)
        engine, self.model = make_engine(config, world, tokens, 1 << 30, without_weights=quantized.hold_in_4_bits)
        made = engine.basic_optimizer
        if isinstance(made, SmallStateAdamW) and made.compiled_update is not None:
            between = 3 if config.optimizer.kind == "adamw_8bit" else 0
            made.compiled_update = partial(_update, update, between)
        fused_loss = fused.set_up(self.model, config, world)
        self.parameters = load.count_parameters(self.model)
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        self.trainable = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
        self._padding = Collate(tokens.pad_token_id, config.training.sequence_length)
        self._collate = make_collate(self.model, config, world, self._padding, fused_loss)
        self._packed = config.data.packing
        self._micro_batch = config.training.micro_batch
        self._accumulation = config.training.grad_accumulation
        engine.train()
        self.engine = engine
        self._stepper = Stepper(config, world, _Observed(engine, begin, end))

    def batch(self, documents: list[int]) -> Batch:
        """Return a micro-batch of equal rows in which all tokens carry loss; call it outside fake tensors.

        It corresponds to a run whose ``training.sequence_length`` is the length of a row.

        Args:
            documents: tokens of each document in a row; without packing there is one.
        """
        self._padding.limit = length = sum(documents)
        ids = torch.zeros(length, dtype=torch.long).numpy()
        row = {"input_ids": ids, "labels": ids, "lengths": documents}
        if not self._packed:
            del row["lengths"]
        return self._collate([row] * self._micro_batch)

    def train_step(self, batch: Batch) -> None:
        """Run an optimizer step on copies of one micro-batch."""
        self._stepper.train_step([lambda: dict(batch)] * self._accumulation, batch["labels"].numel())


def _update(update: Any, between: int, parameter: Any, *others: Any) -> None:
    """Update a piece in place: one kernel, or several with ``between`` fp32 tensors between them.

    8-bit states need three such tensors, as the first kernel computes their scales (measured on an H200, torch 2.11).
    """
    torch.empty(between * parameter.numel(), dtype=torch.float32, device=parameter.device)
    update((parameter, *others))


class _Observed:
    """An engine that reports the start and end of its phases."""

    def __init__(self, engine: Any, begin: Mark, end: Mark) -> None:
        self._engine = engine
        self._begin = begin
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, **batch: Any) -> Any:
        return self._in("forward", self._engine, **batch)

    def backward(self, loss: Any, **named: Any) -> None:
        self._in("backward", self._engine.backward, loss, **named)

    def step(self) -> None:
        self._in("optimizer", self._engine.step)

    def _in(self, phase: str, call: Any, *inputs: Any, **named: Any) -> Any:
        self._begin(phase)
        result = call(*inputs, **named)
        self._end(phase)
        return result
