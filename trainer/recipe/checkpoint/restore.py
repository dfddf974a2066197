"""Resumes from a checkpoint: selects it, and restores everything in it."""

import json
from pathlib import Path
from typing import Any

import torch

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..engine.distributed import World
from ..optim import support
from ..state import TrainState
from . import compatible, identity, manifest, universal
from . import folder as folders
from .folder import Found
from .manifest import Base, Manifest
from .save import RANDOM


def find(config: Config, output: Path, world: World) -> tuple[list[Path], list[str]]:
    """Return the intact checkpoints to resume from, in the order to be tried; none: start anew. All ranks call this.

    Incomplete and damaged ones are left out with a printed note.

    Returns:
        The checkpoints, and a note on each that was left out.

    Raises:
        ConfigError: a path was given, and no complete checkpoint is there.
    """
    resume = config.checkpoint.resume
    # Rank 0 searches for all: another rank might see the folder before or after a change.
    answer: dict[str, Any] = {"found": [], "notes": [], "error": ""}
    if world.is_first:
        try:
            found, answer["notes"] = folders.candidates(resume, output)
            answer["found"] = [str(one.path) for one in found]
        except ConfigError as error:
            answer["error"] = str(error)
    answer = json.loads(world.share_text(json.dumps(answer)))
    if answer["error"]:
        raise ConfigError(answer["error"])
    for note in answer["notes"]:
        world.log(f"note: skipped a checkpoint: {note}")
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
    """Return the position that ``restore`` will resume from; nothing is loaded.

    Raises:
        ConfigError: as ``restore``.
    """
    for path in paths:
        content = manifest.read(path)
        if content is not None:
            _check_model(engine, content, base, config, world, path)
            return compatible.position(content.state, now, config.checkpoint.allow, path)[0]
    return now


def restore(engine: Any, paths: list[Path], now: TrainState, base: Base | None, config: Config, world: World) -> Path:
    """Load weights, optimizer, schedule and random state; ``now`` becomes the position of the checkpoint.

    Returns:
        The checkpoint that was loaded.

    Raises:
        ConfigError: it is of another model, or of a run that differs in what ``checkpoint.allow`` does not name.
    """
    problem = ""
    for path in paths:
        content = manifest.read(path)
        if content is None:
            continue
        resumed, notes = compatible.position(content.state, now, config.checkpoint.allow, path)
        _check_model(engine, content, base, config, world, path)
        problem = _load(engine, path, content, config, world)
        if not problem:
            for note in notes:
                world.log(f"note: {note}")
            for name in resumed.__struct_fields__:
                setattr(now, name, getattr(resumed, name))
            _restore_random_state(path, content, config, world)
            return path
        world.log(f"note: {path.name} cannot be loaded: {problem}")
    raise ConfigError(f"checkpoint.resume: {paths[-1]} does not fit this configuration: {problem or 'no manifest'}")


def _is_intact(path: Path, world: World) -> bool:
    """Compare every file's checksum, each rank a share of them."""
    found: Found | None = folders.examine(path)[0]
    problem = "it is gone" if found is None else manifest.damaged(path, found.manifest, world.rank, world.size)
    if world.all_agree(not problem):
        return True
    if problem:
        print(f"note: skipped a checkpoint: {path.name}: {problem}", flush=True)
    return False


def _check_model(engine: Any, content: Manifest, base: Base | None, config: Config, world: World, path: Path) -> None:
    compatible.model(content, identity.shapes(engine.module), path)
    if set(content.trained) != set(identity.trained(engine.module)):
        raise ConfigError(f"checkpoint.resume: {path} was trained with other parameters frozen; see lora.targets")
    if content.zero_stage != config.zero.stage:
        raise ConfigError(
            f"checkpoint.resume: {path} was written with ZeRO-{content.zero_stage}; set zero.stage={content.zero_stage}"
        )
    if content.precision != config.training.precision:
        raise ConfigError(
            f"checkpoint.resume: {path} was written in {content.precision}; set training.precision={content.precision}"
        )
    if content.optimizer != (mine := support.states(config)):
        raise ConfigError(
            f"checkpoint.resume: {path} holds the optimizer states of {content.optimizer}, and this run has {mine}; "
            "set optimizer.kind and optimizer.master_weights back"
        )
    if content.state.ranks != world.size and config.zero.stage and not support.converts(content.optimizer):
        raise ConfigError(
            f"checkpoint.resume: {path} was written by {content.state.ranks} ranks, and the states of "
            f"{content.optimizer} cannot be divided anew; set run.ranks={content.state.ranks}"
        )
    if content.base is not None and base is not None and content.base.fingerprint != base.fingerprint:
        was = f"model.name={content.base.name}" if content.base.name else "random weights"
        raise ConfigError(
            f"checkpoint.resume: {path} holds adapters of a base model with other weights ({was} then); give the same "
            "model, and for random weights the same training.seed and kind of device"
        )


def _load(engine: Any, path: Path, content: Manifest, config: Config, world: World) -> str:
    """Load into the engine; return the error of some rank, or an empty text."""
    problem = ""
    try:
        if content.state.ranks != world.size and config.zero.stage > 0:
            with universal.converted(path, world) as copy, universal.loading(engine):
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
