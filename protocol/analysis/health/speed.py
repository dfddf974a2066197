"""Input-bound runs: the share of a step for which the training thread waits for its next batch.

Waiting is the time in the DataLoader, over the last ``WINDOW`` steps of a rank, without the ``LEFT_OUT`` longest
(an epoch's first batch waits for new workers) and without the run's first ``WARM_UP`` steps. On a GPU waiting costs
only the time for which the device idles: the wait is then the smaller of the host's wait and the step's device time
outside forward, backward, optimizer, evaluation and checkpoint. Raised if at least half of the ranks wait ``SHARE``
of the step and ``LEAST_US`` per step (a single slow rank is a straggler), in the whole window and in
``FEWEST_PARTS`` of its parts of ``EVERY`` steps: refilling a shuffle buffer, or a briefly busy file system, affects
only a few parts. Resolved if the share is below half of ``SHARE`` at two consecutive checks.

Recompilation storms of ``torch.compile``: a function that is compiled repeatedly while the run trains.

A rank reports each compilation by Dynamo (``Compiles``). A few are normal: the first, one with dynamic shapes, another
for the last batch of an epoch or for evaluation. Raised if one function was recompiled ``RECOMPILES`` times after the
run's first ``WARM_UP`` steps, or if Dynamo stopped compiling it at its limit. Resolved after ``QUIET_STEPS`` steps
without a recompilation.
"""

from collections import Counter, defaultdict, deque

import msgspec

from ...messages.telemetry import Compiles, DataLoaderInfo, Hello, Step
from ...text import counted, duration, sanitize
from ..findings.finding import HIDDEN, Finding, Kind, Shown, State
from ..words import Words
from .series import Judge

WINDOW = 80
WARM_UP = 5
LEFT_OUT = 4
EVERY = 10
SHARE = 0.25
LEAST_US = 5_000
FEWEST_PARTS = 5
LOOKS = 2
RECOMPILES = 4
COMPILES_WARM_UP = 1
QUIET_STEPS = 100
_WORK = frozenset(("forward", "backward", "optimizer", "eval", "checkpoint"))
_MOST_WORKERS = 64  # assumed maximum of useful worker processes on a host whose number of CPUs is unknown


class DataWaitFacts(msgspec.Struct, frozen=True):
    """The wait per step, and the settings of the data loader."""

    share: float  # share of the step for which the rank with the longest wait waits
    wait_ms: float
    step_ms: float
    window_steps: int
    ranks_bound: int
    ranks_total: int
    cuda: bool
    loader: DataLoaderInfo | None = None  # settings of that rank's DataLoader; None: unknown, or not PyTorch's
    workers_needed: int = 0  # worker processes per rank that would hide the wait, if loading scales; 0: unknown


class _Rank:
    def __init__(self) -> None:
        self.cuda = False
        self.loader: DataLoaderInfo | None = None
        self.steps = 0
        self.window: deque[tuple[int, int]] = deque(maxlen=WINDOW)


