"""The training that is launched: a DeepSpeed engine on gloo that steps until it is ended, however its rank is told."""

import os
import sys
import time

import torch

for ours, slurms in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
    if slurms in os.environ:
        os.environ.setdefault(ours, os.environ[slurms])
os.environ.setdefault("MASTER_ADDR", os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
os.environ.setdefault("MASTER_PORT", "29500")

import deepspeed  # noqa: E402  it reads the environment


def main() -> None:
    steps = int(sys.argv[-1])  # DeepSpeed puts --local_rank before it
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 100_000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(steps):
        loss = engine(torch.randn(2, 32)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        time.sleep(0.1)
        if step % 10 == 0:
            print(f"step {step}", flush=True)


if __name__ == "__main__":
    main()
