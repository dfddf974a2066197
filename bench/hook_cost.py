"""What the probe's own Python costs a step on the training thread, on any CPU: no run, no GPU, no publisher.

    python bench/hook_cost.py [--loop torch|engine|accumulation] [--blocks 400] [--samples] [--cold MIB] [--budget 0.5]

A tiny loop with real hooks and a real probe, whose memory samples are free (``--samples`` takes real ones). Short
blocks of steps with the probe and without take turns. What counts is the training thread's CPU time, and of it the
fastest tenth of the blocks of either kind: other load on the machine makes a block slower, never faster.

``--cold``: between any two events so much memory is written and other Python runs, as a model's own work empties the
caches between them; batches and times are handled as on a GPU. Also prints the time that the hooks count themselves.
"""

import argparse
import copy
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns
from typing import Any

STEPS = 10
Cool = Callable[[], None]


def cooler(mib: int) -> Cool:
    """Return what empties the caches; without a size it does nothing."""
    if not mib:
        return lambda: None
    import numpy

    big = numpy.zeros(mib << 17)
    tree = {str(number): [{"a": [number] * 3, "b": str(number)}] for number in range(20)}

    def cool() -> None:
        numpy.add(big, 1, out=big)
        json.dumps(copy.deepcopy(tree), indent=1)

    return cool


def cooled(torch: Any, model: Any, cool: Cool) -> Any:
    """Empty the caches in the middle of a backward; return a class of optimizer that does in its step."""
    next(iter(model.parameters())).register_hook(lambda _: cool())

    class Cooled(torch.optim.Optimizer):  # type: ignore[misc,name-defined]
        """Gradient descent."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        def step(self) -> None:
            cool()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.add_(parameter.grad, alpha=-1e-4)
            cool()

    return Cooled


def torch_loop(micro_steps: int, cool: Cool) -> Callable[[], None]:
    """A plain PyTorch loop with a data loader and a loss over the batch."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = cooled(torch, model, cool)(model.parameters(), lr=1e-4)
    loader = iter(Endless(torch))

    def step() -> None:
        for _ in range(micro_steps):
            inputs, targets = next(loader)
            cool()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            cool()
            (loss / micro_steps if micro_steps > 1 else loss).backward()
        cool()
        optimizer.step()
        cool()
        optimizer.zero_grad()
        cool()

    return step


def engine_loop(cool: Cool) -> Callable[[], None]:
    """A DeepSpeed engine's loop, ZeRO-1 on one rank."""
    import deepspeed
    import torch

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(random.randint(20000, 30000)))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    next(iter(model.parameters())).register_hook(lambda _: cool())
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "steps_per_print": 10**9,
        },
    )
    loader = iter(Endless(torch))

    def step() -> None:
        inputs, targets = next(loader)
        cool()
        loss = torch.nn.functional.cross_entropy(engine(inputs), targets)
        cool()
        engine.backward(loss)
        cool()
        engine.step()
        cool()

    return step


