"""A script that calls the module inside its engine, evaluates by it, and then trains a pipeline of two stages."""

import time

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch.nn.functional import cross_entropy

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
WORDS = 32
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
}


def loss_of(output, target):
    return cross_entropy(output.view(-1, WORDS), target.view(-1))


def main():
    deepspeed.init_distributed("gloo")
    layers = [torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS)]
    model = torch.nn.Sequential(*layers)
    config = {**CONFIG, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}}  # updates while it starts
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for number, batch in enumerate(torch.utils.data.DataLoader(torch.randint(0, WORDS, (24, 16)), batch_size=4)):
        if number == 5:
            engine.eval()
            for held_out in torch.utils.data.DataLoader(torch.randint(0, WORDS, (12, 16)), batch_size=4):
                with torch.no_grad():
                    model(held_out)
                time.sleep(0.03)
            engine.train()
        loss = loss_of(model(batch), batch)
        time.sleep(0.3)
        engine.backward(loss)
        engine.step()
    engine.destroy()
    layers = [torch.nn.Embedding(WORDS, 8), torch.nn.Linear(8, WORDS)]
    pipeline = PipelineModule(layers, num_stages=2, loss_fn=loss_of)
    data = [(each, each) for each in torch.randint(0, WORDS, (64, 16))]
    config = {**CONFIG, "gradient_accumulation_steps": 4}
    engine = deepspeed.initialize(
        model=pipeline, model_parameters=pipeline.parameters(), training_data=data, config=config
    )[0]
    for _ in range(4):
        engine.train_batch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
