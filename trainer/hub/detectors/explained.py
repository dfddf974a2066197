"""Why a phase took what it took: from the numbers of its step at once, and from stacks when a rank has sent them.

The numbers name a batch longer than any before, an update that the loss scaler skipped, and a checkpoint being saved.
Stacks name the rest (``patterns``). Where neither does, the alert says so.
"""

from typing import Any, NamedTuple

from ....protocol.control import Alert
from ....protocol.memory import Cause
from ....protocol.telemetry import Hello, Step
from ....protocol.text import duration, gib
from .book import AlertBook, Key
from .mends import mend_of
from .patterns import WORDS, Named, name_cause, pattern_of

REPEATED_SHARE = 0.5
"""Stacks of a step that took less than this share of the spike are those of another matter."""
STACKS = 3
FRAMES = 8


class Explanation(NamedTuple):
    """A cause as an alert tells it."""

    sentence: str
    evidence: dict[str, Any]
    title: str = ""
    """What the alert's title ends with; empty for nothing."""


class _Rank:
    __slots__ = ("elements", "hello", "longest", "tokens")

    def __init__(self) -> None:
        self.hello: Hello | None = None
        self.elements = 0
        self.longest: list[int] = []
        self.tokens = 0


class Explained:
    """What is known of the causes of each rank's and phase's transients."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._ranks: dict[int, _Rank] = {}
        self._numbers: dict[Key, Explanation] = {}
        self._stacks: dict[Key, Explanation] = {}
        self._settled: set[Key] = set()
        self._recorded: list[Cause] = []
        self._tails: dict[Key, str] = {}
        """What each alert's text ends with: the part that a better explanation replaces."""

    def hello(self, hello: Hello) -> None:
        """Learn what a rank trains with."""
        self._rank(hello.rank).hello = hello

    def note(self, step: Step) -> None:
        """Note a step's batch, once the step has been looked at."""
        shape = step.batch_shape
        if not shape:
            return
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._rank(step.rank)
        elements = shape[0] * shape[1] if len(shape) > 1 else shape[0]
        rank.tokens = elements
        if elements > rank.elements:
            rank.elements, rank.longest = elements, shape

    def by_numbers(self, key: Key, step: Step, phase: str, transient: int, usual: int) -> None:
        """Look for a cause in what the step itself says; call it before ``note``."""
        rank = self._rank(step.rank)
        found: tuple[str, str, int] | None = None
        shape = step.batch_shape
        if phase == "optimizer" and step.overflow:
            found = "loss_scale_overflow", "the loss scaler skipped this update", 0
        elif phase == "checkpoint":
            found = "checkpoint_saving", "a checkpoint was being saved", 0
        elif phase in ("forward", "backward", "optimizer") and rank.elements and len(shape) > 1:
            elements = shape[0] * shape[1]
            if elements > rank.elements and phase != "optimizer":
                words = f"a batch of {shape} was longer than any before ({rank.longest} at the most)"
                found = "longer_batch", words, max(0, transient - usual)
        if found is None:
            self._numbers.pop(key, None)
            return
        pattern, words, saves = found
        mend = mend_of(pattern, transient, rank.hello)
        evidence = {"cause_pattern": pattern, "mend": mend.text, "saves_bytes": saves or mend.saves_bytes}
        sentence = f"Cause: {words}. Try: {mend.text}{_saving(saves)}."
        self._numbers[key] = Explanation(sentence, evidence, WORDS[pattern])

    def cause(self, t: float, cause: Cause) -> list[Alert]:
        """Take in what a rank found by stacks; return the alerts that now say more."""
        alerts: list[Alert] = []
        for key in self._keys(cause):
            known = self._book.get(key)
            if known is None or (cause.rank not in known.ranks and known.ranks):
                continue
            self._stacks[key] = found = self._by_stacks(cause, known)
            before = self._tails.get(key, "")
            tail, evidence, ending = self.tail(key, "")
            title = known.title
            if ending and ending not in title:
                title = f"{title}: {ending}"
            alerts += self._book.annotate(t, key, evidence, tail or found.sentence, instead=before, title=title)
        return alerts

    def settled(self, key: Key) -> bool:
        """Tell whether stacks of a step that had the transient are known already."""
        return key in self._settled

    def restore(self, cause: Cause) -> None:
        """Take in a cause of the recording: what it told stays told, once its alert has been taken in too."""
        self._recorded.append(cause)

    def tail(self, key: Key, otherwise: str) -> tuple[str, dict[str, Any], str]:
        """Give what an alert's text ends with, its evidence, and what its title ends with.

        Args:
            key: the alert's.
            otherwise: the sentence where nothing is known.
        """
        while self._recorded:
            cause = self._recorded.pop(0)
            for own in self._keys(cause):
                known = self._book.get(own)
                if known is not None:
                    self._stacks[own] = self._by_stacks(cause, known)
        parts = [found for found in (self._numbers.get(key), self._stacks.get(key)) if found is not None]
        text = " ".join(part.sentence for part in parts) or otherwise
        self._tails[key] = text
        evidence: dict[str, Any] = {}
        for part in reversed(
            parts
        ):  # what the step itself says of its cause goes before what another step's stacks say
            evidence |= part.evidence
        return text, evidence, next((part.title for part in parts if part.title), "")

    def _rank(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank()
        return rank

    @staticmethod
    def _keys(cause: Cause) -> list[Key]:
        if cause.reason == "leak":
            return []
        return [
            ("spike", cause.rank, cause.phase, "recent"),
            ("spike", None, cause.phase, "recent"),
            ("spike", None, cause.phase, "steady"),
        ]

    def _by_stacks(self, cause: Cause, alert: Alert) -> Explanation:
        rank = self._rank(cause.rank)
        size = int(alert.evidence.get("transient_bytes", 0))
        evidence = _arming_evidence(cause)
        arming = arming_words(cause)
        if cause.transient_bytes < REPEATED_SHARE * size:
            sentence = (
                f"Cannot tell the cause: step {cause.step}, whose stacks were recorded, took "
                f"{gib(cause.transient_bytes)} only. {arming}"
            )
            return Explanation(sentence, evidence)
        self._settled.add(("spike", cause.rank, cause.phase, "recent"))
        named = name_cause(cause, rank.tokens)
        if not named.pattern:
            where = (
                f"; most of it, {gib(named.elsewhere.bytes)}, in {named.elsewhere.where}"
                if named.elsewhere.where
                else ""
            )
            native = "" if where else ": what was allocated there was allocated by native code"
            return Explanation(
                f"Cannot tell the cause by the stacks of step {cause.step}{native}{where}. {arming}", evidence
            )
        mend = mend_of(named.pattern, named.parts[0].bytes, rank.hello)
        evidence |= {
            "cause_pattern": named.pattern,
            "cause_where": named.parts[0].where,
            "cause_bytes": named.parts[0].bytes,
            "cause_total_bytes": named.total,
            "cause_parts": {part.pattern: part.bytes for part in named.parts},
            "mend": mend.text,
            "saves_bytes": mend.saves_bytes,
        }
        words = _named_words(named, cause)
        sentence = (
            f"Cause, by the stacks of step {cause.step}: {words}. Try: {mend.text}{_saving(mend.saves_bytes)}. {arming}"
        )
        return Explanation(sentence, evidence, WORDS[named.pattern])


def _named_words(named: Named, cause: Cause) -> str:
    """Say ``0.89 of 0.93 GiB in adamw.py:531 _multi_tensor_adamw: foreach temporaries ..., one parameter-size``."""
    found: list[str] = []
    for part in named.parts:
        where = f" in {part.where}" if part.where else ""
        size = size_words(part.bytes, cause)
        of = f" of {gib(named.total)}" if not found else ""
        found.append(f"{gib(part.bytes)}{of}{where}: {WORDS[part.pattern]}{f', {size}' if size else ''}")
    return "; ".join(found)


def size_words(size: int, cause: Cause) -> str:
    """Say how large something is against the model: ``one parameter-size``; empty where it is no simple multiple."""
    for whole, words in (
        (cause.parameter_bytes, "parameter-size"),
        (cause.trainable * 4, "fp32 copy of what is updated"),
    ):
        for count, number in ((1, "one"), (2, "two"), (3, "three")):
            if whole and abs(size - count * whole) <= 0.05 * count * whole:
                return f"{number} {words}{'s' if count > 1 and words == 'parameter-size' else ''}"
    return ""


def arming_words(cause: Cause) -> str:
    """Say what recording the stacks cost."""
    what = f"the {cause.phase} phase" if cause.phase else "the step"
    usual = f" in place of {duration(cause.usual_us * 1e-6)}" if cause.usual_us else ""
    return (
        f"Recording the stacks cost rank {cause.rank} once: {what} took {duration(cause.armed_us * 1e-6)}{usual}, and "
        f"reading them {duration(cause.read_us * 1e-6)} beside the training."
    )


def _arming_evidence(cause: Cause) -> dict[str, Any]:
    return {
        "cause_step": cause.step,
        "cause_rank": cause.rank,
        "cause_transient_bytes": cause.transient_bytes,
        "armed_us": cause.armed_us,
        "usual_us": cause.usual_us,
        "read_us": cause.read_us,
        "stacks": stack_evidence(cause),
    }


def stack_evidence(cause: Cause) -> list[dict[str, Any]]:
    """Give the largest groups of a cause as evidence: bytes, blocks, the innermost frames, the pattern."""
    return [
        {
            "bytes": group.bytes,
            "count": group.count,
            "frames": group.frames[-FRAMES:],
            "pattern": pattern_of(group.frames)[0],
        }
        for group in cause.groups[:STACKS]
    ]


def _saving(size: int) -> str:
    return f", which would save {gib(size)}" if size > 0 else ""
