"""Tokenizers trained on the spot, with the special tokens of all chat families."""

from typing import Any

from chat_families import SPECIAL
from ftmon.trainer.recipe.model import tokenizer as tokenizers
from tokenizers import processors

TEXTS = [
    "What is two plus two? Two plus two is four.",
    "Name a colour. Red is a colour. Blue is another.",
    "hello world, hello rank; the capital of France is Paris",
    "<think>\nI think so.\n</think>\n\n user assistant system model tool_call arguments",
]


def family_tokenizer(template: str | dict[str, str] | None, *, adds_bos: bool = False) -> Any:
    """Return a tokenizer with ``<s>`` and ``</s>``, and the chat families' special tokens."""
    made: Any = tokenizers.train(lambda: TEXTS, 420)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.bos_token, made.eos_token = "<s>", "</s>"
    made.chat_template = template
    if adds_bos:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
        )
    return made
