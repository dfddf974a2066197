"""Encodes records to token ids, and marks those that carry loss."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..model.tokenizer import start_token
from . import formats
from .messages import ASSISTANT, Conversation, RefusedError, Text
from .template import Chat, ChatTemplate, Span, choose

ENCODING_VERSION = 5
"""Increased with every change of tokens or labels in this package; tokens of another version are not used."""


class Encoded(msgspec.Struct):
    """The tokens of one document."""

    ids: list[int]
    learned: list[bool]
    """Whether each token carries loss."""
    cut: int = 0
    """Number of tokens cut away."""
    turns: int = 0
    """Number of turns to learn (1 for a text)."""
    ends: list[int] = msgspec.field(default_factory=list[int])
    """Indices of the tokens that end those turns, as far as they were not cut away."""
    reasoning_lost: int = 0
    """Number of turns whose reasoning the template omits."""
    merged: int = 0
    """Number of turns whose first token includes the end of their header, so that it carries no loss."""
    split: int = 1
    """Number of documents the record was split into; set in the first."""

    @property
    def label_tokens(self) -> int:
        """Number of tokens that carry loss; nothing predicts the first position."""
        return sum(self.learned[1:])

    @property
    def ends_learned(self) -> int:
        """Number of turns whose end carries loss."""
        return sum(self.learned[index] for index in self.ends)


class _Piece(NamedTuple):
    """A text before tokenization, and the characters to learn."""

    text: str
    spans: list[Span]
    turns: int
    add_end: bool
    """Whether to add the end-of-sequence token."""
    is_text: bool = False
    reasoning_lost: int = 0


class Encoder:
    """Turns records into documents.

    Raises:
        ConfigError: the tokenizer or its chat template cannot be used for these formats.
    """

    def __init__(self, tokenizer: Any, config: Config, forms: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._data = data = config.data
        self._forms = forms
        self._limit = config.training.sequence_length
        if not tokenizer.is_fast:
            raise ConfigError("tokenizer: has no fast (Rust) form, which tells where in a text each token stands")
        if tokenizer.eos_token_id is None:
            raise ConfigError("tokenizer: has no end-of-sequence token")
        chats = [form for form in forms if form != "text"]
        self._train_on = data.train_on
        self.template: ChatTemplate | None = choose(tokenizer, data) if chats else None
        if chats and self.template is None and set(chats) - {"instruction", "alpaca"}:
            raise ConfigError(
                "data.chat_template: none joins a prompt and a response; the data's chats need a template"
            )
        if data.truncation == "split" and chats:
            raise ConfigError("data.truncation: split is for text; use keep_start, keep_end or drop for chats")
        self._start = start_token(tokenizer)

    @property
    def settings(self) -> str:
        """All settings that the documents depend on, besides records and tokenizer."""
        data = self._data
        columns = (data.text_column, data.prompt_column, data.response_column, data.messages_column, data.tools_column)
        template = self.template.source if self.template is not None else ""
        chosen = (ENCODING_VERSION, self._forms, self._train_on, data.truncation, self._limit, self._start)
        return repr((chosen, columns, template))

    def encode(self, records: Sequence[tuple[Any, int]]) -> list["list[Encoded] | RefusedError"]:
        """Encode records.

        Args:
            records: each with the number of its source; a ``RefusedError`` may stand for one.

        Returns:
            For each record its documents (one, several of a split text, none if it is dropped), or its refusal.
        """
        pieces: list[_Piece | RefusedError] = []
        for record, source in records:
            try:
                if isinstance(record, RefusedError):
                    raise record
                pieces.append(self._piece(formats.convert(record, self._forms[source], self._data)))
            except RefusedError as refusal:
                pieces.append(refusal)
            except RecursionError:
                pieces.append(RefusedError("is nested too deeply"))
        texts = [piece.text for piece in pieces if not isinstance(piece, RefusedError)]
        encoding = (
            self._tokenizer(
                texts,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            if texts
            else {"input_ids": [], "offset_mapping": []}
        )
        tokens = iter(zip(encoding["input_ids"], encoding["offset_mapping"], strict=True))
        return [piece if isinstance(piece, RefusedError) else self._documents(piece, *next(tokens)) for piece in pieces]

    def _piece(self, content: Conversation | Text) -> _Piece:
        if isinstance(content, Text):
            return _Piece(content.text, [Span(0, len(content.text), 0, False)], 1, True, True)
        if self.template is None:
            return self._joined(content)
        messages = content.messages
        if self._train_on != "all":
            # Nothing after the last answer is learned.
            last = max(index for index, message in enumerate(messages) if message.role == ASSISTANT)
            content = msgspec.structs.replace(content, messages=messages[: last + 1])
        chat: Chat = self.template.render(content)
        turns = [turn for turn in chat.turns if self._learns(content, turn.message)]
        if not turns:
            raise RefusedError("has no assistant message to learn")
        spans = turns
        if self._train_on == "all":
            spans = [Span(0, len(chat.text), 0, False), *turns]
        return _Piece(chat.text, spans, len(turns), False, False, chat.reasoning_lost)

    def _learns(self, chat: Conversation, index: int) -> bool:
        if not chat.messages[index].learned:
            return False
        if self._train_on == "last":
            return index == max(i for i, message in enumerate(chat.messages) if message.role == ASSISTANT)
        return self._train_on != "completion" or index >= chat.prompt

    def _joined(self, chat: Conversation) -> _Piece:
        """Join the prompt and the response of a base model's record, as they stand."""
        prompt = "".join(message.content or "" for message in chat.messages[:-1])
        text = prompt + (chat.messages[-1].content or "")
        start = 0 if self._train_on == "all" else len(prompt)
        return _Piece(text, [Span(start, len(text), 0, False)], 1, True)

    def _documents(self, piece: _Piece, ids: list[int], offsets: list[tuple[int, int]]) -> "list[Encoded]":
        learned = [False] * len(ids)
        ends: list[int] = []
        starts = [start for start, _ in offsets]
        merged = 0
        for span in piece.spans:
            # A token that begins before the turn belongs to the prompt: it is input, not generated.
            first, behind = bisect_left(starts, span.start), bisect_left(starts, span.end)
            merged += 0 < first < len(ids) and offsets[first - 1][1] > span.start > offsets[first - 1][0]
            learned[first:behind] = [True] * (behind - first)
            if span.ended and behind > first:
                ends.append(behind - 1)
        if piece.add_end:
            if ids[-1:] != [self._tokenizer.eos_token_id]:
                ids = [*ids, self._tokenizer.eos_token_id]
                learned.append(True)
            ends = [len(ids) - 1]
        if self._start is not None and ids[:1] != [self._start]:
            ids = [self._start, *ids]
            learned.insert(0, False)
            ends = [end + 1 for end in ends]
        whole = Encoded(ids, learned, 0, piece.turns, ends, piece.reasoning_lost, merged)
        return self._truncate(whole, piece.is_text)

    def _truncate(self, whole: Encoded, is_text: bool) -> list[Encoded]:
        limit = self._limit
        excess = len(whole.ids) - limit
        if excess <= 0:
            return [whole]
        policy = self._data.truncation
        if policy == "auto":
            policy = "split" if is_text else "keep_start"
        if policy == "drop":
            return []
        if policy == "split":
            return _split(whole, limit)
        if policy == "keep_start":
            kept = slice(0, limit)
            whole.ends = [end for end in whole.ends if end < limit]
            whole.ids, whole.learned = whole.ids[kept], whole.learned[kept]
        else:
            start = int(self._start is not None)
            whole.ids = whole.ids[:start] + whole.ids[excess + start :]
            whole.learned = whole.learned[:start] + whole.learned[excess + start :]
            whole.ends = [end - excess for end in whole.ends if end - excess >= start]
        whole.cut = excess
        return [whole]


def _split(whole: Encoded, limit: int) -> list[Encoded]:
    cuts = list(range(0, len(whole.ids), limit))
    if len(whole.ids) - cuts[-1] == 1:
        # A document of one token predicts nothing, and this one is the end of the text.
        cuts[-1] -= 1
    pieces: list[Encoded] = []
    for start, stop in zip(cuts, [*cuts[1:], len(whole.ids)], strict=True):
        ends = [end - start for end in whole.ends if start <= end < stop]
        # Only the piece with the text's end has the end of a turn.
        pieces.append(Encoded(whole.ids[start:stop], whole.learned[start:stop], 0, len(ends), ends))
    pieces[0].split = len(pieces)
    return pieces


def texts(record: Any, form: str, config: Config) -> list[str]:
    """Return a record's texts for training a tokenizer; empty for a refused record."""
    try:
        content = formats.convert(record, form, config.data)
    except RefusedError:
        return []
    if isinstance(content, Text):
        return [content.text]
    return [text for message in content.messages for text in (message.content, message.reasoning) if text]
