"""Resumes from a checkpoint: selects it, and restores everything in it."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ....protocol.errors import ConfigError, FtmonError
from ....protocol.run.environment import RUN_ENV
from .. import support
from ..config.schema import Config
from ..distributed import World
from ..state import TrainState
from . import manifest, save
from .manifest import Base, Found, Manifest
from .save import RANDOM

_IDENTITY = (
    *("seed", "data_key", "examples", "order", "sequence_length", "micro_batch", "grad_accumulation", "ranks"),
    "sequence_parallel_size",
)
_CONSEQUENCES = {
    "seed": "the rest of this epoch is drawn in another order, so some examples repeat and some are left out",
    "data": "the position in the epoch is kept, so some examples repeat and some are left out",
    "sequence_length": "examples are cut and packed differently, so some repeat and some are left out",
    **dict.fromkeys(
        ("micro_batch", "grad_accumulation"),
        "losses differ from the uninterrupted run's in their last digits, and in dropout",
    ),
    "ranks": "global batches have another size, so steps and the learning rate's schedule mean something else",
}


def position(saved: TrainState, now: TrainState, allow: Sequence[str], path: Path) -> tuple[TrainState, list[str]]:
    """Return the position at which the run continues, and notes on differences from an uninterrupted run.

    ``allow`` has the changes that are accepted (``checkpoint.allow``).
    """
    changes = {name: f"{text}: {_consequence(name, saved, now)}" for name, text in _changes(saved, now).items()}
    changed = [name for name in changes if name not in allow]
    if changed:
        each = "; ".join(changes[name] for name in changed)
        raise ConfigError(
            f"checkpoint.resume: {path}: {each}. Set it back, or accept it with "
            f"checkpoint.allow=[{', '.join([*allow, *changed])}]"
        )
    notes = list(changes.values())
    if _divided(saved, now) and saved.global_batch == now.global_batch:
        through = f" with training.grad_accumulation {now.grad_accumulation}, before {saved.grad_accumulation}"
        how = through if saved.grad_accumulation != now.grad_accumulation else ""
        notes.append(f"{_divided(saved, now)}: the global batches are the same{how}; rounding and dropout differ")
    identity = {name: getattr(now, name) for name in _IDENTITY}
    resumed = msgspec.structs.replace(saved, **identity, batches=_batches(saved, now))
    if now.evaluation_key and saved.evaluation_key != now.evaluation_key:
        resumed.evaluation_key = now.evaluation_key
        if saved.evaluation_key:
            notes.append("evaluation: its examples differ from those before; the lowest loss is determined anew")
            resumed.best_evaluation, resumed.best_evaluation_step = math.inf, 0
            resumed.evaluations_without_best = 0
    return resumed, notes


def check_parameters(there: dict[str, list[int]], here: dict[str, list[int]], path: Path) -> None:
    """Refuse a checkpoint of another model, by the shapes of its parameters and of this run's."""
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            what = "is not there" if name not in there else "is not here"
            if name in here and name in there:
                what = f"is {_shape(there[name])} there and {_shape(here[name])} here"
            raise ConfigError(f"checkpoint.resume: {path} is of another model: {name} {what}")


