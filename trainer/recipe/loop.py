"""Training, from the configuration to the final model."""

import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers.utils.logging import disable_progress_bar

from ...protocol.errors import ConfigError
from ...protocol.rundir import RUN_ENV
from . import checkpoint, data, faults, model, optimizer, settings, tokenizer
from .config import Config
from .examples import Encoder
from .make_fault import FaultMaker
from .monitor import Monitor
from .progress import ProgressLines
from .ranks import StopFlag, World


def train(config: Config, world: World) -> None:
    """Train one rank's share of a settled configuration. All ranks call this.

    Raises:
        ConfigError: something in the configuration turned out not to hold.
    """
    _quieten()
    _Run(config, world).go()


def output_folder(config: Config) -> Path:
    """Return the output folder: the configured one, or ``output/`` in the run directory, or in the current one."""
    if config.output.dir:
        return Path(config.output.dir)
    return Path(os.environ.get(RUN_ENV, ".")).absolute() / "output"


def _quieten() -> None:
    """Keep libraries' chatter out of the log: progress bars, notes on start-up, deprecations between libraries."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|deepspeed|transformers")


class _Run:
    def __init__(self, config: Config, world: World) -> None:
        self.config = config
        self.world = world
        self.monitor = Monitor()
        self.output = output_folder(config)

    def go(self) -> None:
        config, world = self.config, self.world
        resumed = checkpoint.find(config.checkpoint.resume, self.output)
        if world.is_first:
            try:
                self.output.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"output.dir: {self.output}: cannot be made: {error.strerror}") from None
            if config.output.overwrite and not resumed:
                for old in ("checkpoints", "model"):
                    shutil.rmtree(self.output / old, ignore_errors=True)
        with self.monitor.phase("init"):
            self.tokenizer, examples = self._examples(resumed)
            order = data.Order(len(examples), config, world.rank, world.size)
            self.total = config.training.max_steps or math.ceil(config.training.epochs * order.steps_per_epoch)
            self.engine, self.model = self._engine()
            progress = checkpoint.Progress()
            if resumed:
                progress = checkpoint.load(self.engine, resumed, world)
                optimizer.apply_schedule(self.engine, config, progress.step, self.total)
                self.monitor.resumed(progress.step)
            order.first_step = progress.step
            batches = data.loader(
                examples,
                order,
                data.Collate(self.tokenizer.pad_token_id, config.training.sequence_length),
                config,
                pin=world.on_gpu,
            )
        self.monitor.plan(self.total, self.total / order.steps_per_epoch, str(self.output))
        self._introduce(len(examples), order, progress, resumed)
        stopped = self._steps(iter(batches), progress)
        self._finish(progress, stopped)

    def _examples(self, resumed: Path | None) -> tuple[Any, Any]:
        """Read and tokenize: rank 0 first, the others then from what it left on disk."""
        kept = self.output / "tokenizer"
        if self.world.is_first:
            result = self._prepare(resumed.parent.parent / "tokenizer" if resumed else None, kept)
            self.world.barrier()
            return result
        self.world.barrier()
        return self._prepare(kept, None)

    def _prepare(self, trained: Path | None, keep: Path | None) -> tuple[Any, Any]:
        """Return the tokenizer and the encoded examples.

        Args:
            trained: where a tokenizer trained on the data lies, if one does.
            keep: where to write it when it is trained now.
        """
        config = self.config
        records = data.read(config)
        kind = data.kind_of(config, records)
        made = tokenizer.load(config, trained)
        if made is None:
            plain = Encoder(None, config, kind)
            made = tokenizer.train(
                lambda: (text for record in records for text in plain.texts(record)), config.tokenizer.vocab_size
            )
        if keep is not None and not (config.tokenizer.name or config.model.name):
            made.save_pretrained(str(keep))
        encoded = data.tokenize(records, Encoder(made, config, kind), config, tokenizer.fingerprint(made))
        self._say_left_out(len(records), len(encoded))
        return made, encoded

    def _engine(self) -> tuple[Any, Any]:
        config, world = self.config, self.world
        made_for = settings.deepspeed_config(config, world.size, world.on_gpu)
        made = model.make(config, made_for, self.tokenizer, world)
        # From here on each rank draws its own dropout.
        torch.manual_seed(config.training.seed + 1 + world.rank)
        engine, *_ = deepspeed.initialize(
            model=made,
            optimizer=optimizer.make(made, config, world, self._say),
            lr_scheduler=optimizer.scheduler(config, self.total),
            config=made_for,
        )
        return engine, made

    def _steps(self, batches: Iterator[data.Batch], progress: checkpoint.Progress) -> bool:
        """Train until the planned end, or until somebody asks to stop; return whether somebody did."""
        config, world, engine = self.config, self.world, self.engine
        lines = ProgressLines(self.total, config.output.log_every, world.size, not world.is_first)
        fault = faults.parse(config.debug.fault, world.size) if config.debug.fault else None
        trouble = FaultMaker(fault, world, engine)
        flag = StopFlag(world)
        stop = False
        engine.train()
        while progress.step < self.total and not stop:
            step = progress.step + 1
            trouble.begin(step)
            losses: list[torch.Tensor] = []
            lr = float(engine.get_lr()[0])
            tokens = 0
            for _ in range(config.training.grad_accumulation):
                with self.monitor.phase("data"):
                    trouble.in_data()
                    batch = next(batches)
                    tokens += int(batch["attention_mask"].sum())
                    batch = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items()}
                loss: torch.Tensor = engine(**batch).loss
                losses.append(loss.detach())
                engine.backward(loss)
                engine.step()
            progress.step = step
            progress.tokens += tokens * world.size
            lines.step(step, losses, lr, tokens)
            stop = flag.exchange(self.monitor.stop_requested())
            every = config.checkpoint.every
            if stop or (every and step % every == 0) or (config.checkpoint.at_end and step == self.total):
                self._checkpoint(progress)
        flag.finish()
        lines.flush()
        return stop and progress.step < self.total

    def _checkpoint(self, progress: checkpoint.Progress) -> None:
        with self.monitor.phase("checkpoint"):
            folder = self.output / "checkpoints"
            path = checkpoint.save(self.engine, progress, folder, self.config.checkpoint.keep, self.world)
        self._say(f"checkpoint: {path}")

    def _finish(self, progress: checkpoint.Progress, stopped: bool) -> None:
        if stopped:
            again = "resume with checkpoint.resume=" + str(self.output)
            self._say(f"stopped on request after step {progress.step} of {self.total}; {again}")
            return
        if self.config.output.save_model:
            folder = self.output / "model"
            with self.monitor.phase("checkpoint"):
                checkpoint.save_model(self.engine, self.model, self.tokenizer, self.config, folder, self.world)
            self._say(f"final model: {folder}")
            if self.world.is_first and not tokenizer.loads_back(self.tokenizer, folder):
                self._say(
                    f"note: for {self.model.config.model_type} AutoTokenizer makes a tokenizer of its own; load this "
                    "model's with transformers.PreTrainedTokenizerFast.from_pretrained"
                )
        self._say(f"finished: {progress.step} steps, {progress.tokens:,} tokens")

    def _introduce(self, examples: int, order: data.Order, progress: checkpoint.Progress, resumed: Path | None) -> None:
        # ds_numel: what a parameter holds in all ranks together under ZeRO-3.
        sizes = [int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in self.model.parameters()]
        config, world = self.config, self.world
        where = f"{world.size} GPU{'s' * (world.size > 1)}" if world.on_gpu else f"{world.size} CPU ranks"
        self._say(
            f"{self.model.config.model_type}, {sum(sizes):,} parameters; ZeRO-{config.zero.stage}, "
            f"{config.training.precision}, {where}; {examples:,} examples, {order.samples_per_step} a step, "
            f"{self.total} steps"
        )
        if resumed:
            self._say(f"resumed from {resumed} after step {progress.step}")
            if progress.step >= self.total:
                self._say(f"note: training ends at step {self.total}: nothing is left to train")

    def _say_left_out(self, read: int, kept: int) -> None:
        if kept < read and not self.config.data.packing:
            self._say(
                f"note: {read - kept} of {read} records have nothing to learn within "
                f"{self.config.training.sequence_length} tokens, and are left out"
            )

    def _say(self, text: str) -> None:
        if self.world.is_first:
            print(text, flush=True)