class Endless:
    """A real data loader over one batch that never ends."""

    def __init__(self, torch: Any) -> None:
        rows = [(torch.randn(16), torch.tensor(1)) for _ in range(4)]

        class Rows(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
            def __iter__(self) -> Any:
                while True:
                    yield from rows

        self._loader = torch.utils.data.DataLoader(Rows(), batch_size=4)

    def __iter__(self) -> Any:
        return iter(self._loader)


class Constant:
    """A memory back end whose samples are free."""

    measure = "none"
    device_index = 0

    def __init__(self) -> None:
        self.found = (1, 1, 1, 1)

    def sample(self) -> Any:
        """Return the same sample each time."""
        return self.found

    def read(self, sample: Any) -> Any:
        """Return no figures."""
        return sample


class NoEvents:
    """Device events that nothing records."""

    def mark(self) -> Any:
        """Return no event."""


class Timed:
    """Measures the events of followed steps, each by itself."""

    def __init__(self, events: Any) -> None:
        from ftmon.trainer.probe.loop.regular import Code

        self.spent: dict[int, list[int]] = {code: [] for code in Code}
        self._names, self._follows = Code, events.follows
        events.follows = self._timed

    def _timed(self, code: int, owner: Any = None, what: Any = None) -> bool:
        start = perf_counter_ns()
        is_followed = self._follows(code, owner, what)
        if is_followed:
            self.spent[code].append(perf_counter_ns() - start)
        return is_followed

    def text(self) -> str:
        """Return the median of each event, in microseconds."""
        medians = {
            self._names(code).name.lower(): statistics.median(each) / 1000 for code, each in self.spent.items() if each
        }
        return ", ".join(f"{name} {value:.1f}" for name, value in medians.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["torch", "engine", "accumulation"], default="torch")
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--samples", action="store_true", help="take real samples of the process's memory")
    parser.add_argument("--cold", type=int, default=0, metavar="MIB", help="empty the caches between events")
    parser.add_argument("--budget", type=float, default=0.5, help="as --probe-budget")
    args = parser.parse_args()
    os.environ["FTMON_RUN"] = tempfile.mkdtemp()
    os.environ["FTMON_RANK_PID"] = str(os.getpid())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(1)
    from ftmon.protocol.run.rundir import RunDir, RunOptions
    from ftmon.trainer.probe import active
    from ftmon.trainer.probe.events import TorchEvents
    from ftmon.trainer.probe.hooks import distributed
    from ftmon.trainer.probe.hooks import torch as hooks_torch
    from ftmon.trainer.probe.loop.training import Training
    from ftmon.trainer.probe.phases.tracker import Notes
    from ftmon.trainer.probe.rank.context import RankContext, place_of_this_process

    hooks_torch.install(torch)
    distributed.install_collectives(torch)
    options = RunOptions(probe_budget=args.budget)
    rank = RankContext(*place_of_this_process(), RunDir(os.environ["FTMON_RUN"]), options)
    training = Training(rank, active.counts)
    events = active.events = TorchEvents(training)
    if args.loop == "engine":
        import deepspeed
        from ftmon.trainer.probe.hooks import deepspeed as hooks_deepspeed

        hooks_deepspeed.install(deepspeed)
        step = engine_loop(cooler(args.cold))
    else:
        step = torch_loop(4 if args.loop == "accumulation" else 1, cooler(args.cold))
    if args.cold:
        rank.device.events = NoEvents()
    if not args.samples:
        training.tracker.memory = Constant()  # type: ignore[assignment]

    by_event = Timed(events)

    def block() -> float:
        begin = thread_time_ns()
        for _ in range(STEPS):
            step()
        return (thread_time_ns() - begin) / 1000 / STEPS

    blocks: dict[bool, list[float]] = {True: [], False: []}
    costs: dict[str, list[float]] = {"judged": [], "followed": []}
    draw = random.Random(0)
    for number in range(args.blocks + 10):
        for on in draw.sample((True, False), 2):
            active.events = events if on else None
            step()
            spent = block()
            for raw in training.outbox.unsent_steps():
                kind = "followed" if raw.followed else "judged"
                costs[kind].append(raw.cost_ns / 1000)
                if raw.followed:  # as the publisher does
                    step_ns = raw.marks[-1].ns - raw.marks[0].ns
                    training.tracker.budget.note_followed(raw.cost_ns, step_ns)
            training.outbox.items.clear()
            training.regular.spare.extend(Notes() for _ in range(STEPS))
            if number >= 10:
                blocks[on].append(spent)
    assert rank.guard.enabled, "the probe has switched itself off"
    found = {on: statistics.quantiles(spent, n=20) for on, spent in blocks.items()}
    low, middle, median = (found[True][at] - found[False][at] for at in (1, 4, 9))
    print(
        f"{args.loop}: {low:.1f} us a step (fastest quarter {middle:.1f}, median {median:.1f}; "
        f"{args.blocks} pairs of {STEPS} steps; {found[False][1]:.0f} us without)",
        flush=True,
    )
    for name, each in costs.items():
        if each:
            print(f"  counted: {name} {statistics.median(each):.1f} us a step ({len(each)} steps)", flush=True)
    print(f"  by event: {by_event.text()} us")


if __name__ == "__main__":
    main()
