"""Encodes records to token ids, and marks those that carry loss."""

import hashlib
import os
import re
import shutil
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy
from numpy.typing import NDArray

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..model.tokenizer import start_token
from . import messages as formats
from .messages import ASSISTANT, Conversation, RefusedError, Text
from .records import Records
from .template import Chat, ChatTemplate, Span, choose

ENCODING_VERSION = 8  # Increased with every change of tokens or labels in this package, for which tokens are made anew


class Encoded(msgspec.Struct):
    """The tokens of one document."""

    ids: list[int]
    learned: list[bool]
    cut: int = 0
    turns: int = 0  # Number of turns to learn (1 for a text)
    ends: list[int] = msgspec.field(default_factory=list[int])
    """Indices of the tokens that end those turns, as far as they were not cut away."""
    reasoning_lost: int = 0
    merged: int = 0  # Number of turns whose first token includes the end of their header, so that it carries no loss
    split: int = 1  # Number of documents the record was split into; set in the first

    @property
    def label_tokens(self) -> int:
        """Number of tokens that carry loss; nothing predicts the first position."""
        return sum(self.learned[1:])

    @property
    def ends_learned(self) -> int:
        """Number of turns whose end carries loss."""
        return sum(self.learned[index] for index in self.ends)


class _Piece(NamedTuple):
    text: str
    spans: list[Span]
    turns: int
    add_end: bool
    is_text: bool = False
    reasoning_lost: int = 0


