"""Encodes a data set as a run does, and counts its tokens, labels and problems."""

import hashlib
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec
import numpy

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data import encode, messages, pipeline
from ..data.encode import Encoded, Encoder, Listed, Report
from ..data.messages import Conversation, RefusedError
from ..data.pipeline import best_fit
from ..data.records import Records, read_records
from ..model.shape import check
from ..model.tokenizer import special_tokens

_REPEATED_SHARE, _REPEATED_LEAST = 0.05, 4


class Finding(msgspec.Struct, frozen=True):
    """A problem of the data, or of their use in training."""

    kind: str
    count: int
    text: str
    fix: str
    first: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of the records, before they are cut."""

    shortest: int
    median: int
    p90: int
    p99: int
    longest: int


class Facts(msgspec.Struct):
    """Counts of a data set."""

    report: Report = msgspec.field(default_factory=Report)
    max_refused: float = 1.0  # Share of refused records above which a training does not start
    formats: list[str] = msgspec.field(default_factory=list[str])
    template: str = ""
    evaluation: Report = msgspec.field(default_factory=Report)
    blank_lines: Listed = msgspec.field(default_factory=Listed)
    documents: int = 0
    rows: int = 0
    rows_a_step: int = 0  # Sequences of one optimizer step, over all ranks if their number is known, else of one rank
    tokens: int = 0
    label_tokens: int = 0
    padding: int = 0
    turns: int = 0
    ends_learned: int = 0
    bos: str = ""
    bos_counts: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Number of documents, by the number of such tokens at their beginning."""
    lengths: Lengths | None = None
    vocabulary: int = 0
    model_vocabulary: int = 0  # Size of the model's vocabulary; 0: the tokenizer's
    duplicates: Listed = msgspec.field(default_factory=Listed)
    repeated: Listed = msgspec.field(default_factory=Listed)  # Records with a long answer that other records share
    control: Listed = msgspec.field(default_factory=Listed)
    markers: Listed = msgspec.field(default_factory=Listed)
    words: Listed = msgspec.field(default_factory=Listed)
    garbled: Listed = msgspec.field(default_factory=Listed)
    unknown: Listed = msgspec.field(default_factory=Listed)
    bos_twice: Listed = msgspec.field(default_factory=Listed)
    problem: str = ""  # Reason why nothing can be encoded: the tokenizer or its template

    @property
    def efficiency(self) -> float:
        """Share of an epoch's positions that are not padding."""
        return self.tokens / max(1, self.tokens + self.padding)


_LONGER = "raise training.sequence_length, or data.truncation=keep_end or drop"
_LISTED = (
    ("refused", "report.refused", "records are refused", "repair or remove them; none is trained on"),
    (
        *("evaluation_refused", "evaluation.refused", "records are refused in the evaluation's data"),
        "repair or remove them; none is evaluated on",
    ),
    (
        *("evaluation_labels_cut", "evaluation.unlabelled"),
        "records have no token to learn in the evaluation's data",
        _LONGER,
    ),
    ("labels_cut", "report.unlabelled", "records have no token to learn", _LONGER),
    (
        *("cut", "report.cut", "records are cut to training.sequence_length"),
        "raise it, or data.truncation=drop; a model trained on cut answers does not learn to stop",
    ),
    ("dropped", "report.dropped", "records are dropped for their length", "raise training.sequence_length"),
    (
        *("end_not_learned", "report.unended"),
        "records have a turn that is learned without the token that ends it",
        "raise training.sequence_length, or use a template that ends its turns",
    ),
    (
        *("header_merged", "report.merged"),
        "records have a turn whose first token also holds the end of its header, and carries no loss",
        "let the template's generation prompt end without a space",
    ),
    (
        *("reasoning_lost", "report.reasoning_lost", "records have reasoning that the chat template leaves out"),
        "train_on: last, one record a turn, or a template that keeps it",
    ),
    ("bos_twice", "bos_twice", "records begin with two BOS tokens", "remove the token from the data"),
    (
        *("control_tokens", "control", "records contain special tokens in their text"),
        "remove them, or data.format=markers if the text is a formatted chat",
    ),
    (
        *("markers", "markers", "records contain the markers of a chat format in a message"),
        "remove them: the chat template writes its own",
    ),
    ("null_words", "words", "records have a text that is only the word for no value", "remove them"),
    ("garbled", "garbled", "records contain wrongly decoded characters", "decode the source as UTF-8"),
    ("unknown_tokens", "unknown", "records contain text that the tokenizer has no token for", "use another one"),
    ("duplicates", "duplicates", "records repeat an earlier one exactly", "remove them, or use data.files weights"),
    (
        *("repeated_answers", "repeated", "records have the same long answer to different prompts"),
        "check whether that is intended",
    ),
    ("blank_lines", "blank_lines", "lines are blank", "remove them"),
)
"""Kind, attribute of ``Facts``, text and fix of the findings that list records."""