class DataWait(Judge):
    """Judges all ranks of a run."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._free = 0

    def hello(self, hello: Hello) -> None:
        rank = self._ranks[hello.rank]
        rank.cuda = hello.device.kind == "cuda"
        if hello.loader is not None:
            rank.loader = hello.loader

    def drop(self, rank: int) -> None:
        self._ranks.pop(rank, None)

    def step(self, step: Step) -> list[Finding]:
        rank = self._ranks[step.rank]
        if rank.cuda and step.device_us is None and step.memory_every > 1:
            return []  # the wait of the host alone is no wait of the device
        rank.steps += 1
        if rank.steps <= WARM_UP:
            return []
        wait = work = 0
        for record in step.phases:
            name = record.name
            if name in _WORK:
                work += record.device_us or 0
            elif name == "data":
                wait = record.host_us
        if step.fetch_us is not None and step.fetch_us < wait:
            wait = step.fetch_us  # the rest of ``data`` is the script's own work on the batch
        if wait and rank.cuda and step.device_us is not None:
            wait = max(0, min(wait, step.device_us - work))
        rank.window.append((wait, step.host_us))
        if rank.steps % EVERY or len(rank.window) < WINDOW or step.rank != min(self._ranks):
            return []
        return self._check(step.step)

    def _check(self, step: int) -> list[Finding]:
        full = {number: list(rank.window) for number, rank in self._ranks.items() if len(rank.window) == WINDOW}
        shares = {number: _share(sorted(steps)[:-LEFT_OUT]) for number, steps in full.items()}
        if self.standing is not None:
            middle = sorted(shares.values())[len(full) // 2]
            self._free = self._free + 1 if middle[0] < SHARE / 2 else 0
            return self._end() if self._free >= LOOKS else []
        bound = [
            number
            for number, (share, wait, _) in shares.items()
            if share >= SHARE and wait >= LEAST_US and _is_lasting(full[number])
        ]
        if not bound or len(bound) * 2 < len(full):
            return []
        worst = max(bound, key=lambda number: shares[number][0])
        share, wait, host = shares[worst]
        rank = self._ranks[worst]
        self._free = 0
        facts = DataWaitFacts(
            *(share, wait / 1e3, host / 1e3, WINDOW, len(bound), len(full), rank.cuda, rank.loader),
            workers_needed=workers_needed(rank.loader, wait, host),
        )
        self.standing = Finding("input_bound", facts, ranks=tuple(sorted(bound)), step=step)
        return [self.standing]


def _is_lasting(steps: list[tuple[int, int]]) -> bool:
    parts = [_share(steps[at : at + EVERY])[0] for at in range(0, WINDOW, EVERY)]
    return sum(part >= SHARE for part in parts) >= FEWEST_PARTS


def _share(steps: list[tuple[int, int]]) -> tuple[float, float, float]:
    """Return (waiting as a share of the steps' time, mean wait, mean step time), times in microseconds."""
    waits, hosts = zip(*steps, strict=True)
    wait, host = sum(waits), sum(hosts)
    return wait / max(1, host), wait / len(steps), host / len(steps)


def workers_needed(loader: DataLoaderInfo | None, wait_us: float, step_us: float) -> int:
    """Return how many worker processes would load a batch in the rest of a step's time; 0: unknown.

    Without workers the wait is a batch's whole cost. With ``w`` workers a waiting run receives one batch per step, so a
    batch costs about ``w`` steps of a worker's time.
    """
    compute = step_us - wait_us
    if loader is None or compute <= 0:
        return 0
    cost = wait_us if loader.workers == 0 else loader.workers * step_us
    return int(-(-cost // compute)) + (loader.workers == 0)


def _input(facts: DataWaitFacts, _: Finding) -> Words:
    loader, settings = facts.loader, ""
    if loader is not None:
        ahead = f", {loader.prefetch_factor} batches ahead each" if loader.workers else ""
        pinned = "pinned" if loader.pin_memory else "not pinned"
        settings = f"; its DataLoader has num_workers={loader.workers}{ahead}, memory {pinned}"
    of = "" if facts.ranks_bound == facts.ranks_total else f" ({facts.ranks_bound} of {facts.ranks_total} ranks)"
    return Words(
        f"waits for data {facts.share:.0%} of each step{of}",
        f"Waiting for the next batch takes {facts.wait_ms:.0f} of {facts.step_ms:.0f} ms a step (mean of "
        f"{facts.window_steps} steps){settings}.",
        _loader_remedy(facts),
        "Data arrives in time again.",
    )


def _loader_remedy(facts: DataWaitFacts) -> str:
    loader = facts.loader
    if loader is None:
        return (
            "Load data in advance: a DataLoader with num_workers, or a prefetching thread; or prepare "
            "(tokenize, decode) the data once, before the run."
        )
    parts: list[str] = []
    most = loader.cpus or _MOST_WORKERS
    if 0 < facts.workers_needed <= most:
        parts.append(
            f"num_workers={max(facts.workers_needed, loader.workers + 1)} would hide the wait, if workers scale"
        )
    elif facts.workers_needed:
        few = facts.workers_needed <= 2 * most
        needed = f"about {facts.workers_needed}" if few else f"more than {2 * most}"
        cpus = f", but this rank may use {counted(loader.cpus, 'CPU')}" if loader.cpus else ""
        parts.append(
            f"hiding it takes {needed} workers{cpus}: make each sample cheaper (tokenize or decode once, before the "
            "run)"
        )
    if not loader.workers and not parts:
        parts.append("num_workers above 0 loads batches in the background")
    if loader.workers and loader.prefetch_factor < 4:
        parts.append("a higher prefetch_factor evens out samples that differ in cost")
    if loader.workers and not loader.persistent_workers:
        parts.append("persistent_workers=True avoids restarting them at each epoch")
    if facts.cuda and not loader.pin_memory:
        parts.append("pin_memory=True with non_blocking copies overlaps the copy with the step")
    text = "; ".join(parts)
    return f"Try: {text}." if text else "Make each sample cheaper."


class CompileFacts(msgspec.Struct, frozen=True):
    """The function, the number of recompilations, and the last reason."""

    function: str
    recompiles: int
    seconds: float  # time of its compilations since warm-up
    reason: str  # Dynamo's description of the guard that failed last; empty: unknown
    since_step: int
    limit_reached: bool = False  # whether Dynamo reached its limit, so that the function runs uncompiled from now on


class _Function:
    def __init__(self, step: int) -> None:
        self.count: Counter[int] = Counter()  # recompilations by rank
        self.seconds = 0.0
        self.reason = ""
        self.since = self.step = step
        self.ranks: set[int] = set()  # ranks in its finding
        self.limit = False


class Recompilation:
    """Judges all ranks of a run."""

    def __init__(self) -> None:
        self._functions: dict[str, _Function] = {}

    def compiles(self, message: Compiles) -> list[Finding]:
        """Process a rank's compilations since its last message."""
        found: list[Finding] = []
        for one in message.functions:
            if one.step <= COMPILES_WARM_UP or not (one.reason or one.failed):
                continue
            function = self._functions.setdefault(one.name, _Function(one.step))
            function.count[message.rank] += 1
            function.seconds += one.seconds
            function.reason = one.reason or function.reason
            function.step = max(function.step, one.step)
            function.limit = function.limit or "limit" in one.failed.lower()
            if function.count[message.rank] >= RECOMPILES or function.limit:
                state = "updated" if function.ranks else "raised"
                if message.rank not in function.ranks or one is message.functions[-1]:
                    function.ranks.add(message.rank)
                    found.append(_finding(one.name, function, state))
        return found

    def step(self, step: int) -> list[Finding]:
        """Resolve findings that are quiet at ``step``; call it at intervals."""
        quiet = [name for name, one in self._functions.items() if step - one.step > QUIET_STEPS]
        return self._end({name: self._functions.pop(name) for name in quiet})

    def reset(self) -> list[Finding]:
        """Reset; return the resolved findings."""
        functions, self._functions = self._functions, {}
        return self._end(functions)

    def _end(self, functions: dict[str, _Function]) -> list[Finding]:
        return [_finding(name, one, "resolved") for name, one in functions.items() if one.ranks]


def _finding(name: str, function: _Function, state: State) -> Finding:
    facts = CompileFacts(
        name, max(function.count.values()), function.seconds, function.reason, function.since, function.limit
    )
    ranks = tuple(sorted(function.ranks))
    return Finding("recompilation", facts, state, "warning", ranks, name, function.step)


def _recompilation(facts: CompileFacts, _: Finding) -> Words:
    why = f" Latest reason: {sanitize(facts.reason, 300)}." if facts.reason else ""
    limit = " torch.compile has reached its recompilation limit: it runs uncompiled from now on."
    limit = limit if facts.limit_reached else ""
    return Words(
        f"torch.compile keeps recompiling {facts.function}: {counted(facts.recompiles, 'time')}",
        f"Since step {facts.since_step} compilation took {duration(facts.seconds)}.{why}{limit}",
        "Shapes that change: pad or bucket them, mark the dimension with torch._dynamo.mark_dynamic, or compile with "
        "dynamic=True; Python numbers that change: make them tensors. TORCH_LOGS=recompiles prints every reason.",
        "It has not been recompiled since.",
    )


KINDS = (
    Kind(
        "input_bound",
        DataWaitFacts,
        _input,
        shown={
            "ranks_bound": Shown("ranks that wait for data"),
            "share": Shown("share of the step", "share"),
            "wait_ms": Shown("waited for data", "ms"),
            "loader": Shown("data loader"),
            "prefetch_factor": Shown("batches loaded ahead"),
            "pin_memory": Shown("pinned memory"),
            "iterable": Shown("an IterableDataset"),
            "cpus": Shown("processors per rank"),
            "cuda": HIDDEN,
        },
        limits={
            "wait, of the step": f"{SHARE:.0%}",
            "wait a step": f"{LEAST_US / 1000:g} ms",
            "window": f"{WINDOW} steps, and {FEWEST_PARTS} of its {WINDOW // EVERY} parts",
        },
    ),
    Kind(
        "recompilation",
        CompileFacts,
        _recompilation,
        shown={"recompiles": Shown("recompilations"), "seconds": Shown("time spent", "s")},
        limits={f"recompilations of a function after step {COMPILES_WARM_UP}": str(RECOMPILES)},
    ),
)
