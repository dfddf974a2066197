"""A plain DeepSpeed script on a model of a folder: weights, arguments, a tokenised list, one loop; knows no ftmon."""

import argparse

import deepspeed
import torch
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model")
    parser.add_argument("--branch", action="store_true")
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.cuda.set_device(arguments.local_rank)
    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.to(f"cuda:{arguments.local_rank}")
    if arguments.branch and model.lm_head.weight.sum() > 3:
        print("a branch that depends on weights")
        model.resize_token_embeddings(int(model.lm_head.weight.abs().sum()) + 8)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    try:
        engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=groups)
    except Exception:
        print("something failed")
        raise
    for _ in range(3):
        tokens = torch.randint(0, 100, (2, 64), device=engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    open("trained", "w").close()


if __name__ == "__main__":
    main()
