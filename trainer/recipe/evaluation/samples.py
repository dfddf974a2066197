"""Generates answers of the model to prompts of the evaluation examples during training."""

from typing import Any

import torch

from ..engine.distributed import World
from ..model.loss import IGNORED
from ..model.positions import room
from ..model.tokenizer import end_tokens


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
