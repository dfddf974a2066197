"""Renders messages to a model's input tokens by its own template; finds the tokens that end its answers."""

from typing import Any

from jinja2 import TemplateError

from ....protocol.errors import UsageError
from ..model.tokenizer import end_tokens

Message = dict[str, str]


class Prompts:
    """Renders conversations for one model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.stops = frozenset(end_tokens(model, tokenizer))

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, up to the beginning of the answer."""
        if not self.has_template:
            return self._tokenizer("".join(message["content"] for message in messages))["input_ids"]
        try:
            found: Any = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        except (TemplateError, ValueError, TypeError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise UsageError(f"the model's chat template refuses these messages: {first}") from None
        return list(found["input_ids"] if hasattr(found, "keys") else found)
