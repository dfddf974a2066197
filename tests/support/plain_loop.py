"""A plain DeepSpeed training loop that knows nothing of ftmon, as ``deepspeed plain_loop.py STEPS`` runs it."""

import sys

import deepspeed
import torch

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
STEPS = int(next(word for word in sys.argv[1:] if word.isdecimal()))

deepspeed.init_distributed()
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
engine, _, _, _ = deepspeed.initialize(
    model=model,
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    },
)
for micro_step in range(STEPS * 2):
    batch = torch.randn(4, 64, device=engine.device)
    loss = torch.nn.functional.mse_loss(engine(batch), batch)
    engine.backward(loss)
    engine.step()
    if micro_step % 2 and engine.global_rank == 0:
        print(f"script: step {micro_step // 2 + 1} loss {loss.item():.3f}")