def judge(facts: Facts) -> list[Finding]:
    """Return the findings; empty for clean data."""
    report = facts.report
    found: list[Finding] = []
    if facts.problem:
        key, _, text = facts.problem.partition(": ")
        found.append(Finding("unusable", 1, text or key, f"see {key}" if text else "see the configuration"))
    for kind, name, text, fix in _LISTED:
        listed: Listed = attrgetter(name)(facts)
        if kind == "refused" and report.exceeds(facts.max_refused):
            fix = f"repair or remove them: no training starts with more than {facts.max_refused:.2%} (data.max_refused)"
        few = kind == "repeated_answers" and listed.count < max(_REPEATED_LEAST, _REPEATED_SHARE * report.read)
        if listed.count and not few:
            found.append(Finding(kind, listed.count, text, fix, listed.first))
    if facts.model_vocabulary and facts.vocabulary > facts.model_vocabulary:
        text = f"tokens exceed the model's vocabulary of {facts.model_vocabulary:,}"
        beyond = facts.vocabulary - facts.model_vocabulary
        found.append(Finding("vocabulary", beyond, text, "use the model's tokenizer"))
    if not facts.problem and facts.rows < facts.rows_a_step:
        text = f"sequences are fewer than one step takes ({facts.rows_a_step:,})"
        found.append(Finding("too_few", facts.rows, text, "lower training.micro_batch or grad_accumulation"))
    return found


_MARKERS = re.compile(
    r"### ?(?:Human|Assistant|Instruction|Response|User) ?:|\[/?INST\]|<</?SYS>>|<\|im_(?:start|end)\|>|"
    r"<\|(?:start|end)_header_id\|>|<(?:start|end)_of_turn>|^(?:Human|User|Assistant): ",
    re.IGNORECASE | re.MULTILINE,
)
_WORDS = {"none", "null", "nan", "undefined", "n/a", "<na>"}
_GARBLED = re.compile("\ufffd|\u00c3[\u0080-\u00bf\u00a0-\u00ff]|\u00e2\u20ac|\u00c2[\u00a0-\u00bf]")
_LONG_ANSWER = 8  # Tokens of the shortest answer that is not expected twice


class Sample(msgspec.Struct):
    """A document for display."""

    place: str
    ids: list[int]
    learned: list[bool]
    cut: int = 0


class Collected(msgspec.Struct):
    """The counts, the tokens of each record, and documents for display."""

    facts: Facts
    lengths: list[int]
    samples: list[Sample]
    tokenizer: Any = None


