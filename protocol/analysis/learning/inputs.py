"""What the model is given: rows without labels, ends that are never learned, documents that see each other.

After a resume also: batches that come again, or are left out; with several ranks: the same batches on all.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from math import isfinite
from typing import ClassVar

import msgspec

from ...messages.telemetry import Goodbye, Hello, Signs, Step
from ...text import all_ranks
from ..findings.finding import Detector, Finding, Handler, Kind, Shown, State
from ..words import Words

IN_A_ROW = 8  # micro-batches without a label, one after the other
WINDOW = 40  # half of so many without a label are as bad
FROM_THE_START = 3  # enough if no micro-batch of the run had one
ENDS = 16  # end-of-sequence tokens seen before their absence among the labels is no accident
BEGUN_TWICE = 3  # micro-batches whose rows begin twice that are no accident
PADDING = 16  # labels that are padding after padding, in ...
PADDED = 3  # ... this many steps, which are no accident
ALIKE = 4  # steps in a row with the batches of other steps, one for one, that are no accident
COPIES = 5  # steps in a row with one batch on all ranks, of at least two batches; all different if not of tokens
OF_EACH = 12  # micro-batches of each of a loader's workers that are looked at for copies
MISALIGNED = 2  # micro-batches in a row whose labels are not the next tokens
_NEAR = 0.1  # difference from the share of copies that a number of workers makes: the first ones may not be in step
_UNFINISHED = 64  # steps that not all ranks have ended, of which the batches are remembered
_MOST_STEPS = 100_000  # steps of a job whose batches are remembered


class LabelFacts(msgspec.Struct, frozen=True):
    """Micro-batches without label tokens."""

    unlabelled: int
    of: int
    since_step: int
    loss_not_finite: bool = False  # the loss of some was a mean over no labels
    after_step: int = 0  # the last step before whose labels were examined, if some between were not


class EndFacts(msgspec.Struct, frozen=True):
    """End-of-sequence tokens among inputs, none of them a label."""

    ends: int
    steps: int
    since_step: int


class BeginFacts(msgspec.Struct, frozen=True):
    """Rows with two beginning-of-sequence tokens."""

    micro_batches: int
    since_step: int


class PaddingFacts(msgspec.Struct, frozen=True):
    """Labels in the loss that are padding."""

    padding: int
    labels: int
    since_step: int


class MixedFacts(msgspec.Struct, frozen=True):
    """Packed rows whose documents attend to each other."""

    by: str
    micro_batches: int
    since_step: int
    after_step: int = 0  # the last step before without such rows, if some between were not examined


class _Rank:
    def __init__(self) -> None:
        self.empty: deque[bool] = deque(maxlen=WINDOW)  # whether the latest micro-batches had no label
        self.had_labels = False  # whether steps were sound before the first micro-batch without labels
        self.run = 0
        self.bad = self.many = self.lost = False
        """Whether there are too many, as such, and any whose loss was not finite; ``bad``: one of both."""
        self.unlabelled = self.micro_batches = 0
        self.since = self._row_since = self._window_since = 0, 0
        """The first step of too many micro-batches without labels, and the last one before that was examined."""
        self._then: tuple[int, int, int, deque[bool]] = 0, 0, 0, self.empty
        """The latest step with such micro-batches, and the counts at its end."""

    def add(self, step: Step, signs: Signs) -> bool:
        """Count a step's micro-batches; return whether there are too many without labels."""
        count, now = signs.labelled or step.micro_steps, (step.step, signs.labelled_after)
        if signs.labelled_after and signs.labelled_after == self._then[0]:  # the steps between were not examined
            _, self.run, self.micro_batches, self.empty = self._then
        self.micro_batches += count
        self.unlabelled += signs.unlabelled
        if signs.unlabelled and not self.run:
            self._row_since = now
        if signs.unlabelled and not any(self.empty):
            self._window_since = now
        self.run = self.run + signs.unlabelled if signs.unlabelled == count else 0
        self.empty.extend([True] * signs.unlabelled + [False] * (count - signs.unlabelled))
        if signs.unlabelled:
            self._then = step.step, self.run, self.micro_batches, self.empty.copy()
        from_the_start = not self.had_labels and self.unlabelled == self.micro_batches >= FROM_THE_START
        in_a_row = from_the_start or self.run >= IN_A_ROW
        self.many = in_a_row or sum(self.empty) * 2 >= WINDOW
        is_lost = signs.unlabelled > 0 and step.loss is not None and not isfinite(step.loss)
        self.lost = is_lost or (self.lost and any(self.empty))
        bad = self.many or self.lost
        if bad and not self.bad:
            self.since = self._row_since if in_a_row else self._window_since
        self.bad = bad
        return bad


