"""``ftmon memory RUN``: prints the composition of memory peaks of a recorded or live run."""

import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec

from ....protocol.messages.memory import Cause
from ....protocol.recording.phase_peaks import PeakMark
from ....protocol.text import gib, sanitize
from ...model.cause import evidence_words, group_parts, shown_bytes, spike_alert, verdict_of, verdict_words
from ...model.peak_phase import phase_words, ranking_sentences
from ...model.rank import RankModel
from ...model.run import RunModel
from ...model.waterfall import REASONS, Waterfall, unanalysed, waterfall
from ...source.find import find_recording
from ...source.load import describe, load
from ..access.recordings import check_rank, opened
from ..output.printable import print_json

_LABEL = 24
_CPU_NOTE = "on a CPU, peaks are of the resident set; there is no reserved memory"


def show_memory(arguments: Namespace) -> int:
    """Print the composition of the peaks of a run's ranks, the leading phase, and the causes of spikes.

    Raises:
        UsageError: the run has no such rank.
        RecordingError: the recording cannot be read.
    """
    model = load_model(arguments.run)
    ranks = ranks_of(model, arguments.rank)
    if arguments.json:
        result = {"run": model.info.id, "ranks": [rank_data(model, rank) for rank in ranks]}
        print_json(result)
        return 0
    if not ranks:
        print("no rank has reported yet")
    for index, rank in enumerate(ranks):
        if index:
            print()
        for line in rank_lines(model, rank):
            print(line)
    return 0


def load_model(run: str) -> RunModel:
    """Return a run's latest recorded state; of a live run it is up to half a second old."""
    with opened(find_recording(run)) as reader:
        info = reader.info()
        model = load(reader, info.last_t, describe(info))
        marks: dict[int, list[PeakMark]] = {}
        for mark in reader.marks():
            marks.setdefault(mark.rank, []).append(mark)
    for number, found in marks.items():
        model.rank(number).memory.adopt(found)
    return model


def ranks_of(model: RunModel, rank: int | None) -> list[RankModel]:
    """Return a run's ranks, or the requested one.

    Raises:
        UsageError: there is no such rank.
    """
    check_rank(model.ranks, rank)
    return list(model.ranks.values()) if rank is None else [model.ranks[rank]]


def rank_fall(model: RunModel, rank: RankModel) -> Waterfall | None:
    """Return the waterfall of a rank's last analysed step, else of its last step."""
    sample = model.device_of(rank)
    composition = rank.memory.latest
    made = waterfall(rank, composition, "", sample) if composition is not None else None
    return made or unanalysed(rank, "", sample)


def rank_lines(model: RunModel, rank: RankModel) -> Iterator[str]:
    """Yield the lines of one rank's memory."""
    fall = rank_fall(model, rank)
    if fall is None:
        yield f"rank {rank.rank}: no step is finished yet"
        return
    following = f"; next {fall.next[0]} {gib(fall.next[1])}" if fall.next else ""
    head = f"rank {rank.rank}, step {fall.step:,}: {gib(fall.peak)} in {phase_words(fall.phase)}{following}"
    composition = rank.memory.latest
    if composition is not None and fall.taken_apart:
        at = time.strftime("%H:%M:%S", time.localtime(composition.time))
        head += f" ({at}, {REASONS.get(composition.reason, composition.reason)})"
    yield sanitize(head)
    for part in fall.parts:
        yield _row(part.label, part.bytes, fall.peak)
    yield _row("resident" if fall.measure == "glibc" else "allocated", fall.peak, fall.peak)
    if fall.measure == "glibc":
        yield f"  {_CPU_NOTE}"
    else:
        yield _row("unused but reserved", fall.unused, 0)
        yield _row("CUDA context, NCCL", fall.context, 0)
        yield _row("other processes", fall.others, 0)
        yield _row("used (NVML)", fall.used, 0) + (f"  of {gib(fall.total)}" if fall.total else "")
        if fall.unexplained is not None:
            yield _row("unexplained", fall.unexplained, 0)
        if fall.used and abs(fall.since) > 0.01 * fall.used:
            yield f"  reserved {'grew' if fall.since > 0 else 'shrank'} {gib(abs(fall.since))} since that peak"
    if composition is not None and composition.note:
        yield f"  note: {sanitize(composition.note)}"
    ranking = rank.memory.ranking
    yield from (f"  {sentence}" for sentence in (ranking_sentences(ranking) if ranking is not None else []))
    for cause in rank.memory.causes.values():
        yield from _cause_lines(model, rank, cause)


def _row(label: str, size: int | None, whole: int) -> str:
    figure = "-" if size is None else gib(size) if size else "0"
    share = f"{size / whole * 100:5.0f} %" if size is not None and whole else ""
    return f"  {sanitize(label, _LABEL):<{_LABEL}}{figure:>12}{share}".rstrip()


def _cause_lines(model: RunModel, rank: RankModel, cause: Cause) -> Iterator[str]:
    what = "stayed after" if cause.reason == "leak" else "was allocated and freed in"
    yield f"  {sanitize(cause.phase)}: {gib(cause.transient_bytes)} {what} step {cause.step:,}; {evidence_words(cause)}"
    verdict = verdict_of(spike_alert(model.alerts, rank.rank, cause.phase))
    yield from (f"    {words}" for words in (verdict_words(verdict) if verdict is not None else []))
    for group in cause.groups:
        innermost, own = group_parts(group)
        yield f"    {gib(shown_bytes(cause, group)):>10}  x{group.count:<6,} {innermost}" + (
            f"  < {own}" if own else ""
        )


def rank_data(model: RunModel, rank: RankModel) -> dict[str, Any]:
    """Return one rank's memory as JSON values."""
    fall, memory, ranking = rank_fall(model, rank), rank.memory, rank.memory.ranking
    return {
        "rank": rank.rank,
        "measure": rank.hello.memory_measure if rank.hello else "",
        "step": fall.step if fall else 0,
        "phase": fall.phase if fall else "",
        "peak_bytes": fall.peak if fall else 0,
        "taken_apart": fall.taken_apart if fall else False,
        "parts": {part.name: part.bytes for part in fall.parts} if fall and fall.taken_apart else {},
        "phases": [{"phase": name, "peak_bytes": size} for name, size in (fall.standing if fall else ())],
        "unused_bytes": fall.unused if fall else None,
        "context_bytes": fall.context if fall else None,
        "others_bytes": fall.others if fall else None,
        "unexplained_bytes": fall.unexplained if fall else None,
        "used_bytes": fall.used if fall else None,
        "total_bytes": fall.total if fall else 0,
        "lead": None
        if ranking is None
        else {
            "standing": [msgspec.to_builtins(mark) for mark in ranking.standing],
            "by_bytes": ranking.by,
            "words": ranking_sentences(ranking),
        },
        "latest": msgspec.to_builtins(memory.latest) if memory.latest else None,
        "highest": msgspec.to_builtins(memory.highest) if memory.highest else None,
        "causes": [msgspec.to_builtins(cause) for cause in memory.causes.values()],
        "snapshots": [msgspec.to_builtins(each) for each in rank.snapshots],
    }
