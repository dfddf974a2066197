"""A plain DeepSpeed loop that knows nothing of ftmon: the script under observation of the GPU measurements.

    deepspeed --num_gpus 2 bench/gpu/loop.py --model qwen-0.5b --stage 2 --seq 1024 --steps 200 --out result.json

``--by-hand`` resets PyTorch's peak counters at the start of every phase and notes the phase's own peak at its end: what
an independent measurement gives. ``--out`` receives, from each rank, step times, peaks and the script's own view of the
counters, as JSON in a file with ``.rankN`` appended.
"""

import argparse
import json
import os
import time
from pathlib import Path

MODELS = {
    "qwen-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "use_cache": False,
    },
    # Eight wide layers: 50 ms of device time a step at 2 x 2048 tokens, and less host time than that.
    "llama-0.7b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "use_cache": False,
    },
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "use_cache": False,
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen-0.5b")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--block", type=int, default=20, help="steps between two synchronisations")
    parser.add_argument("--by-hand", action="store_true")
    parser.add_argument(
        "--foreach-adam", action="store_true", help="torch's AdamW with foreach, not DeepSpeed's FusedAdam"
    )
    parser.add_argument(
        "--torch-adam", action="store_true", help="torch's AdamW as DeepSpeed makes it: nothing to compile"
    )
    parser.add_argument("--offload", action="store_true", help="optimizer states and updates on the CPU")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again in the backward")
    parser.add_argument("--hang-rank", type=int, default=-1, help="this rank stops before its step --hang-step")
    parser.add_argument("--hang-step", type=int, default=20)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    deepspeed.init_distributed()
    torch.manual_seed(0)
    fields = dict(MODELS[args.model])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(f"cuda:{local_rank}"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    settings = {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.stage},
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
    }
    options = {}
    if args.foreach_adam:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
        settings["zero_allow_untested_optimizer"] = True
    else:
        settings["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": args.torch_adam}}
    if args.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        settings["zero_force_ds_cpu_optimizer"] = False
    engine, _, _, _ = deepspeed.initialize(model=model, config=settings, **options)

    samples = torch.randint(0, 32000, (args.steps * args.accumulation * args.micro_batch, args.seq))
    batches = iter(torch.utils.data.DataLoader(samples, batch_size=args.micro_batch))
    peaks: dict[str, list[int]] = {}

    def mark(phase: str | None) -> None:
        if not args.by_hand:
            return
        torch.cuda.synchronize()
        if phase is not None:
            peaks.setdefault(phase, []).append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()

    step_ms: list[float] = []
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for step in range(1, args.steps + 1):
        if step == args.hang_step and torch.distributed.get_rank() == args.hang_rank:
            while True:
                time.sleep(1)
        for _ in range(args.accumulation):
            tokens = next(batches).to(local_rank)
            mark(None)
            loss = engine(input_ids=tokens, labels=tokens).loss
            mark("forward")
            engine.backward(loss)
            mark("backward")
            engine.step()
            mark("optimizer")
        if step % args.block == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            step_ms.append((now - begun) * 1000 / args.block)
            begun = now
    result = {
        "step_ms": step_ms,
        "peaks": peaks,
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
    }
    if args.out:
        args.out.with_name(f"{args.out.name}.rank{torch.distributed.get_rank()}").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
