"""What the probe costs a training loop: a few steps with the probe and a few without in turn, in one process.

    ftmon run --plain -- python bench/gpu/probe_cost.py [--loop torch|engine] [--targets 14,50] [--seconds 70]
        [--steady 15] [--block 20] [--states off,on] [--hidden 512] [--rows 2] [--length 256] [--out FILE]
    ftmon run --plain -- python bench/gpu/probe_cost.py --seconds 0   # the hooks' own time alone, in two minutes
    ftmon run --plain -- traceml run bench/gpu/probe_cost.py --args --states off,on,traceml ...

A Qwen2 with two dataloader workers, bound by the host, whose number of layers is chosen for steps of each target (ms).
"Off" leaves one test of a global in each hook; "recorder" is that with PyTorch's memory recorder on; "traceml" is off
with each step inside ``trace_step`` of TraceML (traceml-ai), started by its own launcher. Each round has a block of
every state, in a drawn order, so that a drift of the host's speed hits all alike; the first steps of a block are
not timed: what follows a switch is unusual to the probe, and read in full. The publisher makes and sends messages in
the blocks with the probe alone: what it takes from them is in theirs.
Garbage is collected between rounds only, and the training thread stays on one core where its steps are faster so.

Of each round the ratio of a state's time to that without a probe counts: medians and means (without a fifth of the
rounds at either end) come with a 95 % confidence interval, percentiles over resampled rounds (bootstrap). Beside the
time that passes, the CPU time of the training thread is compared, which other load on a host moves less.

The time of the hooks themselves is measured in steps in a row with the probe, as a training has them: as the probe
counts it, then in CPU time of the thread, with the wrapper around each event that the count leaves out. At the end the
events of followed steps are timed one by one.
"""

import argparse
import gc
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

WARM_STEPS = 28
"""Steps after a switch that are not timed: those that are read in full, and those until one is followed again."""
STEADY_STEPS = 100
TRIED_LAYERS = (4, 12)
STATES = ("off", "recorder", "on")
VOCABULARY = int(os.environ.get("VOCABULARY", "32000"))
"""A small one tries this script without a GPU."""


def qwen(layers: int, hidden: int) -> dict[str, Any]:
    """Return a Qwen2's configuration."""
    heads = hidden // 64
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "tie_word_embeddings": True,
        "use_cache": False,
    }


class Times(NamedTuple):
    """Milliseconds a step."""

    wall_ms: float
    thread_ms: float
    """CPU time of the training thread."""
    publisher_ms: float
    """CPU time of the probe's own thread."""


class Rows:
    """Random token ids, drawn in the loader's workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.randint(0, VOCABULARY, (self.length,), generator=torch.Generator().manual_seed(index))


def torch_step(model: Any) -> Callable[[Any], None]:
    """One update of a plain PyTorch loop."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Any) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(model: Any) -> Callable[[Any], None]:
    """One update of a DeepSpeed engine, ZeRO-2."""
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "steps_per_print": 10**9,
        },
    )

    def step(ids: Any) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step


