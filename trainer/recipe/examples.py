"""From a record to token ids and labels: prompts carry no loss unless that is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from .config import Config

IGNORED = -100
"""The label of a token that no loss is counted on (torch.nn.CrossEntropyLoss.ignore_index)."""

Segment = tuple[str, bool]
"""A piece of text, and whether its tokens carry loss."""


class Encoder:
    """Turns records into ``input_ids`` and ``labels``."""

    def __init__(self, tokenizer: Any, config: Config, kind: str) -> None:
        self._tokenizer = tokenizer
        self._data = config.data
        self._kind = kind
        self._limit = config.training.sequence_length

    def texts(self, record: Mapping[str, Any]) -> list[str]:
        """List a record's texts, as a tokenizer is trained on them."""
        if self._kind == "text":
            return [str(record[self._data.text_column])]
        return [message["content"] for message in self._messages(record)]

    def encode(self, record: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """Encode one record, cut to the sequence length.

        Returns:
            Token ids, and labels of the same length: the same ids, or ``IGNORED`` where no loss is counted.
        """
        ids: list[int] = []
        labels: list[int] = []
        for text, learned in self.segments(record):
            piece: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += piece
            labels += piece if learned or self._data.train_on_prompt else [IGNORED] * len(piece)
        start = self._start()
        if start is not None and ids[:1] != [start]:
            ids.insert(0, start)
            labels.insert(0, IGNORED)
        return ids[: self._limit], labels[: self._limit]

    def batch(self, records: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        """Encode many records given as columns, leaving out those without a token that carries loss."""
        columns = list(records)
        ids: list[list[int]] = []
        labels: list[list[int]] = []
        for values in zip(*records.values(), strict=True):
            one, wanted = self.encode(dict(zip(columns, values, strict=True)))
            # The first label is never predicted: a causal model's loss starts at the second token.
            if any(label != IGNORED for label in wanted[1:]):
                ids.append(one)
                labels.append(wanted)
        return {"input_ids": ids, "labels": labels}

    def segments(self, record: Mapping[str, Any]) -> list[Segment]:
        """Split a record into its pieces of text."""
        end = str(self._tokenizer.eos_token)
        if self._kind == "text":
            return [(str(record[self._data.text_column]) + end, True)]
        messages = self._messages(record)
        return (self._templated(messages) if self._tokenizer.chat_template else None) or _plain(messages, end)

    def _templated(self, messages: list[dict[str, str]]) -> list[Segment] | None:
        """Apply the tokenizer's chat template; None where it does not let a prefix of the chat stand as it is."""
        result: list[Segment] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], True)
            after = self._render(messages[: index + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                return None
            result += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return result

    def _render(self, messages: list[dict[str, str]], ask: bool) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))

    def _start(self) -> int | None:
        """Return the token that the tokenizer itself begins a text with, if it does."""
        first: list[int] = self._tokenizer("a")["input_ids"][:1]
        start = self._tokenizer.bos_token_id
        return start if start is not None and first == [start] else None

    def _messages(self, record: Mapping[str, Any]) -> list[dict[str, str]]:
        if self._kind == "chat":
            return [
                {"role": str(message["role"]), "content": str(message["content"])}
                for message in record[self._data.messages_column]
            ]
        return [
            {"role": "user", "content": str(record[self._data.prompt_column])},
            {"role": "assistant", "content": str(record[self._data.response_column])},
        ]


def _plain(messages: list[dict[str, str]], end: str) -> list[Segment]:
    """Write a chat without a template, for base models: ``User: ...`` and ``Assistant: ...``."""
    result: list[Segment] = []
    for message in messages:
        result.append((f"{message['role'].capitalize()}: ", False))
        if message["role"] == "assistant":
            result.append((message["content"] + end, True))
            result.append(("\n", False))
        else:
            result.append((message["content"] + "\n", False))
    return result
