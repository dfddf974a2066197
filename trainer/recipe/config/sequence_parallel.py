"""Settings that are compatible with ``training.sequence_parallel_size``. Nothing here imports torch.

docs/training.md, Sequence parallelism, has the same as a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..data.decode import parse
from .schema import Config

KEY = "training.sequence_parallel_size"
_HEADS = ("num_attention_heads", "n_head", "num_heads")
"""Names of the number of query heads in transformers' configurations."""


def refusal(config: Config, ranks: int, precision: str) -> tuple[str, str] | None:
    """Return the dotted path of a setting that excludes sequence parallelism, and the reason; None: no such setting.

    Args:
        config: the configuration.
        ranks: number of ranks of the run.
        precision: ``training.precision`` with ``auto`` resolved.
    """
    size = config.training.sequence_parallel_size
    if size == 1:
        return None
    if text := ranks_refusal(ranks, size):
        return KEY, text
    model = config.model
    for path, refused, text in (
        ("model.attention", model.attention in ("eager", "flash_attention_2"), f"{model.attention}; use auto"),
        ("model.compile", model.compile != "off", "compiled layers; use off"),
        ("model.quantization", model.quantization != "none", f"{model.quantization}; use none"),
        ("training.precision", precision == "fp16", "fp16; use bf16"),
    ):
        if refused:
            what, _, fix = text.partition("; ")
            return path, f"{what} cannot be used with {KEY}={size}: it has not been shown to be right; {fix}"
    heads = _heads_of(config)
    text = heads_refusal(*heads, size) if heads is not None else ""
    return (KEY, text) if text else None


def ranks_refusal(ranks: int, size: int) -> str:
    """Return the reason why ``ranks`` ranks cannot form groups of ``size``; empty if they can."""
    if ranks % size == 0:
        return ""
    near = max(size, ranks // size * size)
    return f"is {size}, but {ranks} rank{'s are' * (ranks != 1) or ' is'} not a multiple of it; use run.ranks={near}"


def heads_refusal(heads: int, key_value_heads: int, size: int) -> str:
    """Return the reason why attention heads cannot be divided among ``size`` ranks; empty if they can.

    Query heads are divided. Key and value heads are divided too, or repeated if there are fewer than ranks.
    """

    def refuse(count: int, name: str) -> str:
        fits = [one for one in range(2, heads + 1) if _divides(heads, key_value_heads, one)]
        fix = f"use {', '.join(map(str, fits[:6]))} or 1" if fits else "use 1"
        return f"is {size}, which cannot divide the model's {count} {name} heads; {fix}"

    if heads % size:
        return refuse(heads, "attention")
    return "" if _divides(heads, key_value_heads, size) else refuse(key_value_heads, "key/value")


def _divides(heads: int, key_value_heads: int, size: int) -> bool:
    return heads % size == 0 and (key_value_heads % size == 0 or size % key_value_heads == 0)


def _heads_of(config: Config) -> tuple[int, int] | None:
    """Return the numbers of query and of key/value heads if they can be read without torch or a network."""
    found: Any = config.model.config
    if config.model.name:
        try:
            found = parse((Path(config.model.name).expanduser() / "config.json").read_text())
        except (OSError, ValueError):
            return None
    if isinstance(found, Mapping) and isinstance(found.get("text_config"), Mapping):
        found = found["text_config"]
    if not isinstance(found, Mapping):
        return None
    heads = next((found[name] for name in _HEADS if isinstance(found.get(name), int)), None)
    groups = found.get("num_key_value_heads")
    if heads is None or heads < 1:
        return None
    return heads, groups if isinstance(groups, int) and groups > 0 else heads
