"""Under ZeRO-3: loads and edits that are lost, and micro-batches that an accumulation leaves over."""

import tempfile

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import GatheredParameters
from torch.utils.data import DataLoader

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 3},
    },
)
with tempfile.TemporaryDirectory() as folder:
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder, load_module_only=True)
data = torch.ones(6, 4)
for epoch in range(3):  # 4 of 6 micro-batches, then 2 + 2 and 4, then none is left; the last one has too many
    for row in DataLoader(data if epoch < 2 else torch.ones(7, 4), batch_size=1):
        engine.backward(engine(row).mean())
        engine.step()
    with GatheredParameters(list(engine.module.parameters()), modifier_rank=0 if epoch else None):
        if epoch < 2:
            engine.module[epoch].weight.data.fill_(7.0)
engine.backward(engine(torch.ones(1, 4)).mean())  # no batch of the training
