"""What the probe costs a training loop: blocks of steps with the probe on and off in turn, in one process.

    ftmon run --plain -- python bench/gpu/probe_cost.py [--loop torch|engine] [--layers 24] [--hidden 512] [--rows 2]
        [--length 256] [--rounds 40] [--block 20] [--states off,recorder,on] [--out FILE]
    ftmon run --plain -- traceml run bench/gpu/probe_cost.py --args --states off,on,traceml ...

A Qwen2 with two dataloader workers, bound by the host at the default sizes. A block is some steps between two
synchronisations of the device; the first two steps after a switch are not timed. "Off" leaves the hooks in place,
asleep, with PyTorch's memory recorder off: a function call or two a step remain, which no bare loop has; "recorder" has
that on alone; "traceml" has ftmon asleep and each step inside ``trace_step`` of TraceML (traceml-ai), started by its
own launcher. The order inside a round is drawn, so that a drift of the host's speed hits all alike. Beside the time
that passes, the CPU time of the training thread and of the probe's own thread is measured, which other load on a host
moves less. Ratios come with a 95 % confidence interval: percentiles of the median over resampled rounds (bootstrap).
"""

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

WARM_STEPS = 2
STATES = ("off", "recorder", "on")
VOCABULARY = 32000


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
    """Turns the probe of this process, and PyTorch's recorder with it, on and off."""

    def __init__(self) -> None:
        from ftmon.trainer.probe import active

        assert active.events is not None, "start this under `ftmon run`"
        self.training = active.events._training
        self.publisher: Any = next(t for t in threading.enumerate() if t.name == "ftmon-publisher")
        self.watch = self.publisher._captures.steps
        self.costs_us: list[float] = []
        finish = self.training.tracker._finish

        def note(raw: Any) -> None:
            self.costs_us.append(raw.cost_ns / 1000)
            finish(raw)

        self.training.tracker._finish = note

    def publisher_seconds(self) -> float:
        """Return the CPU time of the probe's own thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self.publisher.ident))

    def set(self, state: str) -> None:
        """Switch to one of ``STATES``, and wait until the recorder follows."""
        on = state == "on"
        self.watch._wanted = on
        self.training.guard.enabled = on
        time.sleep(0.25)  # two turns of the publisher, which gives up or takes up the recorder
        if state in ("off", "traceml"):
            self.watch._recording.off()
        elif state == "recorder":
            self.watch._recording.numbers()
        else:
            self.costs_us = self.costs_us[:-1] if self.costs_us else []  # a step that was begun before the pause


def compared(blocks: list[Times], off: list[Times]) -> dict[str, Any]:
    """Return medians, and how they compare with the blocks of the same rounds without the probe."""
    found: dict[str, Any] = {}
    for name in ("wall_ms", "thread_ms"):
        mine, other = [getattr(one, name) for one in blocks], [getattr(one, name) for one in off]
        ratios = sorted(a / b for a, b in zip(mine, other, strict=True))
        draw = random.Random(0)
        drawn = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        tenth = len(mine) // 10
        found[name] = {
            "median": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "interval_95": [drawn[50], drawn[-51]],
            "added_us": (statistics.median(mine) - statistics.median(other)) * 1000,
            "fastest_block": min(mine) / min(other),
            "tenth_percentile": sorted(mine)[tenth] / sorted(other)[tenth],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["torch", "engine"], default="torch")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=20, help="timed steps of a block")
    parser.add_argument("--states", type=lambda text: text.split(","), default=STATES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    traced: Callable[[Any], AbstractContextManager[None]] = lambda _: nullcontext()  # noqa: E731
    if "traceml" in args.states:
        import traceml_ai

        traceml_ai.init(mode="auto")
        traced = traceml_ai.trace_step
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    with torch.device("cuda"):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**qwen(args.layers, args.hidden)))
    model.to(torch.bfloat16)
    step = (torch_step if args.loop == "torch" else engine_step)(model)
    rows = Rows(args.length)
    loader = iter(torch.utils.data.DataLoader(rows, batch_size=args.rows, num_workers=2, pin_memory=True))  # type: ignore[arg-type]

    def steps(count: int, state: str = "") -> Times:
        torch.cuda.synchronize()
        begin = time.perf_counter(), time.thread_time(), switch.publisher_seconds()
        for _ in range(count):
            with traced(model) if state == "traceml" else nullcontext():
                step(next(loader).cuda(non_blocking=True))
        torch.cuda.synchronize()
        end = time.perf_counter(), time.thread_time(), switch.publisher_seconds()
        return Times(*((after - before) * 1000 / count for before, after in zip(begin, end, strict=True)))

    switch = Switch()
    steps(60)
    blocks: dict[str, list[Times]] = {state: [] for state in args.states}
    draw = random.Random(0)
    for _ in range(args.rounds):
        for state in draw.sample(args.states, len(args.states)):
            switch.set(state)
            steps(WARM_STEPS, state)
            blocks[state].append(steps(args.block, state))
            print(f"{state}: {blocks[state][-1].wall_ms:.3f} ms a step", flush=True)
    switch.set("on")
    found = {
        "loop": args.loop,
        "device": torch.cuda.get_device_name(0),
        "sizes": [args.layers, args.hidden, args.rows, args.length],
        "rounds": args.rounds,
        "block": args.block,
        **{state: compared(blocks[state], blocks["off"]) for state in args.states},
        "publisher_cpu_us": statistics.median(block.publisher_ms for block in blocks["on"]) * 1000,
        "hook_us_median": statistics.median(switch.costs_us),
        "hook_us_95": sorted(switch.costs_us)[len(switch.costs_us) * 95 // 100],
    }
    text = json.dumps(found)
    print(text, flush=True)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