def collect(config: Config, shown: int) -> Collected:
    """Encode all records of a configuration, and keep the first ``shown`` documents for display.

    Records, a tokenizer or a model that cannot be used are a ``ConfigError``.
    """
    shape, _ = check(config)
    records = read_records(config)
    facts = Facts(max_refused=config.data.max_refused, formats=pipeline.record_formats(records, config))
    for source in records.sources:
        for place in source.blank:
            facts.blank_lines.add(place, "is blank")
    tokenizer = pipeline.load_tokenizer(config, records, facts.formats)
    facts.vocabulary, facts.model_vocabulary = len(tokenizer), _model_vocabulary(config, shape)
    try:
        encoder = Encoder(tokenizer, config, facts.formats)
    except ConfigError as error:
        facts.problem = str(error)
        _records_alone(records, config, facts)
        return Collected(facts, [], [], tokenizer)
    facts.template = encoder.template.name if encoder.template is not None else ""
    counting = _Counting(records, config, tokenizer, facts)
    samples: list[Sample] = []
    for number, record, made in encode.encoded(encoder, records, 0, len(records)):
        kept = encode.note(facts.report, records, number, made)
        if isinstance(made, RefusedError):
            continue
        counting.record(number, record, made, kept)
        if kept and len(samples) < shown:
            samples.append(Sample(records.place(number), kept[0].ids, kept[0].learned, kept[0].cut))
    counting.finish()
    if config.evaluation.path or config.evaluation.split:
        _evaluation(config, tokenizer, facts.evaluation)
    return Collected(facts, counting.lengths, samples, tokenizer)


class _Counting:
    def __init__(self, records: Records, config: Config, tokenizer: Any, facts: Facts) -> None:
        self.lengths: list[int] = []
        self._records = records
        self._config = config
        self._facts = facts
        self._documents: list[int] = []
        self._weights: list[float] = []
        self._seen: dict[bytes, int] = {}
        self._answers: dict[bytes, tuple[int, bytes]] = {}
        self._bos = tokenizer.bos_token_id
        self._unknown = tokenizer.unk_token_id
        self._special = special_tokens(tokenizer)
        facts.bos = str(tokenizer.bos_token or "")

    def record(self, number: int, record: Any, made: Sequence[Encoded], kept: Sequence[Encoded]) -> None:
        facts, place = self._facts, self._records.place(number)
        self._texts(number, record, place)
        if not made:
            return
        tokens = sum(len(document.ids) for document in made) + made[0].cut
        self.lengths.append(tokens)
        ids = [token for document in made for token in document.ids]
        start = next((index for index, token in enumerate(ids) if token != self._bos), len(ids))
        if self._bos is not None:
            facts.bos_counts[start] = facts.bos_counts.get(start, 0) + 1
            if start > 1:
                facts.bos_twice.add(place, f"begins with {start} {facts.bos}")
        if self._unknown is not None and self._unknown in ids and self._unknown != self._bos:
            facts.unknown.add(place, f"{ids.count(self._unknown)} unknown tokens")
        self._repeats(number, place, ids, made)
        weight = self._records.sources[self._records.source_of(number)[0]].weight
        for document in kept:
            self._documents.append(len(document.ids))
            self._weights.append(weight)
            facts.label_tokens += round(document.label_tokens * weight)
            facts.turns += document.turns
            facts.ends_learned += document.ends_learned

    def _texts(self, number: int, record: Any, place: str) -> None:
        facts = self._facts
        form = facts.formats[self._records.source_of(number)[0]]
        content = messages.convert(record, form, self._config.data)
        chat = isinstance(content, Conversation)
        texts = [message.content or "" for message in content.messages] if chat else [content.text]
        special = next((token for text in texts for token in self._special if token in text), None)
        if special is not None:
            facts.control.add(place, f"contains {special}")
        mark = next((found for text in texts if (found := _MARKERS.search(text))), None) if chat else None
        if mark is not None and special is None:
            facts.markers.add(place, f"contains {mark.group()!r}")
        word = next((text for text in texts if text.strip().lower() in _WORDS), None)
        if word is not None:
            facts.words.add(place, f"is {word.strip()!r}")
        garbled = next((found for text in texts if (found := _GARBLED.search(text))), None)
        if garbled is not None:
            facts.garbled.add(place, f"contains {garbled.group()!r}")

    def _repeats(self, number: int, place: str, ids: list[int], made: Sequence[Encoded]) -> None:
        whole = _hash(ids)
        if whole in self._seen:
            self._facts.duplicates.add(place, f"as {self._records.place(self._seen[whole])}")
            return
        self._seen[whole] = number
        learned = [
            token for document in made for token, wanted in zip(document.ids, document.learned, strict=True) if wanted
        ]
        if len(learned) < _LONG_ANSWER or len(learned) >= len(ids) - 1:
            return
        answer = _hash(learned)
        if answer in self._answers:
            self._facts.repeated.add(place, f"answers as {self._records.place(self._answers[answer][0])}")
        else:
            self._answers[answer] = (number, whole)

    def finish(self) -> None:
        facts, config = self._facts, self._config
        length = config.training.sequence_length
        facts.documents = len(self._documents)
        facts.tokens = round(sum(n * weight for n, weight in zip(self._documents, self._weights, strict=True)))
        rows, packed = round(sum(self._weights)), 0
        if config.data.packing and self._documents:
            # Weights change the number of documents, not how well they are packed.
            packed = round(len(best_fit(self._documents, length)) * sum(self._weights) / len(self._weights))
        if packed >= pipeline.rows_a_step(config, packed) or config.data.packing is True:
            rows = packed
            facts.padding = max(0, rows * length - facts.tokens)
        elif self._documents:
            facts.padding = _padding(sorted(self._documents), config.training.micro_batch, config.data.group_by_length)
        facts.rows, facts.rows_a_step = rows, pipeline.rows_a_step(config, rows)
        if self.lengths:
            quantiles = numpy.quantile(self.lengths, [0, 0.5, 0.9, 0.99, 1], method="higher")
            facts.lengths = Lengths(*map(int, quantiles))


