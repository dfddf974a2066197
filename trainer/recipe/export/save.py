"""Writes the final model into a temporary folder, compares it, then renames the folder."""

import shutil
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..engine.distributed import World
from ..model.tokenizer import end_tokens
from ..monitor import Progress, activity, probe
from . import card, push, weights
from .card import Results
from .weights import ExportError


def save_model(
    engine: Any,
    model: Any,
    tokenizer: Any,
    config: Config,
    folder: Path,
    world: World,
    results: Results,
    progress: Progress | None = None,
) -> int:
    """Write the final model, its tokenizer and its card, for ``AutoModelForCausalLM.from_pretrained``.

    All ranks call this.

    Returns:
        The number of tensors that were compared with the training's and are equal.

    Raises:
        ExportError: the files cannot be written, or contain other weights; in every rank.
    """
    part = folder.with_name(folder.name + ".part")
    gathered = weights.gathered(engine, model, config, world)
    problem = ""
    if world.is_first and gathered is not None:
        try:
            shutil.rmtree(part, ignore_errors=True)
            _write(model, gathered, tokenizer, config, part, folder)
            (part / "README.md").write_text(card.text(config, results), encoding="utf-8")
        except (OSError, RuntimeError, ValueError, ExportError) as error:
            shutil.rmtree(part, ignore_errors=True)
            problem = (str(error).strip() or repr(error)).splitlines()[0]
    del gathered
    problem = world.share_text(problem)
    if problem:
        raise ExportError(f"the final model cannot be written to {folder}: {problem}")
    try:
        equal = weights.compare(model, part, config, world, progress)
    except ExportError:
        if world.is_first:
            shutil.rmtree(part, ignore_errors=True)
        raise
    if world.is_first:
        _replace(folder, part)
    world.barrier()
    return equal


def push_last(folder: Path, repository: str, world: World) -> None:
    """Leave the process group, then upload a folder from rank 0. All ranks call this, and do not communicate after it.

    An upload may take hours: ranks that wait for it in a collective would end the run at its timeout.
    """
    world.leave()
    if world.is_first:
        with probe().phase("checkpoint"), activity("export", f"pushing to {repository}"):
            world.log(push.push(folder, repository))


def _write(model: Any, gathered: dict[str, Any], tokenizer: Any, config: Config, part: Path, final: Path) -> None:
    plain = model.get_base_model() if config.lora.rank else model
    _settle_config(plain, tokenizer, config)
    if not config.lora.rank:
        model.save_pretrained(str(part), state_dict=gathered)
    elif config.lora.merge:
        weights.merged(model, gathered, config).save_pretrained(str(part))
    else:
        if not config.model.name:
            # Random weights have no name to load them by, and adapters are useless without them.
            plain.save_pretrained(str(part / "base"), state_dict=weights.base_weights(gathered))
            model.peft_config["default"].base_model_name_or_path = str(final.absolute() / "base")
        adapters = {name: tensor for name, tensor in gathered.items() if weights.is_adapter(name)}
        model.save_pretrained(str(part), state_dict=adapters)
    tokenizer.save_pretrained(str(part))


def _settle_config(plain: Any, tokenizer: Any, config: Config) -> None:
    """Undo training's changes of the model's configuration, and set the tokens that end an answer."""
    own = config.model.config.get("use_cache", True)
    if config.model.name:
        from transformers import AutoConfig

        own = getattr(AutoConfig.from_pretrained(config.model.name), "use_cache", True)
    plain.config.use_cache = own
    generation = plain.generation_config
    if generation is not None:
        ends = end_tokens(plain, tokenizer)
        generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None
        if generation.pad_token_id is None:
            generation.pad_token_id = tokenizer.pad_token_id


def _replace(folder: Path, part: Path) -> None:
    """Replace ``folder`` by ``part``."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
