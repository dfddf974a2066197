"""Checkpoints to resume from (DeepSpeed's), and the final model (Hugging Face's)."""

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from ...protocol.errors import ConfigError
from .config import Config
from .ranks import World

_TAG = re.compile(r"step-(\d+)")


class Progress:
    """How far a run has come; saved with every checkpoint, so that a resumed run tells the same story."""

    def __init__(self, step: int = 0, tokens: int = 0) -> None:
        self.step = step
        self.tokens = tokens


def find(resume: str, output: Path) -> Path | None:
    """Find the checkpoint to resume from.

    Args:
        resume: ``never``, ``auto``, or the path of a checkpoint (``step-N``), its parent, or an output folder.
        output: this run's output folder.

    Raises:
        ConfigError: a path was given and no checkpoint is there.
    """
    if resume == "never":
        return None
    place = output if resume == "auto" else Path(resume)
    if _TAG.fullmatch(place.name):
        return place
    for folder in (place, place / "checkpoints"):
        latest = folder / "latest"
        if latest.is_file() and (folder / latest.read_text().strip()).is_dir():
            return folder / latest.read_text().strip()
    if resume == "auto":
        return None
    raise ConfigError(f"checkpoint.resume: {resume}: no checkpoint is there (no file called latest)")


def save(engine: Any, progress: Progress, folder: Path, keep: int, world: World) -> Path:
    """Write a checkpoint of all ranks, then remove the oldest ones beyond ``keep``."""
    tag = f"step-{progress.step}"
    # DeepSpeed reaches consensus over "latest" only after all ranks have written: a torn checkpoint is never named.
    engine.save_checkpoint(
        str(folder), tag=tag, client_state={"ftmon_step": progress.step, "ftmon_tokens": progress.tokens}
    )
    _save_random_state(folder / tag, world)
    world.barrier()
    if world.is_first:
        found = sorted((path for path in folder.iterdir() if _TAG.fullmatch(path.name)), key=_written)
        for old in [path for path in found if path.name != tag][: max(0, len(found) - keep)]:
            shutil.rmtree(old, ignore_errors=True)
    return folder / tag


def load(engine: Any, path: Path, world: World) -> Progress:
    """Load weights, optimizer, schedule and random state.

    Raises:
        ConfigError: the checkpoint is not of this model or number of ranks.
    """
    wanted = len(list(path.glob("random-*.pt")))
    if wanted != world.size:
        raise ConfigError(
            f"checkpoint.resume: {path} was written by {wanted} ranks, and this run has {world.size}; "
            f"set run.ranks={wanted}"
        )
    try:
        loaded, state = engine.load_checkpoint(str(path.parent), tag=path.name)
    except (RuntimeError, KeyError, AssertionError, ValueError) as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        raise ConfigError(f"checkpoint.resume: {path} does not fit this configuration: {first}") from None
    if loaded is None:
        raise ConfigError(f"checkpoint.resume: {path} is not a checkpoint")
    _load_random_state(path, world)
    return Progress(int(state["ftmon_step"]), int(state["ftmon_tokens"]))


def save_model(engine: Any, model: Any, tokenizer: Any, config: Config, folder: Path, world: World) -> None:
    """Write the final model and its tokenizer, for ``AutoModelForCausalLM.from_pretrained``. All ranks call this."""
    if config.zero.stage == 3:
        weights = engine._zero3_consolidated_16bit_state_dict()
    else:
        weights = model.state_dict() if world.is_first else None
    if world.is_first and weights is not None:
        if config.lora.rank and config.lora.merge:
            _merged(model, weights, config).save_pretrained(str(folder))
        else:
            model.save_pretrained(str(folder), state_dict=_adapters(weights) if config.lora.rank else weights)
        tokenizer.save_pretrained(str(folder))
    world.barrier()


def _adapters(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if "lora_" in name}


def _merged(model: Any, weights: dict[str, Any], config: Config) -> Any:
    """Build the model anew on the CPU with its adapters' weights, and merge them: the same for every ZeRO stage."""
    from transformers import AutoModelForCausalLM

    from .model import add_lora

    dtype = next(iter(weights.values())).dtype
    fresh = add_lora(AutoModelForCausalLM.from_config(model.config, dtype=dtype), config)
    fresh.load_state_dict(weights, strict=False)
    return fresh.merge_and_unload()


def _written(path: Path) -> float:
    # Not by step: a run resumed from an older checkpoint passes the same steps again.
    return path.stat().st_mtime


def _save_random_state(folder: Path, world: World) -> None:
    state = {"cpu": torch.get_rng_state()}
    if world.on_gpu:
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    torch.save(state, folder / f"random-{world.rank}.pt")


def _load_random_state(folder: Path, world: World) -> None:
    state: dict[str, torch.Tensor] = torch.load(folder / f"random-{world.rank}.pt", weights_only=True)
    torch.set_rng_state(state["cpu"])
    if world.on_gpu and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)