def _padding(lengths: list[int], micro_batch: int, grouped: bool) -> int:
    """Return the padding tokens of an epoch, in batches of similar length or in random ones (drawn once)."""
    order = numpy.array(lengths)
    if not grouped:
        order = numpy.random.default_rng(0).permutation(order)
    batches = [order[start : start + micro_batch] for start in range(0, len(order), micro_batch)]
    return int(sum(-(-int(batch.max()) // 8) * 8 * len(batch) - int(batch.sum()) for batch in batches))


def _records_alone(records: Records, config: Config, facts: Facts) -> None:
    """Count what needs no tokens."""
    for number in range(len(records)):
        facts.report.read += 1
        record = encode.read(records, number)
        try:
            if isinstance(record, RefusedError):
                raise record
            messages.convert(record, facts.formats[records.source_of(number)[0]], config.data)
        except RefusedError as refusal:
            facts.report.refuse(records.place(number), str(refusal))


def _evaluation(config: Config, tokenizer: Any, report: Report) -> None:
    """Count the results of encoding the evaluation's own records."""
    wanted = msgspec.structs.replace(config, data=config.evaluation.data(config.data))
    try:
        records = read_records(wanted)
        encoder = Encoder(tokenizer, wanted, pipeline.record_formats(records, wanted))
    except ConfigError as error:
        raise ConfigError(f"evaluation: {error}") from None
    for number, _, made in encode.encoded(encoder, records, 0, len(records)):
        encode.note(report, records, number, made)


def _model_vocabulary(config: Config, shape: Any) -> int:
    """Return the size of the model's vocabulary; 0 if it follows the tokenizer's."""
    given = (config.model.name or "vocab_size" in config.model.config) and not config.tokenizer.special_tokens
    size = getattr(shape.get_text_config(), "vocab_size", 0) if given else 0
    return size if isinstance(size, int) else 0


def _hash(ids: list[int]) -> bytes:
    return hashlib.blake2b(numpy.array(ids, numpy.int64).tobytes(), digest_size=16).digest()
