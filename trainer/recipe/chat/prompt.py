"""From messages to the tokens that a model is given, by its own template, and the tokens that end its answers."""

from typing import Any

from ....protocol.errors import UsageError

Message = dict[str, str]


class Prompts:
    """Renders conversations for one model."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.stops = self._stops(model)

    def encode(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the answer begins.

        Raises:
            UsageError: the template refuses it.
        """
        if not self.has_template:
            return self._tokenizer("".join(message["content"] for message in messages))["input_ids"]
        found: Any = self._render(messages, generate=True, tokenize=True)
        return list(found["input_ids"] if hasattr(found, "keys") else found)

    def _render(self, messages: list[Message], *, generate: bool, tokenize: bool) -> Any:
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(messages, add_generation_prompt=generate, tokenize=tokenize)
        except (TemplateError, ValueError, TypeError) as error:
            first = (str(error).strip() or repr(error)).splitlines()[0]
            raise UsageError(f"the model's chat template refuses these messages: {first}") from None

    def _stops(self, model: Any) -> frozenset[int]:
        """Return the tokens that end an answer: the model's, the tokenizer's, and the one the template writes."""
        found: set[int] = set()
        for one in (getattr(model.generation_config, "eos_token_id", None), self._tokenizer.eos_token_id):
            found |= set(one) if isinstance(one, list | tuple) else {one} if one is not None else set()
        if self.has_template:
            content = "9f3a"
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
            try:
                text: str = self._render(messages, generate=False, tokenize=False)
            except UsageError:
                return frozenset(found)
            after = text.rpartition(content)[2]
            ids: list[int] = self._tokenizer(after, add_special_tokens=False)["input_ids"]
            if ids and ids[0] in self._tokenizer.all_special_ids:
                found.add(ids[0])
        return frozenset(found)
