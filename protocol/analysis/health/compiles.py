"""Recompilation storms of ``torch.compile``: a function that is compiled repeatedly while the run trains.

A rank reports each compilation by Dynamo (``Compiles``). A few are normal: the first, one with dynamic shapes, another
for the last batch of an epoch or for evaluation. Raised if one function was recompiled ``RECOMPILES`` times after the
run's first ``WARM_UP`` steps, or if Dynamo stopped compiling it at its limit. Resolved after ``QUIET_STEPS`` steps
without a recompilation.
"""

import msgspec

from ...messages.health import Compiles
from ...text import counted, duration, sanitize
from ..findings import Finding, State
from ..findings.kind import Kind, Shown
from ..text.words import Words

RECOMPILES = 4
WARM_UP = 1
QUIET_STEPS = 100


class CompileFacts(msgspec.Struct, frozen=True):
    """The function, the number of recompilations, and the last reason."""

    function: str
    recompiles: int
    seconds: float
    """Time of its compilations since warm-up."""
    reason: str
    """Dynamo's description of the guard that failed last; empty: unknown."""
    since_step: int
    limit_reached: bool = False
    """Whether Dynamo reached its limit, so that the function runs uncompiled from now on."""


class _Function:
    def __init__(self, step: int) -> None:
        self.count: dict[int, int] = {}
        self.seconds = 0.0
        self.reason = ""
        self.since = self.step = step
        self.ranks: set[int] = set()
        self.raised = False
        self.limit = False


class Recompilation:
    """Judges all ranks of a run."""

    def __init__(self) -> None:
        self._functions: dict[str, _Function] = {}

    def compiles(self, message: Compiles) -> list[Finding]:
        """Process a rank's compilations since its last message."""
        found: list[Finding] = []
        for one in message.functions:
            if one.step <= WARM_UP or not (one.reason or one.failed):
                continue
            function = self._functions.setdefault(one.name, _Function(one.step))
            function.count[message.rank] = function.count.get(message.rank, 0) + 1
            function.seconds += one.seconds
            function.reason = one.reason or function.reason
            function.step = max(function.step, one.step)
            function.limit = function.limit or "limit" in one.failed.lower()
            if function.count[message.rank] >= RECOMPILES or function.limit:
                fresh = not function.raised or message.rank not in function.ranks
                function.ranks.add(message.rank)
                state = "updated" if function.raised else "raised"
                if fresh or one is message.functions[-1]:
                    found.append(_finding(one.name, function, state))
                function.raised = True
        return found

    def step(self, step: int) -> list[Finding]:
        """Resolve findings that are quiet at ``step``; call it at intervals."""
        found: list[Finding] = []
        for name, function in list(self._functions.items()):
            if step - function.step > QUIET_STEPS:
                del self._functions[name]
                if function.raised:
                    found.append(_finding(name, function, "resolved"))
        return found

    def reset(self) -> list[Finding]:
        """Reset; return the resolved findings."""
        found = [_finding(name, one, "resolved") for name, one in self._functions.items() if one.raised]
        self._functions.clear()
        return found


def _finding(name: str, function: _Function, state: State) -> Finding:
    facts = CompileFacts(
        name, max(function.count.values()), function.seconds, function.reason, function.since, function.limit
    )
    ranks = tuple(sorted(function.ranks))
    return Finding("recompilation", facts, state, "warning", ranks, name, function.step)


def _recompilation(finding: Finding) -> Words:
    facts: CompileFacts = finding.facts
    why = f" Latest reason: {sanitize(facts.reason, 300)}." if facts.reason else ""
    limit = (
        " torch.compile has reached its recompilation limit: it runs uncompiled from now on."
        if facts.limit_reached
        else ""
    )
    return Words(
        f"torch.compile keeps recompiling {facts.function}: {counted(facts.recompiles, 'time')}",
        f"Since step {facts.since_step} compilation took {duration(facts.seconds)}.{why}{limit}",
        "Shapes that change: pad or bucket them, mark the dimension with torch._dynamo.mark_dynamic, or compile with "
        "dynamic=True; Python numbers that change: make them tensors. TORCH_LOGS=recompiles prints every reason.",
        "It has not been recompiled since.",
    )


_SHOWN: dict[str, Shown] = {
    "recompiles": Shown("recompilations"),
    "seconds": Shown("time spent", "s"),
}

KINDS = (
    Kind(
        "recompilation",
        CompileFacts,
        _recompilation,
        shown=_SHOWN,
        limits={f"recompilations of a function after step {WARM_UP}": str(RECOMPILES)},
    ),
)
