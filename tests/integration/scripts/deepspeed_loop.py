"""A plain DeepSpeed loop that knows nothing of ftmon: a small model, ZeRO-2, gradient accumulation.

It sleeps ``PAUSE`` seconds a micro-batch. With ``CLIP``, 12 steps without ZeRO come first, for which it prints the norm
of the gradients: DeepSpeed clips it to ``CLIP`` and, from step 7 on, the script.
"""

import gc
import os
import time
import weakref

import deepspeed
import torch
from torch.utils.data import DataLoader

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
STEPS = int(os.environ.get("STEPS", "4"))
ACCUMULATION = 2
CLIP = float(os.environ.get("CLIP", "0"))
PAUSE = float(os.environ.get("PAUSE", "0"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.head = torch.nn.Linear(32, 64)

    def forward(self, input_ids, attention_mask):
        logits = self.head(self.embed(input_ids)) * attention_mask[..., None]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


def collate(rows):
    ids = torch.stack(rows)
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def train(stage, steps, clip=0.0):
    torch.manual_seed(0)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": clip,
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = DataLoader(list(torch.randint(0, 64, (steps * ACCUMULATION * 2, 8))), batch_size=2, collate_fn=collate)
    for batch in loader:
        time.sleep(PAUSE)
        loss = engine(**batch)
        engine.backward(loss)
        if clip and engine.is_gradient_accumulation_boundary():
            norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm().item()
            print("norm", norm, flush=True)
            if engine.global_steps == 6:
                engine._config.gradient_clipping = 0.0
            if engine.global_steps >= 6:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        engine.step()
        print("loss", float(loss.detach()), flush=True)
    engine.eval()
    with torch.no_grad():
        engine(**next(iter(loader)))
    return weakref.ref(model)


if __name__ == "__main__":
    if CLIP:
        first = train(0, 12, CLIP)
        for _ in range(1000):  # the probe's thread may hold it for a moment
            gc.collect()
            if first() is None:
                break
            time.sleep(0.01)
    train(int(os.environ.get("STAGE", "2")), STEPS)