class Encoder:
    """Turns records into documents; a tokenizer or chat template that does not fit them is a ``ConfigError``."""

    def __init__(self, tokenizer: Any, config: Config, forms: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._data = data = config.data
        self._forms = forms
        self._limit = config.training.sequence_length
        self._train_on = data.train_on
        if not tokenizer.is_fast:
            raise ConfigError("tokenizer: has no fast (Rust) form, which tells where in a text each token stands")
        if tokenizer.eos_token_id is None:
            raise ConfigError("tokenizer: has no end-of-sequence token")
        chats = {form for form in forms if form != "text"}
        self.template: ChatTemplate | None = choose(tokenizer, data) if chats else None
        if self.template is None and chats - {"instruction", "alpaca"}:
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
        """Return each record's documents (one, several of a split text, none if it is dropped), or its refusal.

        ``records``: each with the number of its source; a ``RefusedError`` may stand for one.
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
        tokens: Iterator[Any] = iter(())
        if texts:
            options = {"add_special_tokens": False, "return_offsets_mapping": True, "return_attention_mask": False}
            encoding = self._tokenizer(texts, **options, verbose=False)
            tokens = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
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
        spans = [*_all_but(chat, content), *turns] if self._train_on == "all" else turns
        return _Piece(chat.text, spans, len({turn.message for turn in turns}), False, False, chat.reasoning_lost)

    def _learns(self, chat: Conversation, index: int) -> bool:
        if not chat.messages[index].learned:
            return False
        if self._train_on == "last":
            return index == max(i for i, message in enumerate(chat.messages) if message.role == ASSISTANT)
        return self._train_on != "completion" or index >= chat.prompt

    def _joined(self, chat: Conversation) -> _Piece:
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
            whole.ends = [end for end in whole.ends if end < limit]
            whole.ids, whole.learned = whole.ids[:limit], whole.learned[:limit]
        else:
            start = int(self._start is not None)
            whole.ids[start : excess + start] = []
            whole.learned[start : excess + start] = []
            whole.ends = [end - excess for end in whole.ends if end - excess >= start]
        whole.cut = excess
        return [whole]


def _all_but(chat: Chat, content: Conversation) -> list[Span]:
    """Return the spans of a whole text, without the messages of weight 0; refuse a text that does not show them."""
    left_out = {number for number, message in enumerate(content.messages) if not message.learned}
    for number in sorted(left_out - {piece.message for piece in chat.pieces}):
        raise RefusedError(
            f"message {number + 1} has weight 0, and the chat template does not show which text is its own"
        )
    bounds = [0, *(bound for piece in chat.pieces if piece.message in left_out for bound in piece[:2]), len(chat.text)]
    return [Span(start, end, 0, False) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end]


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


SHOWN = 20


class Listed(msgspec.Struct):
    """Records of one kind: all are counted, the first are listed."""

    count: int = 0
    first: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])

    def add(self, place: str, reason: str) -> None:
        """Count a record."""
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append((place, reason))

    def merge(self, other: "Listed") -> None:
        """Add the records of a later part of the data."""
        self.count += other.count
        self.first = (self.first + other.first)[:SHOWN]


class Report(msgspec.Struct):
    """Counts over all records."""

    read: int = 0
    refused: Listed = msgspec.field(default_factory=Listed)
    reasons: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Number of refused records by reason, without the numbers in it."""
    dropped: Listed = msgspec.field(default_factory=Listed)  # Records over the sequence length, where these are dropped
    cut: Listed = msgspec.field(default_factory=Listed)
    split: Listed = msgspec.field(default_factory=Listed)
    unlabelled: Listed = msgspec.field(default_factory=Listed)
    """Records without a token that carries loss: it was cut away, or there is none."""
    unended: Listed = msgspec.field(default_factory=Listed)
    reasoning_lost: Listed = msgspec.field(default_factory=Listed)
    merged: Listed = msgspec.field(default_factory=Listed)  # Records with a turn whose first token has the header's end

    def refuse(self, place: str, reason: str) -> None:
        """Count a refused record."""
        self.refused.add(place, reason)
        general = re.sub("[0-9]+", "N", reason)
        self.reasons[general] = self.reasons.get(general, 0) + 1

    def merge(self, other: "Report") -> None:
        """Add the report of a later part of the data."""
        self.read += other.read
        self.reasons = dict(Counter(self.reasons) + Counter(other.reasons))
        for name in ("refused", "dropped", "cut", "split", "unlabelled", "unended", "reasoning_lost", "merged"):
            mine: Any = getattr(self, name)
            mine.merge(getattr(other, name))

    def exceeds(self, most_refused: float) -> bool:
        """Return whether a larger share of the records than this was refused."""
        return self.refused.count > most_refused * self.read

    def check(self, most_refused: float) -> None:
        """Refuse a data set of which a larger share than ``most_refused`` was refused, by a ``ConfigError``."""
        if self.exceeds(most_refused):
            shown = "; ".join(f"{place}: {reason}" for place, reason in self.refused.first[:3])
            raise ConfigError(
                f"data: {self.refused.count:,} of {self.read:,} records are refused, more than data.max_refused "
                f"({most_refused:g} of them) allows: {shown}{'; ...' if self.refused.count > 3 else ''}; "
                "'ftmon data check' lists more"
            )

    def notes(self) -> list[str]:
        """Return notes for the user before training, a line each."""
        found: list[str] = []
        for listed, what in (
            (self.refused, "refused"),
            (self.dropped, "longer than training.sequence_length and dropped"),
            (self.cut, "cut to training.sequence_length"),
            (self.unlabelled, "without a token to learn, and left out"),
        ):
            if listed.count:
                place, reason = listed.first[0]
                found.append(f"{listed.count:,} of {self.read:,} records {what}, the first {place}: {reason}")
        return found


BATCH = 256  # Records encoded in one call of the tokenizer


class Documents:
    """Encoded documents of a folder."""

    def __init__(self, folder: Path) -> None:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
        self.report = meta.report
        self.digest = meta.digest  # Hash of the documents' token ids and labels, in order
        self.lengths: NDArray[numpy.int64] = numpy.load(folder / "lengths.npy")
        self.records: NDArray[numpy.int64] = numpy.load(folder / "records.npy")
        self._starts = numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(self.lengths)])
        total = int(self._starts[-1])
        self.ids: Any = _mapped(folder / "ids.bin", numpy.int32, total)
        self.learned: Any = _mapped(folder / "learned.bin", numpy.bool_, total)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.bool_]]:
        """Return a document's token ids, and a mask of those that carry loss; the first never does."""
        start, end = self._starts[index], self._starts[index + 1]
        learned = numpy.array(self.learned[start:end])
        learned[:1] = False
        return numpy.array(self.ids[start:end]), learned

    def label_tokens(self) -> NDArray[numpy.int64]:
        """Return the number of tokens that carry loss, by document."""
        counts = numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(self.learned, dtype=numpy.int64)])
        firsts = numpy.asarray(self.learned)[self._starts[:-1]] if len(self) else numpy.empty(0, numpy.int64)
        return counts[self._starts[1:]] - counts[self._starts[:-1]] - firsts


class Meta(msgspec.Struct):
    """Metadata of the tokens."""

    report: Report
    digest: str = ""


def _mapped(path: Path, dtype: Any, count: int) -> Any:
    if os.path.getsize(path) != count * numpy.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged")
    return numpy.memmap(path, dtype, "r", shape=(count,)) if count else numpy.empty(0, dtype)


