"""Inspects ranks of this host without their cooperation: their processes' activity, and their stacks by a signal."""

import time
from collections.abc import Collection
from typing import Any, NamedTuple

from ....protocol.analysis.stalls.evidence import Calls, LockWait
from ....protocol.messages import verbs
from ....protocol.text import kernel_sleep, sanitize
from .. import processes
from ..escaped import escaped, origin
from . import activity, file_locks, stack_dump, traffic
from .activity import Activity
from .gil_wait import RANKS_AT_ONCE, waiting_for_gil
from .stack_dump import DumpTarget


class Inspection(NamedTuple):
    """Results of an inspection, by rank."""

    stacks: dict[int, str]
    """Stacks of the silent ranks that wrote them on a signal."""
    why: dict[int, str]
    """Reasons for the silent ranks that did not."""
    activities: dict[int, Activity]
    locks: dict[int, LockWait] = {}  # noqa: RUF012
    """File locks that ranks of this host wait for, by rank."""
    nccl: dict[int, Calls] = {}  # noqa: RUF012
    """Collectives that ranks have launched by NCCL's count, by rank."""


def inspect_ranks(targets: list[DumpTarget], silent: Collection[int]) -> Inspection:
    """Return the activity of this host's ranks and the stacks of the silent ones. Blocks for seconds."""
    asked = [target for target in targets if target.rank in silent]
    locked: set[int] = set()
    stacks: dict[int, str] = {}
    for first in range(0, len(asked), RANKS_AT_ONCE):
        group = asked[first : first + RANKS_AT_ONCE]
        found = waiting_for_gil(group)
        stacks |= stack_dump.by_signal(target for target in group if target.rank in found)  # at once: it may change
        locked |= found
    why = {target.rank: why_silent(target, target.rank in locked) for target in asked if target.rank not in stacks}
    table = processes.table()
    sockets = traffic.by_socket()
    blocked = file_locks.blocked(table)
    origins = [origin(target.rank, target.pid, table) for target in targets]
    daemons = escaped([one for one in origins if one is not None], table)
    now = time.monotonic()
    activities: dict[int, Activity] = {}
    locks: dict[int, LockWait] = {}
    ranks = {target.pid for target in targets}
    for target in targets:
        process = table.get(target.pid)
        if process is None or process.start_ticks != target.start_ticks or not process.alive:
            continue
        lock = blocked.get(target.pid)
        holder = table.get(lock.holder) if lock is not None else None
        if lock is not None:
            locks[target.rank] = LockWait(lock.path, holder=_in_words(lock.holder, holder))
        others = [daemon.pid for daemon in daemons.get(target.rank, [])]
        others += [holder.pid] if holder is not None else []
        activities[target.rank] = activity.measure(target.pid, target.dump, table, now, sockets, others, ranks)
    return Inspection(stacks, why, activities, locks)


def _in_words(pid: int, holder: processes.Process | None) -> str:
    return f"pid {pid} ({sanitize(holder.name, 40)})" if holder is not None else ""


def answer_look(look: verbs.Look) -> dict[str, Any]:
    """Inspect ranks of this host; return the data of the answer."""
    seen = inspect_ranks([DumpTarget(*target) for target in look.targets], look.silent)
    return {
        "stacks": {str(rank): text for rank, text in seen.stacks.items()},
        "why": {str(rank): text for rank, text in seen.why.items()},
        "activities": {str(rank): list(found) for rank, found in seen.activities.items()},
    }


def why_silent(target: DumpTarget, is_locked: bool) -> str:
    """Return why a rank's stacks could not be captured, judged from its process."""
    process = processes.read(target.pid)
    if process is None or process.start_ticks != target.start_ticks or not process.alive:
        return "its process is gone"
    if process.state == "t":
        return "its process is stopped by a debugger; continue it there, or detach"
    if process.state == "T":
        return f"its process is stopped by a signal; 'kill -CONT {target.pid}' lets it go on"
    if process.state == "D":
        return f"its process is {kernel_sleep(activity.wchan(target.pid, target.pid))}: the kernel has to return first"
    if is_locked:
        return "no answer: native code holds Python's lock, and a signal could not be used"
    return "no answer, though its probe does not wait for Python's lock: its host may be busy, or was cut off"
