#!/usr/bin/env bash
# DeepSpeed 0.19.8, torch 2.13.0 (CPU): from the third step on the engine makes the host wait for the device twice in each
# micro-batch, by default: its throughput timer (utils/timer.py) calls the accelerator's synchronize() before the forward
# pass and at the end of engine.step(), also where no gradient is due and nothing prints its figure (steps_per_print is
# unset, wall_clock_breakdown off). On a GPU the queue is empty at the beginning of each forward: of a 0.5B model with
# micro-batches of 16,384 tokens on an H200 (torch 2.11) kernels ran in 436 of 497 ms a step of four, and in 446 of 461
# without the timer. The key that turns it off: "timers": {"throughput": {"enabled": false}}.
#
# Seen: synchronize() is called 2 times a micro-batch with the defaults, 0 times with that key, and 0 times in the first
# two steps.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy setuptools wheel
DS_BUILD_OPS=0 "$folder/venv/bin/pip" install --quiet --no-build-isolation deepspeed==0.19.8
cd "$folder"
TORCH_EXTENSIONS_DIR=$folder/built DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29533 \
    "$folder/venv/bin/python" - <<'PY'
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

STEPS, MICRO_BATCHES = 5, 2


def waits(**keys):
    """Return how often the accelerator is waited for in each step's micro-batches."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        **keys,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=settings)
    accelerator = type(get_accelerator())
    plain, calls, found = accelerator.synchronize, 0, []

    def counted(*arguments, **named):
        nonlocal calls
        calls += 1
        return plain(*arguments, **named)

    accelerator.synchronize = counted
    try:
        for _ in range(STEPS):
            before = calls
            for _ in range(MICRO_BATCHES):
                engine.backward(engine(torch.ones(1, 4)).sum())
                engine.step()
            found.append(calls - before)
    finally:
        accelerator.synchronize = plain
    return found


usual, without = waits(), waits(timers={"throughput": {"enabled": False}})
print(f"calls of synchronize() a step of {MICRO_BATCHES} micro-batches: {usual} by default, {without} without the timer")
assert usual[2:] == [2 * MICRO_BATCHES] * (STEPS - 2), "the timer waits at other times now"
assert usual[:2] == [0, 0] and without == [0] * STEPS, "something else waits, too"
PY