_NONE = Signs()

_LABELS = (
    "Look at a row of the labels: a template or a collator that masks every token, prompts that fill the maximum "
    "length, or an answer's beginning that is not found."
)
_ENDS = (
    "Give the tokenizer a pad token of its own, or mask labels by the attention mask; a collator that masks the pad "
    "token masks the end with it."
)
_MIXED = {
    "mask": (
        "an attention mask is passed, and the model then ignores where position_ids restart",
        "Pass no mask with packed rows and use_cache=False, or a 4-D mask that separates the documents.",
    ),
    "cache": (
        "the model makes a cache, and then ignores where position_ids restart",
        "Set model.config.use_cache = False for the training.",
    ),
    "encoder": (
        "an encoder's attention goes over the whole row, wherever position_ids restart",
        "Pass a 4-D mask that separates the documents, or one document a row.",
    ),
    "4-D mask": (
        "the 4-D mask lets the first token of a document see the document before",
        "Make the mask zero between documents: causal, and only where both tokens are of one document.",
    ),
    "numbers": (
        "the attention mask has the documents' numbers, and the model takes each as a 1",
        "Pass position_ids that restart and no mask, with use_cache=False, or a 4-D mask that separates the documents.",
    ),
    "batch": (
        "Flash Attention reads where position_ids restart only in a batch of one row",
        "Pack into one row (batch size 1), or pass cu_seq_lens.",
    ),
}


def _labels(facts: LabelFacts, finding: Finding) -> Words:
    return Words(
        f"no label tokens in {facts.unlabelled} of {facts.of} micro-batches{_on(finding)} since "
        f"{_from(facts.after_step, facts.since_step)}",
        "Every label of them is ignored (-100): nothing is learned from them, whatever loss is logged."
        + (" Their loss, a mean over no labels, is not a number." if facts.loss_not_finite else ""),
        _LABELS,
        "Micro-batches have labels again.",
    )


def _ends(facts: EndFacts, finding: Finding) -> Words:
    return Words(
        "the end of a sequence is never learned",
        f"{facts.ends} end-of-sequence tokens were among the inputs of {facts.steps} steps{_on(finding)}, none among "
        "the labels: the model will not learn to stop.",
        _ENDS,
        "The end is among the labels.",
    )


def _begun_twice(facts: BeginFacts, _: Finding) -> Words:
    return Words(
        f"each row begins with two beginning-of-sequence tokens since step {facts.since_step}",
        "A chat template, or the text, has one, and the tokenizer adds another. Models were trained with one.",
        "Tokenize a template's text with add_special_tokens=False, or let apply_chat_template tokenize.",
        "Another training has begun.",
    )


def _padding(facts: PaddingFacts, _: Finding) -> Words:
    return Words(
        f"padding is learned: {facts.padding / max(1, facts.labels):.0%} of the labels in the loss",
        f"Since step {facts.since_step} labels are not ignored where the attention mask is 0: {facts.padding} of "
        f"{facts.labels} that were looked at. They are soon easy, so the loss is lower than that of the text.",
        "Set labels to -100 where the attention mask is 0, or let a collator pad the labels (DataCollatorForSeq2Seq).",
        "Padding is ignored.",
    )


def _mixed(facts: MixedFacts, finding: Finding) -> Words:
    why, remedy = _MIXED.get(facts.by, _MIXED["mask"])
    return Words(
        f"documents packed into one row see each other since {_from(facts.after_step, facts.since_step)}",
        f"What was seen{_on(finding)}: {why}. Attention goes across documents, and the model learns "
        "from text that has nothing to do with the answer.",
        remedy,
        "Another training has begun.",
    )


