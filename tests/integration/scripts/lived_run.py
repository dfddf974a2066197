"""A loop (a small Llama, DeepSpeed, the recipe's Monitor) that reports all there is in a run's life."""

import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from ftmon.protocol.host.machine import causal_pairs
from ftmon.trainer.recipe.monitor import activity, probe
from transformers import LlamaConfig, LlamaForCausalLM

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # its build takes a minute; for inference only
STEPS, EVERY = int(os.environ.get("STEPS", "20")), int(os.environ.get("EVERY", "8"))
LENGTHS = [5, 11]


def batch():
    ids = torch.randint(0, 16, (1, sum(LENGTHS)))
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    first = torch.distributed.get_rank() == 0
    probe().plan(STEPS, 2.0, sys.argv[-1], evaluate_every=EVERY, evaluate_at_end=True, checkpoint_every=2 * EVERY)

    def update():
        for _ in range(2):
            with probe().phase("data"):
                found = batch()
            probe().micro_batch(sum(LENGTHS), sum(LENGTHS) - len(LENGTHS), causal_pairs(LENGTHS), max(LENGTHS))
            engine.backward(engine(**found).loss)
            engine.step()

    with probe().rehearsal(), activity("rehearsal", "the longest batch", total=2) as progress:
        for part in range(2):
            update()
            progress.report(part + 1)
        engine.global_steps = 0
    for step in range(1, STEPS + 1):
        update()
        if step % EVERY == 0 or step == STEPS:
            begun = time.monotonic()
            with probe().phase("eval"), torch.no_grad(), activity("evaluation", total=1):
                engine.eval()
                loss = float(engine(**batch()).loss)
                time.sleep(0.2)
                engine.train()
            if first:
                spent = time.monotonic() - begun
                probe().evaluation(loss, name="validation", label_tokens=28, seconds=spent, best=step == EVERY)
        if step % (2 * EVERY) == 0:
            with probe().phase("checkpoint"):
                path = Path(sys.argv[-1]) / f"step-{step}"
                if first:
                    path.mkdir(parents=True)
                    (path / "weights").write_bytes(b"x" * 100)
                    probe().checkpoint(str(path), size=100, seconds=0.1)
    print("done", flush=True)


if __name__ == "__main__":
    main()
