"""A DeepSpeed script that makes process group, optimizer and configuration in code; knows no ftmon. argv: a model."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

dist.init_process_group("nccl", rank=0, world_size=1)
torch.cuda.set_device(dist.get_rank())
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000, "allgather_bucket_size": 1000000},
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)
for _ in range(3):
    tokens = torch.randint(0, 100, (4, 64), device=engine.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