def _from(after: int, step: int) -> str:
    return f"a step from {after + 1} to {step}" if after else f"step {step}"


def _on(finding: Finding) -> str:
    return f" on {all_ranks(finding.ranks)}" if finding.ranks else ""


class Inputs(Detector):
    """Finds faults of the batches, on any rank."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "no_labels",
            LabelFacts,
            _labels,
            shown={
                "unlabelled": Shown("micro-batches without labels"),
                "of": Shown("of", "micro-batches"),
                "loss_not_finite": Shown("loss not finite"),
            },
            limits={
                "micro-batches without a label": f"{IN_A_ROW} in a row, half of {WINDOW}, or the first "
                f"{FROM_THE_START}",
                "or, with a loss that is not finite": "1",
            },
        ),
        Kind(
            "end_never_learned",
            EndFacts,
            _ends,
            shown={"ends": Shown("ends among the inputs")},
            limits={"ends among the inputs, none among the labels": f"{ENDS}"},
        ),
        Kind("begun_twice", BeginFacts, _begun_twice, limits={"micro-batches of such rows": f"{BEGUN_TWICE}"}),
        Kind(
            "padding_learned",
            PaddingFacts,
            _padding,
            shown={"padding": Shown("padding"), "labels": Shown("of", "labels")},
            limits={"labels that are padding after padding": f"{PADDING}, in {PADDED} steps"},
        ),
        Kind(
            "mixed_documents",
            MixedFacts,
            _mixed,
            shown={
                "by": Shown("because of"),
                "micro_batches": Shown("seen in", "micro-batches"),
                "after_step": Shown("not yet at step"),
            },
        ),
    )
    replays = (Hello, Step)

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._unlabelled: set[int] = set()
        self._ends = self._learned = self._ends_steps = self._ends_since = 0
        self._mixed: dict[int, int] = {}
        self._begun_twice = self._begun_since = 0
        self._padding = self._padding_of = self._padded = self._padding_since = 0

    def handlers(self) -> Mapping[type, Handler]:
        return {Step: self.step, Goodbye: self.goodbye}

    def goodbye(self, goodbye: Goodbye) -> list[Finding]:
        """Update the figures of a raised finding as a rank ends."""
        if goodbye.rank not in self._unlabelled:
            return []
        return [self._no_labels(self._ranks[goodbye.rank], "updated")]

    def step(self, step: Step) -> list[Finding]:
        signs = step.signs or _NONE
        return [
            *self._of_labels(step, signs),
            *self._of_ends(step, signs),
            *self._of_documents(step, signs),
            *self._of_begins(step, signs),
            *self._of_padding(step, signs),
        ]

    def _of_labels(self, step: Step, signs: Signs) -> list[Finding]:
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._ranks[step.rank] = _Rank()
        if not signs.unlabelled and not rank.unlabelled:
            rank.had_labels = True
            return []  # most runs never get further
        bad = rank.add(step, signs)
        if bad == (step.rank in self._unlabelled):
            return []
        self._unlabelled ^= {step.rank}
        return [self._no_labels(rank, "raised" if self._unlabelled else "resolved")]

    def _no_labels(self, rank: _Rank, state: State) -> Finding:
        since, after = rank.since
        facts = LabelFacts(rank.unlabelled, rank.micro_batches, since, rank.lost, after)
        many = any(self._ranks[each].many for each in self._unlabelled)
        return Finding(
            "no_labels", facts, state, "error" if many else "warning", tuple(sorted(self._unlabelled)), step=since
        )

    def _of_ends(self, step: Step, signs: Signs) -> list[Finding]:
        if not signs.ends and not signs.learned_ends:
            return []
        before = self._ends >= ENDS and not self._learned
        self._ends += signs.ends
        self._learned += signs.learned_ends
        self._ends_steps += 1
        self._ends_since = self._ends_since or step.step
        now = self._ends >= ENDS and not self._learned
        if now == before:
            return []
        facts = EndFacts(self._ends, self._ends_steps, self._ends_since)
        return [Finding("end_never_learned", facts, "raised" if now else "resolved", step=self._ends_since)]

    def _of_begins(self, step: Step, signs: Signs) -> list[Finding]:
        if not signs.begun_twice or self._begun_twice >= BEGUN_TWICE:
            return []
        self._begun_since = self._begun_since or step.step
        self._begun_twice += signs.begun_twice
        if self._begun_twice < BEGUN_TWICE:
            return []
        facts = BeginFacts(self._begun_twice, self._begun_since)
        return [Finding("begun_twice", facts, step=self._begun_since)]

    def _of_padding(self, step: Step, signs: Signs) -> list[Finding]:
        def is_told() -> bool:
            return self._padding >= PADDING and self._padded >= PADDED

        if not signs.padding or is_told():
            return []
        self._padding_since = self._padding_since or step.step
        self._padding += signs.padding
        self._padding_of += signs.padding_of
        self._padded += 1
        facts = PaddingFacts(self._padding, self._padding_of, self._padding_since)
        return [Finding("padding_learned", facts, step=facts.since_step)] if is_told() else []

    def _of_documents(self, step: Step, signs: Signs) -> list[Finding]:
        if not signs.mixed or step.rank in self._mixed:
            return []
        self._mixed[step.rank] = step.step
        facts = MixedFacts(signs.mixed_by, signs.mixed, min(self._mixed.values()), signs.mixed_after)
        return [Finding("mixed_documents", facts, "raised", ranks=tuple(sorted(self._mixed)), step=facts.since_step)]


class _One(Detector, ABC):
    """Keeps its one raised finding; another process of rank 0 begins another training, which resolves it."""

    replays = (Hello, Step)

    def __init__(self) -> None:
        self._process = 0, 0
        self._raised: Finding | None = None

    def handlers(self) -> Mapping[type, Handler]:
        return {Hello: self.hello, Step: self.step}

    def hello(self, hello: Hello) -> list[Finding]:
        """Begin another job if rank 0 is another process."""
        process = hello.pid, hello.start_ticks
        if hello.rank or process == self._process:
            return []
        self._process = process
        self._begin(hello)
        return self._judge(None)

    @abstractmethod
    def step(self, step: Step) -> list[Finding]:
        """Process one rank's step."""

    def _begin(self, hello: Hello) -> None:
        """Forget the steps of the job before."""

    def _judge(self, finding: Finding | None) -> list[Finding]:
        """Raise a finding unless there is one; None: resolve it."""
        raised = self._raised
        if raised is None:
            self._raised = finding
            return [finding] if finding is not None else []
        self._raised = raised if finding is not None else None
        return [raised.over()] if finding is None else []


