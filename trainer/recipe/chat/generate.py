"""Generates an answer token by token."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from ....protocol.errors import UsageError
from ..model import positions


class Sampling(NamedTuple):
    """How the next token is chosen."""

    temperature: float
    """0: always the likeliest."""
    top_p: float
    """Draw only from the likeliest tokens with this total probability."""
    generator: torch.Generator


def tokens(
    model: Any, prompt: Sequence[int], stops: frozenset[int], limit: int, sampling: Sampling
) -> Generator[int, None, str]:
    """Yield an answer's tokens as they are generated, the stop token included; return why generation ended.

    Raises:
        UsageError: the prompt alone is as long as the model's longest sequence, or longer.
    """
    room = positions.room(model.config, len(prompt), limit)
    if room < 1:
        length = len(prompt) + room
        raise UsageError(f"the conversation is {len(prompt):,} tokens long, and the model takes {length:,} at the most")
    known: Any = None
    fed = torch.tensor([list(prompt)], device=model.device)
    for _ in range(room):
        # Not around the yield: inference mode would hold for the caller too.
        with torch.inference_mode():
            out = model(input_ids=fed, past_key_values=known, use_cache=True, logits_to_keep=1)
            known = out.past_key_values
            token = choose(out.logits[0, -1], sampling)
            fed = torch.tensor([[token]], device=model.device)
        yield token
        if token in stops:
            return "end"
    return "--max-tokens" if room == limit else "the model's longest sequence"


def choose(logits: torch.Tensor, sampling: Sampling) -> int:
    """Draw the next token from its logits, of shape [vocabulary]."""
    if sampling.temperature <= 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.float().cpu() / sampling.temperature, -1)
    ordered, indices = probabilities.sort(descending=True)
    # The first token is always kept: the sum before it is 0.
    ordered[ordered.cumsum(0) - ordered >= sampling.top_p] = 0.0
    return int(indices[torch.multinomial(ordered, 1, generator=sampling.generator)])


class Words:
    """Converts generated tokens to text, whole characters at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0
        self._begin = 0

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty in the middle of a character."""
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)
        if text.endswith("\ufffd"):
            return ""
        new = text[self._shown :]
        self._shown = len(text)
        if len(self._tokens) - self._begin > 64 and new.startswith(" "):
            # Decode from a new word on: the cost does not grow with the answer. The word's token is kept for its space.
            self._begin = len(self._tokens) - 1
            self._shown = len(self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True))
        return new

    def rest(self) -> str:
        """Return the rest of the text, an unfinished character."""
        text: str = self._tokenizer.decode(self._tokens[self._begin :], skip_special_tokens=True)
        return text[self._shown :]
