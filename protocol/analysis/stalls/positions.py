"""Where a rank is, in words, for the texts of rank states and of alerts."""

from ...text import ranks_in_words
from .evidence import Collective
from .rank_view import RankView

STOPPED, TRACED = "stopped by a signal (SIGSTOP)", "traced by a debugger"
_WHERE = {
    "init": "in start-up",
    "data": "in data loading",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer step",
    "generate": "in generation",
    "eval": "in evaluation",
    "checkpoint": "in checkpointing",
    "idle": "in Python code outside any phase",
    "exit": "finished, but its process is still alive",
}
_ABSENT = {
    "stopped": "stopped by a signal",
    "held": "held at an out-of-memory error",
    "gone": "process gone",
    "silent": "process alive, but sends nothing",
    "cut off": "host cut off",
}


def collective(found: Collective | None) -> str:
    """Return the name of a collective: ``all_reduce #209``, ``#9 of the group of ranks 0 and 1``; empty for None."""
    if found is None:
        return ""
    number = f" #{found.number}" if found.number is not None else ""
    ranks = ranks_in_words(found.ranks) if found.ranks else ""
    group = f" of the group of {ranks}" if ranks else ""
    if found.group:
        group = f" of group {found.group} ({ranks})" if ranks else f" of group {found.group}"
    return f"{found.name}{number}{group}".strip()


def where(view: RankView) -> str:
    """Return where a rank is: from its own reports, with the line where its stacks show it."""
    found = view.evidence
    line = found.place.text if found is not None else ""
    phase = _WHERE.get(view.phase, f"in {view.phase}")
    if view.absent == "silent" and line:
        return f"{phase}, in native code that holds the GIL: {line}"
    if view.absent:
        return _ABSENT[view.absent]
    if found is not None and found.lock is not None:
        line = f"{line or 'at a lock'}, waits for the lock {found.lock.path}"
        if found.lock.holder:
            line += f" held by {found.lock.holder}"
    words = f"inside {collective(view.call)}" if view.inside else phase
    return f"{words}: {line}" if line else words