class ResumeFacts(msgspec.Struct, frozen=True):
    """The first step of the resumed job, and the step whose batches it had."""

    resumed_at: int
    batches_of: int  # the step of the job before that had the batches of `resumed_at`


def _resume(facts: ResumeFacts, _: Finding) -> Words:
    first, of = facts.resumed_at, facts.batches_of
    what = "repeats batches" if of < first else "leaves batches out"
    return Words(
        f"the training was resumed at step {first} and {what}: it has those of step {of}",
        f"Steps {first} to {first + ALIKE - 1} have, one for one, the batches that steps {of} to {of + ALIKE - 1} had "
        f"before, which had others at step {first}. The weights continue, the data do not.",
        "Save the state of the data with the checkpoint and restore it: a StatefulDataLoader, accelerate's "
        "skip_first_batches, a Trainer with ignore_data_skip=False; in a loop, skip the batches of the steps done.",
        "Another training has begun.",
    )


class Resumes(_One):
    """Compares the first batches of rank 0's process with those of the same steps in the processes before.

    A job that does not begin before the end of the one before is not judged: what it had to continue with is unknown.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "data_not_resumed",
            ResumeFacts,
            _resume,
            shown={"resumed_at": Shown("resumed at step"), "batches_of": Shown("with the batches of step")},
            limits={"batches of other steps, one for one": f"{ALIKE} steps in a row"},
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, int] = {}  # batches by step of the jobs before; of several with a step, the first's
        self._batches: dict[int, int] = {}
        self._judged = True
        self._skipped = 0  # updates of the jobs before without effect, which an optimizer's own count leaves out

    def _begin(self, hello: Hello) -> None:
        began_anew = 1 in self._batches
        self._before = self._batches if began_anew else self._batches | self._before
        self._batches, self._judged = {}, False

    def step(self, step: Step) -> list[Finding]:
        if step.rank or not step.batch_id:
            return []
        self._skipped += step.overflow
        if len(self._batches) < _MOST_STEPS:
            self._batches[step.step] = step.batch_id
        if self._judged or len(self._batches) < ALIKE:
            return []
        self._judged = True
        first = next(iter(self._batches))
        of = self._batches_of(first)
        if of is None or 0 < of - first <= self._skipped:
            return []
        return self._judge(Finding("data_not_resumed", ResumeFacts(first, of), step=first))

    def _batches_of(self, first: int) -> int | None:
        """Return the step before that had the batches of ``first`` and those after it; None: the same, or unknown."""
        before = self._before
        if first == 1 or first not in before:  # a script that counts anew in each process has not said where it is
            return None
        mine = [self._batches.get(first + place) for place in range(ALIKE)]
        found = [step for step, batch in before.items() if batch == mine[0]]
        if len(found) != 1 or found[0] == first:
            return None  # data that came again in the job before may come again here
        return found[0] if all(before.get(found[0] + place) == batch for place, batch in enumerate(mine)) else None


class CopiesFacts(msgspec.Struct, frozen=True):
    """Ranks that train on copies of one rank's data."""

    ranks: int
    since_step: int


