"""What the probe's own Python costs a step on the training thread, on any CPU: no run, no GPU, no publisher.

    python bench/hook_cost.py [--loop torch|engine|accumulation] [--blocks 400] [--samples]

A tiny loop with real hooks and a real probe, whose memory samples are free (``--samples`` takes real ones). Short
blocks of steps with the probe and without take turns. What counts is the training thread's CPU time, and of it the
fastest tenth of the blocks of either kind: other load on the machine makes a block slower, never faster.
"""

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from time import thread_time_ns
from typing import Any

STEPS = 10


def torch_loop(micro_steps: int) -> Callable[[], None]:
    """A plain PyTorch loop with a data loader and a loss over the batch."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = iter(Endless(torch))

    def step() -> None:
        for _ in range(micro_steps):
            inputs, targets = next(loader)
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            (loss / micro_steps if micro_steps > 1 else loss).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_loop() -> Callable[[], None]:
    """A DeepSpeed engine's loop, ZeRO-1 on one rank."""
    import deepspeed
    import torch

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(random.randint(20000, 30000)))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
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
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs), targets))
        engine.step()

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["torch", "engine", "accumulation"], default="torch")
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--samples", action="store_true", help="take real samples of the process's memory")
    args = parser.parse_args()
    os.environ["FTMON_RUN"] = tempfile.mkdtemp()
    os.environ["FTMON_RANK_PID"] = str(os.getpid())
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    torch.set_num_threads(1)
    from ftmon.protocol.run.rundir import RunDir
    from ftmon.trainer.probe import active
    from ftmon.trainer.probe.events import TorchEvents
    from ftmon.trainer.probe.hooks import distributed
    from ftmon.trainer.probe.hooks import torch as hooks_torch
    from ftmon.trainer.probe.loop.training import Training
    from ftmon.trainer.probe.rank.context import RankContext, place_of_this_process

    hooks_torch.install(torch)
    distributed.install_collectives(torch)
    rank = RankContext(*place_of_this_process(), RunDir(os.environ["FTMON_RUN"]))
    training = Training(rank, active.counts)
    events = active.events = TorchEvents(training)
    if args.loop == "engine":
        import deepspeed
        from ftmon.trainer.probe.hooks import deepspeed as hooks_deepspeed

        hooks_deepspeed.install(deepspeed)
        step = engine_loop()
    else:
        step = torch_loop(4 if args.loop == "accumulation" else 1)
    if not args.samples:
        training.tracker.memory = Constant()  # type: ignore[assignment]

    def block() -> float:
        begin = thread_time_ns()
        for _ in range(STEPS):
            step()
        return (thread_time_ns() - begin) / 1000 / STEPS

    blocks: dict[bool, list[float]] = {True: [], False: []}
    draw = random.Random(0)
    for number in range(args.blocks + 10):
        for on in draw.sample((True, False), 2):
            active.events = events if on else None
            step()
            spent = block()
            training.outbox.items.clear()
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


if __name__ == "__main__":
    main()
