"""Loads the tokenizer: the model's own, another one, or one trained on the data."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ....protocol.errors import ConfigError
from ..config.schema import Config

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
TEXT_END = "<|endoftext|>"
"""Not used, but Qwen2's tokenizer class would add it if it is missing, and exceed the vocabulary."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pre-tokenization rule of Qwen2. For that model type AutoTokenizer replaces the rules of tokenizer.json by the model's
own (transformers 5.23, tokenization_auto.py), so ours must be the same."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def load(config: Config, trained: Path | None) -> Any | None:
    """Load the configured tokenizer, with a pad token, or the one that was trained into the folder ``trained``.

    Return None if one has to be trained. A configured one that cannot be loaded is a ``ConfigError``.
    """
    name = config.tokenizer.name or config.model.name
    if not name:
        if trained is not None and not (trained / "tokenizer.json").exists():
            raise ConfigError(f"checkpoint.resume: {trained}: the tokenizer of that run is not there")
        return with_special_tokens(AutoTokenizer.from_pretrained(str(trained)), config) if trained is not None else None
    key = "tokenizer.name" if config.tokenizer.name else "model.name"
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        if Path(name).is_dir() and not any(Path(name).glob("*token*")):
            raise ConfigError(
                f"{key}: {name} has no tokenizer; set tokenizer.name to a folder or a name that has"
            ) from None
        raise ConfigError(f"{key}: no tokenizer can be loaded from {name}: {str(error).splitlines()[0]}") from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.eos_token is None:
        raise ConfigError(
            f"{key}: the tokenizer of {name} has no end-of-sequence token, so that no text could end; set eos_token in "
            "its tokenizer_config.json, or tokenizer.name to another"
        )
    return with_special_tokens(tokenizer, config)


def with_special_tokens(tokenizer: Any, config: Config) -> Any:
    """Return a tokenizer after adding ``tokenizer.special_tokens`` that it does not have."""
    if config.tokenizer.special_tokens:
        tokenizer.add_tokens(config.tokenizer.special_tokens, special_tokens=True)
    return tokenizer


def train(texts: Callable[[], Iterable[str]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, of fewer than ``vocab_size`` tokens if the texts do not yield that many."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, END, USER, ASSISTANT, SYSTEM, TEXT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": [USER, ASSISTANT, SYSTEM]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def loads_back(tokenizer: Any, folder: Path) -> bool:
    """Return whether ``AutoTokenizer`` loads from a saved model's folder the same tokenizer that was saved."""
    sample = "Why? It's 2 + 2 = 4, naïve café.\n\tdef add(a, b): return a + b  <|end|>"
    again: Any = AutoTokenizer.from_pretrained(str(folder))
    return len(again) == len(tokenizer) and again(sample)["input_ids"] == tokenizer(sample)["input_ids"]


def start_token(tokenizer: Any) -> int | None:
    """Return BOS, if the tokenizer begins a text with it."""
    first: list[int] = tokenizer("a")["input_ids"][:1]
    start = tokenizer.bos_token_id
    return start if start is not None and first == [start] else None


def special_tokens(tokenizer: Any) -> list[str]:
    """Return the special tokens, longest first; only they can end a turn."""
    found = {str(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special}
    found |= {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
    return sorted((token for token in found if token.strip()), key=len, reverse=True)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end an answer: the model's, EOS, and the one that the chat template writes after it."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = list(known) if isinstance(known, list | tuple) else [known]
    found += [tokenizer.eos_token_id, _template_end(tokenizer)]
    return list(dict.fromkeys(int(token) for token in found if token is not None))


def set_end_tokens(model: Any, tokenizer: Any) -> None:
    """Give a model's generation, if it has any, the tokens that end an answer; its configuration may have others."""
    generation = model.generation_config
    if generation is not None:
        ends = end_tokens(model, tokenizer)
        generation.eos_token_id = ends[0] if len(ends) == 1 else ends or None


def _template_end(tokenizer: Any) -> int | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    content = "9f3a"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    # With a further question: of some families (GLM-4.5) its token ends the answer.
    for chat in (messages, [*messages, messages[0]]):
        try:
            text: str = tokenizer.apply_chat_template(chat, tokenize=False)
        except (TemplateError, ValueError, TypeError):
            return None  # the template refuses such a conversation
        after = text.rpartition(content)[2]
        # The longest first: of two that begin at the same place, the tokenizer uses that one.
        written = [token for token in special_tokens(tokenizer) if token in after]
        if written:
            return tokenizer.convert_tokens_to_ids(min(written, key=after.index))
    return None


def fingerprint(tokenizer: Any) -> str:
    """Return a hash of a tokenizer: its vocabulary and rules, its special tokens' roles, and its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    roles = sorted(tokenizer.special_tokens_map.items())
    return hashlib.sha256(f"{rules}{roles}{tokenizer.chat_template}".encode()).hexdigest()[:16]
