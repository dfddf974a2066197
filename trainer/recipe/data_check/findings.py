"""Counts of a data set, and the findings from them."""

from operator import attrgetter

import msgspec

from ..data.report import Listed, Report

_REPEATED_SHARE, _REPEATED_LEAST = 0.05, 4


class Finding(msgspec.Struct, frozen=True):
    """A problem of the data, or of their use in training."""

    kind: str
    count: int
    text: str
    """The problem, in one sentence."""
    fix: str
    """The fix."""
    first: list[tuple[str, str]] = msgspec.field(default_factory=list[tuple[str, str]])
    """Place and details of the first records."""


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
    max_refused: float = 1.0
    """Share of refused records above which a training does not start."""
    formats: list[str] = msgspec.field(default_factory=list[str])
    """Format of each file."""
    template: str = ""
    """The chat template in use; empty for texts."""
    evaluation: Report = msgspec.field(default_factory=Report)
    """Report on the evaluation's own file or split."""
    blank_lines: Listed = msgspec.field(default_factory=Listed)
    documents: int = 0
    rows: int = 0
    """Sequences of an epoch."""
    rows_a_step: int = 0
    """Sequences of one optimizer step, over all ranks if their number is known, else of one rank."""
    tokens: int = 0
    """Tokens of an epoch, without padding."""
    label_tokens: int = 0
    padding: int = 0
    """Padding tokens of an epoch."""
    turns: int = 0
    ends_learned: int = 0
    bos: str = ""
    """The token that begins a text, if the tokenizer has one."""
    bos_counts: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Number of documents, by the number of such tokens at their beginning."""
    lengths: Lengths | None = None
    vocabulary: int = 0
    """Tokens of the tokenizer."""
    model_vocabulary: int = 0
    """Size of the model's vocabulary; 0: the tokenizer's."""
    duplicates: Listed = msgspec.field(default_factory=Listed)
    repeated: Listed = msgspec.field(default_factory=Listed)
    """Records with a long answer that other records share."""
    control: Listed = msgspec.field(default_factory=Listed)
    markers: Listed = msgspec.field(default_factory=Listed)
    words: Listed = msgspec.field(default_factory=Listed)
    garbled: Listed = msgspec.field(default_factory=Listed)
    unknown: Listed = msgspec.field(default_factory=Listed)
    bos_twice: Listed = msgspec.field(default_factory=Listed)
    problem: str = ""
    """Reason why nothing can be encoded: the tokenizer or its template."""

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
        found.append(
            Finding("vocabulary", facts.vocabulary - facts.model_vocabulary, text, "use the model's tokenizer")
        )
    if not facts.problem and facts.rows < facts.rows_a_step:
        text = f"sequences are fewer than one step takes ({facts.rows_a_step:,})"
        fix = "lower training.micro_batch or grad_accumulation"
        found.append(Finding("too_few", facts.rows, text, fix))
    return found
