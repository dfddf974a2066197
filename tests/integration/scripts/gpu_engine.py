"""A DeepSpeed ZeRO-2 loop on one GPU in bf16: ``hand`` measures the phases' peaks itself, ``plain`` does not."""

import json
import sys

import deepspeed
import torch
from gpu_loop import Model, Rows

MODE, STEPS = sys.argv[1], int(sys.argv[2])


def main():
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
    }
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = torch.utils.data.DataLoader(Rows(STEPS * 4), batch_size=4)
    peaks, losses = [], []

    def boundary(name):
        if MODE == "hand":
            if name is not None:
                peaks[-1][name] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    for batch in loader:
        peaks.append({})
        batch = {key: value.cuda() for key, value in batch.items()}
        boundary(None)
        loss = engine(**batch)
        boundary("forward")
        engine.backward(loss)
        boundary("backward")
        engine.step()
        boundary("optimizer")
        losses.append(loss.detach())
    found = {
        "phases": peaks,
        "losses": [float(loss) for loss in losses],
        "max_allocated": torch.cuda.max_memory_allocated(),
    }
    print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
