"""The training that is struck: two ranks on gloo that note their own pids, and the time of each of their steps."""

import json
from pathlib import Path

STEP_SECONDS = 0.05
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
open(os.path.join(sys.argv[1], f"pid-{rank}"), "w").write(str(os.getpid()))
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
out = open(os.path.join(sys.argv[1], f"steps-{rank}"), "w", buffering=1)
rows = torch.ones(4, 16)
step = 0
while True:
    step += 1
    loss = model(rows).pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
    out.write(json.dumps([step, time.time()]) + "\\n")
"""


def own_steps(folder: Path, rank: int) -> list[tuple[int, float]]:
    """Read what a rank noted: its steps, and when each was done."""
    lines = (folder / f"steps-{rank}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines if line.endswith("]")]


def steps_done(folder: Path, rank: int) -> int:
    """Count the steps that a rank noted."""
    return (folder / f"steps-{rank}").read_bytes().count(b"\n")
