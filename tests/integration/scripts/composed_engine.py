"""A DeepSpeed loop in bf16 for the composition of its peaks: ``composed_engine.py STAGE STEPS``; GPU or CPU."""

import sys
import time

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
STAGE, STEPS = int(sys.argv[1]), int(sys.argv[2])
ON_CPU = get_accelerator().device_name() == "cpu"
WIDTH, LAYERS = (512, 6) if ON_CPU else (2048, 12)


class Scaling(torch.nn.Module):
    """Has the parameters and keeps the activations of a linear layer, without its arithmetic: slow in bf16 on a CPU."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.bias = torch.nn.Parameter(torch.zeros(WIDTH))

    def forward(self, hidden):
        return torch.addcmul(self.bias, hidden, self.weight)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(1000, WIDTH)
        self.layers = torch.nn.ModuleList(
            [Scaling() if ON_CPU else torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        )

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = torch.nn.functional.gelu(layer(hidden))
        return hidden.float().pow(2).mean()


def main():
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": STAGE, "reduce_bucket_size": 1_000_000 if ON_CPU else 20_000_000},
        "steps_per_print": 10**9,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(STEPS):
        for _ in range(2):
            ids = torch.randint(0, 1000, (2, 512), device=engine.device)
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
        if step < 8:
            time.sleep(0.15)  # the first steps are looked at one after another, as the publisher finds time


if __name__ == "__main__":
    main()