def write_part(
    encoder: Encoder, records: Records, start: int, stop: int, folder: Path, progress: Callable[[int], object] | None
) -> None:
    """Encode the records from ``start`` to ``stop`` into a new folder; ``progress`` gets the number of finished."""
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    lengths: list[int] = []
    sources: list[int] = []
    with (folder / "ids.bin").open("wb") as ids, (folder / "learned.bin").open("wb") as learned:
        for number, _, made in encoded(encoder, records, start, stop):
            if progress is not None and (number - start) % BATCH == 0:
                progress(number - start)
            for document in note(report, records, number, made):
                ids.write(numpy.array(document.ids, numpy.int32).tobytes())
                learned.write(numpy.array(document.learned, numpy.bool_).tobytes())
                lengths.append(len(document.ids))
                sources.append(number)
    _write_index(folder, lengths, sources, report)


def encoded(
    encoder: Encoder, records: Records, start: int, stop: int
) -> "Iterator[tuple[int, Any, list[Encoded] | RefusedError]]":
    """Yield number, content and encoded documents (or refusal) of the records from ``start`` to ``stop``."""
    for begin in range(start, stop, BATCH):
        numbers = range(begin, min(begin + BATCH, stop))
        batch = [(read(records, number), records.source_of(number)[0]) for number in numbers]
        for number, (record, _), made in zip(numbers, batch, encoder.encode(batch), strict=True):
            yield number, record, made


def read(records: Records, number: int) -> Any:
    """Return a record, or its ``RefusedError``."""
    try:
        return records.record(number)
    except RefusedError as refusal:
        return refusal


def note(report: Report, records: Records, number: int, made: "list[Encoded] | RefusedError") -> list[Encoded]:
    """Count a record in the report; return the documents to train on."""
    report.read += 1
    place = records.place(number)
    if isinstance(made, RefusedError):
        report.refuse(place, str(made))
        return []
    if not made:
        report.dropped.add(place, "longer than training.sequence_length")
        return []
    kept = [document for document in made if document.label_tokens]
    tokens = sum(len(document.ids) for document in made)
    first = made[0]
    if first.cut:
        report.cut.add(place, f"{first.cut:,} of {tokens + first.cut:,} tokens are cut away")
    if first.split > 1:
        report.split.add(place, f"{tokens:,} tokens make {first.split} sequences")
    if not kept:
        cut = "its labels are all cut away" if first.cut else "no token carries loss"
        report.unlabelled.add(place, cut)
    elif any(document.ends_learned < document.turns for document in made):
        report.unended.add(place, "a turn is learned without its end" + (", which is cut away" if first.cut else ""))
    if first.merged:
        report.merged.add(place, "the first token of a turn also holds the end of its header, and carries no loss")
    if first.reasoning_lost:
        report.reasoning_lost.add(place, "the template leaves the reasoning of a turn out")
    return kept


def join_parts(parts: list[Path], folder: Path) -> None:
    """Join the folders of consecutive parts of the records into one, and remove them."""
    report = Report()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ids.bin", "learned.bin"):
        with (folder / name).open("wb") as output:
            for part in parts:
                with (part / name).open("rb") as content:
                    shutil.copyfileobj(content, output, 1 << 20)
    for part in parts:
        report.merge(msgspec.json.decode((part / "meta.json").read_bytes(), type=Meta).report)
    lengths = numpy.concatenate([numpy.load(part / "lengths.npy") for part in parts])
    sources = numpy.concatenate([numpy.load(part / "records.npy") for part in parts])
    _write_index(folder, lengths, sources, report)
    for part in parts:
        shutil.rmtree(part)


def _write_index(folder: Path, lengths: Any, sources: Any, report: Report) -> None:
    numpy.save(folder / "lengths.npy", numpy.array(lengths, numpy.int64))
    numpy.save(folder / "records.npy", numpy.array(sources, numpy.int64))
    digest = hashlib.blake2b(numpy.array(lengths, numpy.int64).tobytes(), digest_size=16)
    for name in ("ids.bin", "learned.bin"):
        with (folder / name).open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    (folder / "meta.json").write_bytes(msgspec.json.encode(Meta(report, digest.hexdigest())))


def opened(folder: Path) -> Documents | None:
    """Return the documents of a folder; None if they are incomplete."""
    try:
        return Documents(folder)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def scratch(folder: Path) -> Path:
    """Make a temporary folder beside ``folder``, to be renamed to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))


def publish(made: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; a complete one of another run is kept."""
    if opened(folder) is not None:
        shutil.rmtree(made)
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(made, folder)
    except OSError:
        if opened(folder) is None:
            raise
        shutil.rmtree(made)
