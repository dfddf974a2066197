"""Settings that are compatible with ``training.sequence_parallel_size``. Nothing here imports torch.

docs/training.md, Sequence parallelism, has the same as a table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.schema import Config
from ..data.decode import parse
from ..engine.division import SEQUENCES, heads_refusal, ranks_refusal

_HEADS = ("num_attention_heads", "n_head", "num_heads")
"""Names of the number of query heads in transformers' configurations."""


def refusal(config: Config, ranks: int, precision: str) -> tuple[str, str] | None:
    """Return the dotted path of a setting that excludes sequence parallelism, and the reason; None: no such setting."""
    size = config.training.sequence_parallel_size
    if size == 1:
        return None
    if text := ranks_refusal(ranks, size):
        return SEQUENCES, text
    model = config.model
    for path, refused, text in (
        ("model.attention", model.attention in ("eager", "flash_attention_2"), f"{model.attention}; use auto"),
        ("model.compile", model.compile != "off", "compiled layers; use off"),
        ("model.quantization", model.quantization != "none", f"{model.quantization}; use none"),
        ("training.precision", precision == "fp16", "fp16; use bf16"),
    ):
        if refused:
            what, _, fix = text.partition("; ")
            return path, f"{what} cannot be used with {SEQUENCES}={size}: it has not been shown to be right; {fix}"
    heads = _heads_of(config)
    text = heads_refusal(*heads, size) if heads is not None else ""
    return (SEQUENCES, text) if text else None


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