class Switch:
    """Turns the probe of this process, and PyTorch's recorder with it, on and off between two steps."""

    def __init__(self) -> None:
        from ftmon.trainer.probe import active

        assert active.events is not None, "start this under `ftmon run`"
        self._active: Any = active
        self.events: Any = active.events
        self.publisher: Any = next(t for t in threading.enumerate() if t.name == "ftmon-publisher")
        self.costs_us: dict[str, list[float]] = {"judged": [], "followed": []}
        self.spent_ns: dict[int, list[int]] = {}
        """Time of the events of followed steps, by their codes; empty unless they are timed."""
        self._is_on, self._recorded = True, False
        self._recording: Any = self.publisher._captures.steps._recording
        send, drain, due = self.publisher._send_step, self.publisher._drain, self.publisher._is_due

        def note(raw: Any) -> None:
            if self._is_on:
                kind = "followed" if raw.followed else "judged"
                self.costs_us[kind].append(raw.cost_ns / 1000)
            send(raw)

        self.publisher._send_step = note
        self.publisher._drain = lambda: drain() if self._is_on else None
        self.publisher._is_due = lambda now: self._is_on and due(now)

    def publisher_seconds(self) -> float:
        """Return the CPU time of the probe's own thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.publisher.ident))

    def set(self, state: str) -> None:
        """Switch to one of ``STATES``."""
        if self._is_on:
            self._recorded = self._recording.mode != "off"
        self._is_on = state == "on"
        self._active.events = self.events if self._is_on else None
        if (self._recorded and self._is_on) or state == "recorder":
            self._recording.numbers()
        elif self._recording.mode != "off":
            self._recording.off()

    def count_thread_time(self) -> None:
        """Make the probe count its cost in CPU time of the thread from now on."""
        from ftmon.trainer.probe import guard

        follows, counted, clock = self.events.follows, self.events.guard, time.thread_time_ns
        pairs = [clock() - clock() for _ in range(1000)]
        own = -round(statistics.median(pairs))  # of the two readings

        def timed(code: int, owner: Any = None, what: Any = None) -> bool:
            spent, start = counted.spent_ns, clock()
            is_followed = follows(code, owner, what)
            taken = clock() - start - own
            if is_followed:
                counted.spent_ns = spent + max(0, taken)
            return is_followed

        self.events.follows = timed
        guard.perf_counter_ns = clock  # type: ignore[attr-defined]

    def count_wall_time(self, follows: Any) -> None:
        """Make the probe count its cost as it does by itself; ``follows`` is its own method."""
        from ftmon.trainer.probe import guard

        self.events.follows = follows
        guard.perf_counter_ns = time.perf_counter_ns  # type: ignore[attr-defined]

    def time_events(self) -> None:
        """Time each event of followed steps from now on."""
        self.spent_ns.clear()
        follows, spent = self.events.follows, self.spent_ns

        def timed(code: int, owner: Any = None, what: Any = None) -> bool:
            start = time.perf_counter_ns()
            if not follows(code, owner, what):
                return False
            spent.setdefault(code, []).append(time.perf_counter_ns() - start)
            return True

        self.events.follows = timed

    def by_event_us(self) -> dict[str, float]:
        """Return the median time of each event."""
        from ftmon.trainer.probe.events import Code

        return {Code(code).name.lower(): statistics.median(each) / 1000 for code, each in self.spent_ns.items()}


def interval(ratios: list[float], estimate: Callable[[list[float]], float]) -> list[float]:
    """Return the 95 % confidence interval of an estimate, over resampled rounds."""
    draw = random.Random(0)
    drawn = sorted(estimate(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return [drawn[25], drawn[-26]]


def trimmed(ratios: list[float]) -> float:
    """Return the mean without a fifth at either end."""
    cut = len(ratios) // 5
    return statistics.fmean(sorted(ratios)[cut : len(ratios) - cut])


def compared(blocks: list[Times], off: list[Times]) -> dict[str, Any]:
    """Return medians, and how they compare with the blocks of the same rounds without the probe."""
    found: dict[str, Any] = {}
    for name in ("wall_ms", "thread_ms"):
        mine, other = [getattr(one, name) for one in blocks], [getattr(one, name) for one in off]
        ratios = [a / b for a, b in zip(mine, other, strict=True)]
        tenth = len(mine) // 10
        found[name] = {
            "median": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "interval_95": interval(ratios, statistics.median),
            "trimmed_ratio": trimmed(ratios),
            "trimmed_interval_95": interval(ratios, trimmed),
            "added_us": statistics.median(a - b for a, b in zip(mine, other, strict=True)) * 1000,
            "tenth_percentile": sorted(mine)[tenth] / sorted(other)[tenth],
        }
    return found


def cost_shares(mine: list[Times], other: list[Times], off: list[Times]) -> dict[str, list[float]]:
    """Return what one state adds, as a share of what another adds: by means without a fifth, and its interval.

    All over resampled rounds: the two costs of a round are drawn together.
    """
    found: dict[str, list[float]] = {}
    for name in ("wall_ms", "thread_ms"):
        own, others, bare = ([getattr(one, name) for one in blocks] for blocks in (mine, other, off))
        costs = [(a - c, b - c) for a, b, c in zip(own, others, bare, strict=True)]

        def share(drawn: list[tuple[float, float]]) -> float:
            return trimmed([a for a, _ in drawn]) / trimmed([b for _, b in drawn])

        draw = random.Random(0)
        resampled = sorted(share(draw.choices(costs, k=len(costs))) for _ in range(1000))
        found[name] = [share(costs), resampled[25], resampled[-26]]
    return found


class Loop:
    """One size of the model, and its steps."""

    def __init__(self, args: argparse.Namespace, layers: int, switch: Switch | None, traced: Any) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.device_name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        with torch.device(self._device):
            self.model: Any = Qwen2ForCausalLM(Qwen2Config(**qwen(layers, args.hidden)))
        if self._device == "cuda":
            self.model.to(torch.bfloat16)
        self._step = (torch_step if args.loop == "torch" else engine_step)(self.model)
        loader: Any = torch.utils.data.DataLoader
        self._rows = iter(
            loader(Rows(args.length), batch_size=args.rows, num_workers=2, pin_memory=self._device == "cuda")
        )
        self._switch, self._traced = switch, traced
        self._synchronize = torch.cuda.synchronize if self._device == "cuda" else bool

    def run(self, count: int, state: str = "") -> Times:
        """Take steps; return the time of one."""
        switch = self._switch
        self._synchronize()
        begin = time.perf_counter(), time.thread_time(), switch.publisher_seconds() if switch else 0.0
        for _ in range(count):
            with self._traced(self.model) if state == "traceml" else nullcontext():
                self._step(next(self._rows).to(self._device, non_blocking=True))
        self._synchronize()
        end = time.perf_counter(), time.thread_time(), switch.publisher_seconds() if switch else 0.0
        return Times(*((after - before) * 1000 / count for before, after in zip(begin, end, strict=True)))


def layers_for(target_ms: float, make: Callable[[int], "Loop"], switch: Switch) -> int:
    """Return the number of layers with which a step without a probe takes about so long."""
    found: list[float] = []
    switch.set("off")
    for layers in TRIED_LAYERS:
        loop = make(layers)
        loop.run(10)
        found.append(statistics.median(loop.run(2).wall_ms for _ in range(15)))
    few, many = TRIED_LAYERS
    per_layer = max(0.01, (found[1] - found[0]) / (many - few))
    return max(1, round(few + (target_ms - found[0]) / per_layer))


def pinned(loop: Loop) -> bool:
    """Keep the training thread on its present core if its steps are faster so; return whether they are."""
    everywhere = os.sched_getaffinity(0)
    free = statistics.median(loop.run(3).wall_ms for _ in range(10))
    with open("/proc/thread-self/stat", encoding="ascii") as file:
        core = int(file.read().rpartition(")")[2].split()[36])
    os.sched_setaffinity(0, {core})
    if statistics.median(loop.run(3).wall_ms for _ in range(10)) <= free:
        return True
    os.sched_setaffinity(0, everywhere)
    return False


def measured(loop: Loop, switch: Switch, args: argparse.Namespace) -> dict[str, Any]:
    """Take rounds of blocks for so many seconds; return what they show."""
    switch.set("on")
    ready = time.monotonic() + 4  # captures of the first steps, and the choice of coarse steps
    while time.monotonic() < ready:
        loop.run(10)
    switch.set("off")
    is_pinned = pinned(loop)
    for each in switch.costs_us.values():
        each.clear()
    blocks: dict[str, list[Times]] = {state: [] for state in args.states}
    draw, deadline = random.Random(0), time.monotonic() + args.seconds
    while time.monotonic() < deadline:
        gc.collect()
        for state in draw.sample(args.states, len(args.states)):
            switch.set(state)
            loop.run(WARM_STEPS, state)
            blocks[state].append(loop.run(args.block, state))
    switch.set("on")
    budget = switch.events._training.tracker.budget
    found = {
        "pinned": is_pinned,
        "rounds": len(blocks["off"]),
        **{state: compared(blocks[state], blocks["off"]) for state in args.states},
        "every": budget.every,
        "block": budget.block,
        "publisher_cpu_us": statistics.fmean(block.publisher_ms for block in blocks["on"]) * 1000,
    }
    if "traceml" in blocks:
        found["share_of_traceml"] = cost_shares(blocks["on"], blocks["traceml"], blocks["off"])
    for name, costs in switch.costs_us.items():
        if costs:
            found[f"{name}_us"] = [round(each, 1) for each in statistics.quantiles(costs, n=20)[9::9]]
            found[f"{name}_steps"] = len(costs)
    every = [cost for costs in switch.costs_us.values() for cost in costs]
    found["mean_hook_us"] = statistics.fmean(every)
    return found


def steady(loop: Loop, switch: Switch, seconds: float) -> dict[str, Any]:
    """Return what the hooks take in steps in a row with the probe, and the time of these steps."""
    switch.set("on")
    loop.run(STEADY_STEPS)
    for each in switch.costs_us.values():
        each.clear()
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        times.append(loop.run(STEADY_STEPS).wall_ms)
    time.sleep(1.0)  # the publisher's messages
    every = [cost for costs in switch.costs_us.values() for cost in costs]
    found = {"step_ms": statistics.median(times), "steps": len(every), "mean_us": statistics.fmean(every)}
    found["percent"] = found["mean_us"] / 10 / statistics.fmean(times)
    for name, costs in switch.costs_us.items():
        if costs:
            found[f"{name}_us"], found[f"{name}_steps"] = statistics.median(costs), len(costs)
    budget = switch.events._training.tracker.budget
    return {**found, "every": budget.every, "block": budget.block}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["torch", "engine"], default="torch")
    parser.add_argument("--targets", type=lambda text: [float(each) for each in text.split(",")], default=[14.0, 50.0])
    parser.add_argument("--layers", type=int, default=0, help="instead of a target")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=70.0, help="of the blocks of each size")
    parser.add_argument("--steady", type=float, default=15.0, help="seconds of steps in a row, twice for each size")
    parser.add_argument("--block", type=int, default=20, help="timed steps of a block")
    parser.add_argument("--states", type=lambda text: text.split(","), default=["off", "on"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    traced: Callable[[Any], AbstractContextManager[None]] = lambda _: nullcontext()  # noqa: E731
    if "traceml" in args.states:
        import traceml_ai

        traceml_ai.init(mode="auto")
        traced = traceml_ai.trace_step
    gc.disable()
    Loop(args, TRIED_LAYERS[0], None, traced).run(5)  # the first optimizer makes this process a rank
    switch = Switch()

    def make(layers: int) -> Loop:
        gc.collect()  # another training begins once the optimizer of the one before is gone
        return Loop(args, layers, switch, traced)

    sizes = [args.layers] if args.layers else [layers_for(target, make, switch) for target in args.targets]
    results: list[dict[str, Any]] = []
    follows = switch.events.follows
    for layers in sizes:
        switch.set("on")
        loop = make(layers)
        loop.run(20)
        found = {"loop": args.loop, "device": loop.device_name, "layers": layers, "block": args.block}
        found |= {"sizes": [args.hidden, args.rows, args.length]}
        if args.seconds:
            found |= measured(loop, switch, args)
        found["own_time"] = steady(loop, switch, args.steady)
        switch.count_thread_time()
        found["own_thread_time"] = steady(loop, switch, args.steady)
        switch.count_wall_time(follows)
        switch.time_events()
        loop.run(200)
        switch.events.follows = follows
        found["by_event_us"] = switch.by_event_us()
        print(json.dumps(found), flush=True)
        results.append(found)
    if args.out:
        args.out.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