def _changes(saved: TrainState, now: TrainState) -> dict[str, str]:
    """Return the differences by their names in ``checkpoint.allow``."""
    changes: dict[str, str] = {}
    if saved.seed != now.seed:
        changes["seed"] = f"training.seed was {saved.seed} and is {now.seed}"
    if saved.sequence_length != now.sequence_length:
        text = f"training.sequence_length was {saved.sequence_length} and is {now.sequence_length}"
        changes["sequence_length"] = text
    elif saved.data_key != now.data_key:
        changes["data"] = f"data: the {now.examples:,} examples differ from the {saved.examples:,} before"
    if saved.order != now.order:
        text = f"data.shuffle, data.group_by_length: the examples were {saved.order} and are {now.order}"
        changes.setdefault("data", text)
    sizes = ""
    if saved.global_batch != now.global_batch:
        whole, rest = divmod(saved.global_batch, now.global_batch // now.grad_accumulation)
        fix = f" (training.grad_accumulation={whole} keeps it)" if whole and not rest else ""
        sizes = f", with {saved.global_batch} examples a step then and {now.global_batch} now{fix}"
    if divided := _divided(saved, now):
        if sizes:
            changes["ranks"] = f"{divided}{sizes}"
        return changes
    for name in ("micro_batch", "grad_accumulation"):
        if getattr(saved, name) != getattr(now, name):
            changes[name] = f"training.{name} was {getattr(saved, name)} and is {getattr(now, name)}{sizes}"
    return changes


def _consequence(name: str, saved: TrainState, now: TrainState) -> str:
    is_batch = name in ("micro_batch", "grad_accumulation") and saved.global_batch != now.global_batch
    return _CONSEQUENCES["ranks" if is_batch else name]


def _divided(saved: TrainState, now: TrainState) -> str:
    """Return changed settings that divide batches among ranks differently, in words; empty: none."""
    return " and ".join(
        f"{section}.{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for section, name in (("run", "ranks"), ("training", "sequence_parallel_size"))
        if getattr(saved, name) != getattr(now, name)
    )


def _batches(saved: TrainState, now: TrainState) -> int:
    """Return the number of global batches, of the present size, before the same place in the same epoch."""
    if saved.global_batch == now.global_batch and saved.examples == now.examples:
        return saved.batches
    per_epoch = max(1, saved.examples // max(1, saved.global_batch))
    epoch, offset = divmod(saved.batches, per_epoch)
    per_epoch_now = max(1, now.examples // now.global_batch)
    share = offset / per_epoch if saved.examples != now.examples else None
    taken = int(share * per_epoch_now) if share is not None else offset * saved.global_batch // now.global_batch
    return epoch * per_epoch_now + min(taken, per_epoch_now - 1)


def _shape(shape: list[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


@contextlib.contextmanager
def converted(path: Path, world: World) -> Generator[Path]:
    """Yield a universal copy of a checkpoint beside it, removed at the end. All ranks call this.

    A failed conversion (https://www.deepspeed.ai/tutorials/universal-checkpointing/) is a ``ConfigError``.
    """
    copy = path.with_name(path.name + "-universal.part")
    problem = world.share_text(_convert(path, copy) if world.is_first else "")
    try:
        if problem:
            raise ConfigError(
                f"checkpoint.resume: {path} was written by another number of ranks, and DeepSpeed cannot convert it "
                f"({problem}); set run.ranks to what it was"
            )
        yield copy
    finally:
        world.barrier()
        if world.is_first:
            shutil.rmtree(copy, ignore_errors=True)
            path.with_name("latest_universal").unlink(missing_ok=True)  # names the copy


@contextlib.contextmanager
def loading(engine: Any) -> Generator[None]:
    """Make an engine load the universal format within a ``with`` block."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _convert(path: Path, copy: Path) -> str:
    """Convert a checkpoint; return the error, or an empty text."""
    shutil.rmtree(copy, ignore_errors=True)
    # A separate process on the CPU: the conversion forks workers, which a process with CUDA must not.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FTMON", "LOCAL_"))}
    for name in (RUN_ENV, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = [f"--input_folder={path}", f"--output_folder={copy}", "--inject_missing_state"]
    words += ["--num_extract_workers=2", "--num_merge_workers=2"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "deepspeed.checkpoint.ds_to_universal", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return ""


def find(config: Config, output: Path, world: World) -> tuple[list[Path], list[str]]:
    """Return the intact checkpoints to resume from, in the order to be tried; none: start anew. All ranks call this.

    Incomplete and damaged ones are left out, with a note on each that is printed and returned. A path without a
    complete checkpoint is a ``ConfigError``.
    """
    resume = config.checkpoint.resume
    # Rank 0 searches for all: another rank might see the folder before or after a change.
    answer: dict[str, Any] = {"found": [], "notes": [], "error": ""}
    if world.is_first:
        try:
            found, answer["notes"] = manifest.candidates(resume, output)
            answer["found"] = [str(one.path) for one in found]
        except ConfigError as error:
            answer["error"] = str(error)
    answer = json.loads(world.share_text(json.dumps(answer)))
    if answer["error"]:
        raise ConfigError(answer["error"])
    for note in answer["notes"]:
        world.note(f"skipped a checkpoint: {note}")
    intact: list[Path] = []
    for path in map(Path, answer["found"]):
        # One intact checkpoint and an earlier one as a fallback are enough.
        if len(intact) == 2:
            break
        if _is_intact(path, world):
            intact.append(path)
        else:
            answer["notes"].append(f"{path.name} is damaged")
    if not intact and resume not in ("never", "auto"):
        raise ConfigError(f"checkpoint.resume: {resume}: no intact checkpoint is there")
    return intact, answer["notes"]


def planned(
    engine: Any, paths: list[Path], now: TrainState, base: Base | None, config: Config, world: World
) -> TrainState:
    """Return the position that ``restore`` will resume from, with its errors; nothing is loaded."""
    for path in paths:
        content = manifest.read(path)
        if content is not None:
            _check_model(engine, content, base, config, world, path)
            return position(content.state, now, config.checkpoint.allow, path)[0]
    return now


def restore(engine: Any, paths: list[Path], now: TrainState, base: Base | None, config: Config, world: World) -> Path:
    """Load weights, optimizer, schedule and random state; return the checkpoint, whose position ``now`` becomes.

    Another model, or a difference that ``checkpoint.allow`` does not name, is a ``ConfigError``.
    """
    problem = ""
    for path in paths:
        content = manifest.read(path)
        if content is None:
            continue
        resumed, notes = position(content.state, now, config.checkpoint.allow, path)
        _check_model(engine, content, base, config, world, path)
        problem = _load(engine, path, content, config, world)
        if not problem:
            for note in notes:
                world.note(note)
            for name in resumed.__struct_fields__:
                setattr(now, name, getattr(resumed, name))
            _restore_random_state(path, content, config, world)
            return path
        world.note(f"{path.name} cannot be loaded: {problem}")
    raise ConfigError(f"checkpoint.resume: {paths[-1]} does not fit this configuration: {problem or 'no manifest'}")


def load_weights(engine: Any, path: Path, config: Config, world: World) -> bool:
    """Load the weights, and optimizer states, of this run's own checkpoint; return whether it was intact. All ranks.

    A damaged checkpoint is left out, with a note; one that is intact and cannot be loaded is an ``FtmonError``.
    """
    content = manifest.read(path)
    if not _is_intact(path, world) or content is None:
        return False
    if problem := _load(engine, path, content, config, world):
        raise FtmonError(f"{path} cannot be loaded: {problem}; output.load_best=false exports the last step instead")
    return True


def _is_intact(path: Path, world: World) -> bool:
    found: Found | None = manifest.examine(path)[0]
    problem = "it is gone" if found is None else manifest.damaged(path, found.manifest, world.rank, world.size)
    if world.all_agree(not problem):
        return True
    if problem:
        print(f"note: skipped a checkpoint: {path.name}: {problem}", flush=True)
    return False


def _check_model(engine: Any, content: Manifest, base: Base | None, config: Config, world: World, path: Path) -> None:
    check_parameters(content.parameters, save.shapes(engine.module), path)
    precision, ranks, held = content.precision, content.state.ranks, content.optimizer
    stage = support.zero_stage(config, world.size)
    refusal = stage_refusal(content, stage)
    was = f"model.name={content.base.name}" if content.base is not None and content.base.name else "random weights"
    own = support.states(config)
    alpha = content.settings.get("lora.alpha", config.lora.alpha)
    order, fix = support.ROUND_ROBIN, "optimizer.kind and optimizer.master_weights"
    if held.replace(order, "") == own.replace(order, ""):
        fix = "deepspeed.zero_optimization.round_robin_gradients"
    for differs, text in (
        (
            set(content.trained) != set(save.trained(engine.module)),
            "was trained with other parameters frozen; see lora.targets",
        ),
        (refusal, refusal),
        (config.lora.rank and alpha != config.lora.alpha, f"has adapters of another scale; set lora.alpha={alpha:g}"),
        (precision != config.training.precision, f"was written in {precision}; set training.precision={precision}"),
        (held != own, f"holds the optimizer states of {held}, and this run has {own}; set {fix} back"),
        (
            ranks != world.size and stage and not support.converts(held),
            f"was written by {ranks} ranks, and the states of {held} cannot be divided anew; set run.ranks={ranks}",
        ),
        (
            content.base is not None and base is not None and content.base.fingerprint != base.fingerprint,
            f"holds adapters of a base model with other weights ({was} then); give the same model, and for random "
            "weights the same training.seed and kind of device",
        ),
    ):
        if differs:
            raise ConfigError(f"checkpoint.resume: {path} {text}")


def stage_refusal(content: Manifest, stage: int) -> str:
    """Return why a run at DeepSpeed's ZeRO ``stage`` cannot resume from a checkpoint; empty if it can.

    Stages 1 and 2 write the same partitions.
    """
    written = content.zero_stage
    if written == stage or {written, stage} == {1, 2}:
        return ""
    return f"was written with ZeRO-{written}; set zero.stage={written}"


def _load(engine: Any, path: Path, content: Manifest, config: Config, world: World) -> str:
    """Load into the engine; return the error of some rank, or an empty text."""
    problem = ""
    try:
        if content.state.ranks != world.size and support.zero_stage(config, world.size):
            with converted(path, world) as copy, loading(engine):
                loaded, _ = engine.load_checkpoint(str(copy.parent), tag=copy.name, load_module_strict=False)
        else:
            # Keys were compared with the manifest's; without frozen weights a strict load would fail.
            loaded, _ = engine.load_checkpoint(str(path.parent), tag=path.name, load_module_strict=content.base is None)
        if loaded is None:
            problem = "DeepSpeed found no checkpoint in it"
    except ConfigError:
        raise
    except Exception as error:  # torch, pickle and DeepSpeed raise various errors on unexpected files
        problem = (str(error).strip() or repr(error)).splitlines()[0]
    if world.all_agree(not problem):
        return ""
    return problem or "another rank could not load it"


def _restore_random_state(path: Path, content: Manifest, config: Config, world: World) -> None:
    if content.state.ranks != world.size:
        torch.manual_seed(config.training.seed + 1 + world.rank + 1_000_003 * content.state.step)
        return
    state: dict[str, torch.Tensor] = torch.load(path / RANDOM.format(world.rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if world.on_gpu and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
