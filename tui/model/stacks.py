"""The stacks of all ranks as rows, grouped by equal stacks, the largest group first."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from ...protocol.analysis.stalls import python_stacks
from ...protocol.messages.telemetry import Stacks
from ...protocol.text import ranks_counted, sanitize

RowKind = Literal["group", "frame", "thread", "native"]


class Row(NamedTuple):
    """One line. ``ranks`` are the ranks of its group."""

    kind: RowKind
    text: str
    ranks: tuple[int, ...]


def rows(
    stacks: Mapping[int, Stacks], native: Mapping[int, Stacks] | None = None, unfolded: Collection[int] = ()
) -> list[Row]:
    """Return the rows: a head for each group, then its training thread's frames, innermost first.

    Ranks of ``unfolded`` are shown with all threads, and py-spy's native frames if available, instead of their group's
    frames.
    """
    found: list[Row] = []
    for group in python_stacks.group({rank: (one.text, one.thread) for rank, one in stacks.items()}):
        ranks = tuple(group.ranks)
        what = group.place.text or "no Python frames"
        by_signal = any(stacks[rank].taken_by == "signal" for rank in ranks)
        held = " (could not answer: native code holds Python's lock)" if by_signal else ""
        found.append(Row("group", f"{ranks_counted(group.ranks)}: {what}{held}", ranks))
        if not set(ranks) & set(unfolded):
            found += [Row("frame", f"{frame.place}  {frame.function}", ranks) for frame in group.frames]
            continue
        for rank in sorted(set(ranks) & set(unfolded)):
            found += _whole(rank, stacks[rank], (native or {}).get(rank), ranks)
    return found


def _whole(rank: int, stacks: Stacks, native: Stacks | None, ranks: tuple[int, ...]) -> list[Row]:
    found = [Row("thread", f"rank {rank}, all threads", ranks)]
    found += _lines("frame", stacks.text, ranks)
    if native is not None:
        found.append(Row("thread", f"rank {rank}, native frames by py-spy", ranks))
        found += _lines("native", native.text, ranks)
    return found


def _lines(kind: RowKind, text: str, ranks: tuple[int, ...]) -> list[Row]:
    return [Row(kind, sanitize(line), ranks) for line in text.splitlines() if line.strip()]