def _copies(facts: CopiesFacts, _: Finding) -> Words:
    return Words(
        f"all {facts.ranks} ranks train on the same batches since step {facts.since_step}",
        f"Their gradients are equal, so a step learns from one rank's batch: {facts.ranks} ranks do the work of one.",
        "Give the DataLoader a DistributedSampler, shard an IterableDataset by rank, or let the library prepare the "
        "loader; where data are random, seed each rank differently. In sequence, context or tensor parallelism ranks "
        "share their batches on purpose: then nothing is wrong.",
        "Ranks train on different batches.",
    )


class Copies(_One):
    """Compares the batches of all ranks. Of ranks that are known to share batches, one tells what they have."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind("same_batches", CopiesFacts, _copies, limits={"steps with one batch on all ranks": f"{COPIES} in a row"}),
    )

    def __init__(self) -> None:
        super().__init__()
        self._shares, self._ranks = False, 1
        self._unfinished: dict[int, list[int]] = {}  # by step: the batches of ranks that have ended it
        self._row: deque[int] = deque(maxlen=COPIES)  # the batches that all ranks had, in a row of steps

    def hello(self, hello: Hello) -> list[Finding]:
        """Note whether ranks share batches, which a later hello may say; begin another job."""
        if not hello.rank:
            sharing = (hello.deepspeed_config or {}).get("sequence_parallel_size")
            self._shares = isinstance(sharing, int) and sharing > 1
        return super().hello(hello)

    def _begin(self, hello: Hello) -> None:
        self._ranks = hello.world_size
        self._unfinished.clear()
        self._row.clear()

    def step(self, step: Step) -> list[Finding]:
        if self._ranks < 2 or not step.batch_id or self._shares:
            return []
        batches = self._unfinished.setdefault(step.step, [])
        batches.append(step.batch_id)
        if len(batches) < self._ranks:
            if len(self._unfinished) > _UNFINISHED:
                del self._unfinished[next(iter(self._unfinished))]
            return []
        del self._unfinished[step.step]
        if len(set(batches)) > 1:
            self._row.clear()
            return self._judge(None)
        self._row.append(step.batch_id)
        if len(self._row) < COPIES or len(set(self._row)) < (2 if step.tokens else COPIES):
            return []  # of other tensors than tokens the first may be a constant, but for the last batch of a pass
        since = step.step - COPIES + 1
        facts = CopiesFacts(self._ranks, since)
        return self._judge(Finding("same_batches", facts, ranks=tuple(range(self._ranks)), step=since))


class RepeatedFacts(msgspec.Struct, frozen=True):
    """Workers of a loader that read the same data."""

    workers: int
    repeated: int
    of: int
    since_step: int


def _repeated(facts: RepeatedFacts, _: Finding) -> Words:
    times = facts.workers
    return Words(
        f"each batch comes {times} times in a row: the loader's {times} workers read the same data",
        f"{facts.repeated} of {facts.of} micro-batches since step {facts.since_step} had the data of the one before. "
        "Each worker has a copy of the IterableDataset, which does not share its data among them.",
        "Let __iter__ yield only its worker's part, by torch.utils.data.get_worker_info(); a Dataset with indices and "
        "the datasets library's IterableDataset do that themselves.",
        "Batches differ from those before them.",
    )


class Repeats(_One):
    """Finds batches of rank 0 that come once from each worker of its loader."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "repeated_batches",
            RepeatedFacts,
            _repeated,
            shown={"workers": Shown("workers"), "repeated": Shown("repeated micro-batches")},
            limits={"micro-batches looked at, of an IterableDataset": f"{OF_EACH} of each worker"},
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._workers = 0
        self._steps: deque[tuple[int, int]] = deque()  # micro-batches of the last steps, and how many were repeated

    def hello(self, hello: Hello) -> list[Finding]:
        """Note the loader of rank 0, which a later hello may name; begin another job."""
        loader = hello.loader
        if not hello.rank:
            self._workers = loader.workers if loader is not None and loader.iterable else 0
            self._steps.clear()
        return super().hello(hello)

    def step(self, step: Step) -> list[Finding]:
        workers = self._workers
        if step.rank or workers < 2 or not step.batch_id:
            return []
        self._steps.append((step.micro_steps, step.signs.repeated if step.signs is not None else 0))
        of, repeated = map(sum, zip(*self._steps, strict=True))
        if of < OF_EACH * workers:
            return []
        since = step.step - len(self._steps) + 1
        self._steps.clear()
        is_so = abs(repeated / of - (1 - 1 / workers)) < _NEAR and repeated < of - 1
        facts = RepeatedFacts(workers, repeated, of, since)
        return self._judge(Finding("repeated_batches", facts, step=since) if is_so else None)


