"""A policy that trains beside models that do not, as in DPO; it knows nothing of ftmon.

First it runs in DDP, then another one in an engine. Every step does something else with the frozen
models; after the third one there is an evaluation, which goes back to training through the wrapped module alone, as
Lightning does. Prints its own times as one line of JSON a step.
"""

import copy
import gc
import json
import time

import deepspeed
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group("gloo")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, rows):
        time.sleep(0.03)
        return self.layer(rows)


def engine_of(model, **extra):
    config = {"train_micro_batch_size_per_gpu": 4, **extra}
    engine = deepspeed.initialize(model=model, config=config)[0]
    if not extra.get("optimizer"):
        engine.eval()  # returns None
    return engine


def forward(model, rows, phase="forward"):
    before = time.perf_counter()
    found = model(rows)
    spent[phase] += time.perf_counter() - before
    return found


def train(in_ddp):
    global spent
    raw = Net()
    frozen = copy.deepcopy(raw)
    if in_ddp:
        policy = DistributedDataParallel(raw)
        optimizer = torch.optim.SGD(policy.parameters(), lr=1e-2)
    else:
        policy = engine_of(raw, optimizer={"type": "SGD", "params": {"lr": 1e-2}})
    references = {
        "parallel": DistributedDataParallel(copy.deepcopy(frozen)).eval(),
        "engine": engine_of(copy.deepcopy(frozen), zero_optimization={"stage": 0}),
        "plain": frozen.eval(),
    }
    held_out = torch.utils.data.DataLoader(torch.randn(12, 16), batch_size=4)
    for step, rows in enumerate(torch.utils.data.DataLoader(torch.randn(32, 16), batch_size=4), 1):
        kind = ("parallel", "engine", "plain", "parallel", "engine", "self", "self_eval", "before")[step - 1]
        with torch.no_grad():
            if kind == "self":  # a LoRA policy without its adapters
                forward(policy, rows)
            if kind == "self_eval":
                policy.eval()
                forward(policy, rows)
                policy.train()
            if kind == "before":
                forward(references["parallel"], rows)
        found = forward(policy, rows)
        with torch.no_grad():
            wanted = forward(references[kind], rows) if kind in references else rows
        loss = (found - wanted).pow(2).mean()
        if in_ddp:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            policy.backward(loss)
            policy.step()
        print(json.dumps({"kind": kind, "loss": loss.item(), **spent}), flush=True)
        spent = dict.fromkeys(spent, 0.0)
        if step == 3:
            policy.eval()
            for rows in held_out:
                with torch.no_grad():
                    forward(references["parallel"], rows, "eval")
                    forward(policy, rows, "eval")
            policy.module.train()


spent = {"forward": 0.0, "eval": 0.0}
for in_ddp in (True, False):
    train(in_ddp)
    gc.collect()
dist.destroy_process_group()
