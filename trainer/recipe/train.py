"""Sets up a training (data, model, engine and position), and runs it."""

import errno
import fcntl
import logging
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import IO, Any

import msgspec
from transformers.utils.logging import disable_progress_bar

from ...protocol.errors import ConfigError
from ...protocol.run.environment import RUN_ENV
from . import hardware
from .checkpoint.restore import find, planned
from .checkpoint.save import Checkpoints, base_of
from .config.schema import Config
from .data import pipeline
from .data.batches import Collate, Order
from .data.pipeline import Examples
from .distributed import World
from .engine import make_engine
from .evaluation import evaluate
from .evaluation.evaluate import Evaluator
from .export.export import rehearse_export
from .model import loss, shape
from .model.activations import run_uncompiled
from .model.attention import CrossingError
from .model.load import quiet_bitsandbytes
from .model.tokenizer import set_end_tokens
from .monitor import probe
from .optim import optimizer
from .preflight.consistency import settle_compile
from .rehearse import Sampled, measure_lengths
from .state import TrainState
from .step import make_collate
from .support import settle_batch
from .termination import Termination
from .trainer import Course, Resuming, Trained, Trainer

_MANY_LABELS = 0.9
"""Share of tokens with labels from which it is not worth to compile another layer for the others."""


def train(config: Config, world: World) -> None:
    """Train one rank's share of a resolved configuration. All ranks call this."""
    _silence_libraries()
    run = setup(config, world)
    if config.debug.lengths:
        measure_lengths(run, run.data, run.total_steps)
    else:
        run.fit()


def output_folder(config: Config) -> Path:
    """Return the output folder: the configured one, else ``output/`` in the run directory, else in the current one."""
    if config.output.dir:
        return Path(config.output.dir)
    return Path(os.environ.get(RUN_ENV, ".")).absolute() / "output"


def setup(config: Config, world: World) -> Trainer:
    """Prepare data, model, engine and position; all ranks call this."""
    _, note = shape.check(config)
    if note:
        world.note(note)
    world.share_sequences(config.training.sequence_parallel_size)
    output = output_folder(config)
    found, skipped = find(config, output, world)
    Termination.kept = str(found[0]) if found else ""
    if world.is_first:
        _prepare_output(config, output, keep=bool(found))
    with probe().phase("init"):
        tokens, documents, examples = pipeline.prepare(config, world, output, found[0] if found else None)
        config = settle_batch(_settle(config, examples, world), len(examples.rows))
        order, total = _order(config, examples, world)
        held_out = evaluate.held_out(config, world, tokens, documents, total / order.steps_per_epoch)
        engine, model = make_engine(config, world, tokens, total)
        set_end_tokens(model, tokens)
        if config.output.save_model and config.training.rehearsal:
            rehearse_export(model, config, world)
        fused_loss = loss.set_up(model, config, world)
        label_share = float(examples.label_tokens.sum() / examples.tokens.sum())
        chosen_rows = fused_loss and label_share < _MANY_LABELS and loss.choose_rows(model, world)
        # Rows cut to one of several lengths are not padded to the longest.
        padding = Collate(tokens.pad_token_id, min(config.debug.lengths, default=config.training.sequence_length))
        try:
            collate = make_collate(model, config, world, padding, fused_loss, chosen_rows)
        except CrossingError as error:
            if config.data.packing != "auto":
                raise
            config = _padded(config, str(error).partition("; use ")[0], world)
            examples = pipeline.read_examples(documents, config)
            order, total = _order(config, examples, world)
            optimizer.change_total(engine, config, total)
            run_uncompiled(model)
            collate = make_collate(model, config, world, padding, fused_loss, chosen_rows)
        config = pipeline.settle_evaluation(config, documents, total)
        state = _fresh_state(config, examples, order, world)
        state.evaluation_key = held_out.key if held_out is not None else ""
        base = base_of(engine.module, config, world)
        step = planned(engine, found, state, base, config, world).step if found else 0
        checkpoints = Checkpoints(engine, tokens, config, world, output / "checkpoints", base)
    evaluator = Evaluator(config, world, engine, tokens, held_out, collate) if held_out else None
    course = Course(state, order, total, Resuming(found, skipped, base, step))
    trained, data = Trained(engine, model, tokens), Sampled(examples, collate)
    trainer = Trainer(config, world, trained, data, course, evaluator, checkpoints)
    trainer.introduce()
    return trainer


def _order(config: Config, examples: Examples, world: World) -> tuple[Order, int]:
    """Return the order of the examples, and the number of steps."""
    order = Order(examples, config, world.data_rank, world.data_ranks)
    total = config.training.max_steps or math.ceil(config.training.epochs * order.steps_per_epoch)
    return order, total * (len(config.debug.lengths) or 1)


def _settle(config: Config, examples: Examples, world: World) -> Config:
    """Decide, and log, what packing and compilation depend on besides the model."""
    if config.data.packing == "auto" and not examples.rows.packed:
        config = _padded(config, "data.packing: packed rows would not fill a step", world)
    elif config.data.packing == "auto":
        world.log(
            f"packing: {len(examples.rows):,} rows of up to {config.training.sequence_length:,} tokens "
            "(data.packing=false turns it off)"
        )
    compiler = hardware.compiler(world.device.type) is not None
    return settle_compile(config, world.all_agree(compiler), world.note)


def _padded(config: Config, reason: str, world: World) -> Config:
    """Return a configuration without packing and compilation, which needs it; log the reason."""
    if config.model.compile == "layers":
        raise ConfigError(f"model.compile needs data.packing; {reason}; use model.compile=off")
    world.note(f"{reason}: each record is padded instead")
    data = msgspec.structs.replace(config.data, packing=False)
    return settle_compile(msgspec.structs.replace(config, data=data), True, world.note)


def _fresh_state(config: Config, examples: Examples, order: Order, world: World) -> TrainState:
    names = ("seed", "sequence_length", "micro_batch", "grad_accumulation", "sequence_parallel_size")
    settings: dict[str, Any] = {name: getattr(config.training, name) for name in names}
    data: dict[str, Any] = {"data_key": examples.key, "examples": len(examples.rows), "order": order.kind}
    return TrainState(**settings, **data, ranks=world.size)


def _prepare_output(config: Config, output: Path, keep: bool) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output.dir: {output}: cannot be made: {error.strerror}") from None
    _claim(output)
    if config.output.overwrite and not keep:
        for old in ("checkpoints", "model"):
            shutil.rmtree(output / old, ignore_errors=True)


_claimed: list[IO[str]] = []  # Locked files, which stay open until the process ends


def _claim(output: Path) -> None:
    """Refuse an output folder that another run is writing to."""
    file = (output / ".lock").open("a")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(
                f"output.dir: {output}: another run is writing to it; wait for its end, or give another folder"
            ) from None
        return  # a file system without locks
    _claimed.append(file)


def _silence_libraries() -> None:
    """Keep progress bars, start-up notes and deprecations between libraries out of the log."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    quiet_bitsandbytes()
    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed|deepspeed|transformers")