class ShiftFacts(msgspec.Struct, frozen=True):
    """Labels that are not the next tokens."""

    twice: bool  # they are the tokens after the next ones; False: they are the tokens themselves
    since_step: int


def _misaligned(facts: ShiftFacts, _: Finding) -> Words:
    if facts.twice:
        return Words(
            f"labels are shifted twice since step {facts.since_step}: the model learns the token after the next one",
            "The label of a position in the loss is the token two positions later.",
            "Give the model unshifted labels, equal to the inputs: transformers' causal models shift them themselves.",
            "Labels are the next tokens.",
        )
    return Words(
        f"labels are not shifted since step {facts.since_step}: the model learns to copy its input",
        "The label of a position in the loss is the token at that position, which a causal model sees.",
        "Compare logits[:, :-1] with labels[:, 1:], or give the labels to the model, which shifts them itself; a "
        "decoder's input is the labels moved right by one.",
        "Labels are the next tokens.",
    )


class Shifts(_One):
    """Finds labels that are not the next tokens, in the losses of micro-batches that were looked at."""

    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind(
            "labels_misaligned",
            ShiftFacts,
            _misaligned,
            shown={"twice": Shown("shifted twice")},
            limits={"micro-batches looked at, in a row": f"{MISALIGNED}"},
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._row = self._since = 0
        self._how = ""

    def step(self, step: Step) -> list[Finding]:
        """Process one rank's step; all ranks have the same loop."""
        how = step.signs.shifted if step.signs is not None else ""
        if step.rank or not how:
            return []
        if how == "once":
            self._row = 0
            return self._judge(None)
        if how != self._how or not self._row:
            self._how, self._row, self._since = how, 0, step.step
        self._row += 1
        if self._row < MISALIGNED:
            return []
        return self._judge(Finding("labels_misaligned", ShiftFacts(how == "twice", self._since), step=self._since))
