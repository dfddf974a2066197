"""Sound trainings of 2,000 steps, of which no alert may be raised: ``python bench/clean_runs.py [NAME ...]``.

Prints, for each, its steps and the alerts of severity ``warning`` and ``error``, then how many runs had none.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ftmon.protocol.recording.reader import Reader

STEPS = 2000
TORCHRUN = ("torchrun", "--nproc-per-node")
RUNS: dict[str, tuple[int, dict[str, object]]] = {
    **{f"deepspeed-{stage}-{dtype}": (1, {"kind": "deepspeed", "stage": stage, "dtype": dtype})
       for stage in (1, 2, 3) for dtype in ("fp32", "bf16")},
    "deepspeed-0-fp32": (1, {"kind": "deepspeed", "stage": 0, "dtype": "fp32"}),
    "deepspeed-2-accumulates": (1, {"kind": "deepspeed", "stage": 2, "dtype": "bf16", "accumulation": 4}),
    "deepspeed-2-ranks": (2, {"kind": "deepspeed", "stage": 2, "dtype": "fp32"}),
    "trainer": (0, {"kind": "trainer"}),
    "trainer-accumulates": (0, {"kind": "trainer", "accumulation": 4}),
    "trainer-evaluates": (0, {"kind": "trainer", "evaluate": True}),
    "trainer-lora": (0, {"kind": "trainer", "lora": True}),
    "ddp": (2, {"kind": "ddp"}),
    "ddp-warm-up": (2, {"kind": "ddp", "warm_up": 500}),
    "ddp-evaluates": (2, {"kind": "ddp", "evaluate": True}),
    "ddp-accumulates": (2, {"kind": "ddp", "accumulation": 4}),
    "packed": (0, {"kind": "plain", "packed": True}),
    "packed-ddp": (2, {"kind": "ddp", "packed": True}),
    "lora": (0, {"kind": "plain", "lora": True}),
    "labels-in-the-loop": (0, {"kind": "plain", "accumulation": 4, "late": True}),
}  # fmt: skip
"""By name: the ranks (0: without a launcher), and the arguments of ``train``."""


def train(*, kind: str, steps: int = STEPS, stage: int = 0, dtype: str = "fp32", accumulation: int = 1,
          warm_up: int = 20, evaluate: bool = False, packed: bool = False, lora: bool = False,
          late: bool = False) -> None:  # fmt: skip
    """Train a small model on random rows with labels (``late``: made in the loop), ends and padding."""
    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                         vocab_size=64, eos_token_id=3, pad_token_id=0, use_cache=False)  # fmt: skip
    model = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))

    def row(_: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, 64, (16,))
        ids[7] = ids[12] = 3
        mask = torch.ones(16, dtype=torch.long)
        if packed:
            return {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(8).repeat(2)}
        mask[13:] = 0
        labels = torch.where(mask == 1, ids, -100)
        labels[:4] = -100
        if late:
            return {"input_ids": torch.where(mask == 1, ids, 0), "attention_mask": mask}
        return {"input_ids": torch.where(mask == 1, ids, 0), "labels": labels, "attention_mask": mask}

    data = [row(place) for place in range(4 * 200 * accumulation)]
    if kind == "trainer":
        from transformers import Trainer, TrainingArguments

        more = {"eval_strategy": "steps", "eval_steps": 200} if evaluate else {}
        arguments = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=steps, report_to=[],
                                      gradient_accumulation_steps=accumulation, warmup_steps=warm_up, use_cpu=True,
                                      logging_steps=500, save_strategy="no", **more)  # fmt: skip
        Trainer(model, arguments, train_dataset=data, eval_dataset=data[:40]).train()
        return
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / warm_up, (steps - step) / 200))
    engine = None
    if kind == "deepspeed":
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config={
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation,
            "zero_allow_untested_optimizer": True, "steps_per_print": 10**9, "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": {"stage": stage}})  # fmt: skip
    elif kind == "ddp":
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    model.train()
    done = micro_steps = 0
    sampler: Any = DistributedSampler(data) if torch.distributed.is_initialized() else None  # pyright: ignore
    while done < steps:
        for batch in DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None):
            if late:
                batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)
            if engine is not None:
                engine.backward(engine(**batch).loss)
                engine.step()
                micro_steps += 1
                done = micro_steps // accumulation
            else:
                (model(**batch).loss / accumulation).backward()
                micro_steps += 1
                if micro_steps % accumulation == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    done += 1
                    if evaluate and done % 200 == 0:
                        model.eval()
                        with torch.no_grad():
                            for rows in DataLoader(data[:40], batch_size=4):
                                model(**rows)
                        model.train()
            if done >= steps:
                break


def watch(name: str) -> list[str]:
    """Run one training under ftmon; return its alerts."""
    ranks, settings = RUNS[name]
    launcher = [*TORCHRUN, str(ranks)] if ranks else [sys.executable]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "FTMON_HOME": home, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        command = ["ftmon", "run", "--plain", "--", *launcher, __file__, "--train", json.dumps(settings)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (recording,) = Path(home).glob("runs/*/recording.sqlite")
        with Reader(recording) as reader:
            steps = reader.info().last_step
            alerts = [f"{one.severity}: {one.title}" for one in reader.alerts() if one.severity != "info"]
    if ended.returncode:
        alerts.append(f"exit {ended.returncode}: {ended.stdout[-600:]}{ended.stderr[-600:]}")
    print(f"{name:<26} {steps:>6} steps  " + ("; ".join(alerts) or "no alert"), flush=True)
    return alerts


def main() -> int:
    """Run the trainings named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []])
    parser.add_argument("--train", type=json.loads)
    arguments = parser.parse_args()
    if arguments.train is not None:
        train(**arguments.train)
        return 0
    names = arguments.names or list(RUNS)
    clean = sum(not watch(name) for name in names)
    print(f"{clean} of {len(names)} runs without an alert")
    return clean != len(names)


if __name__ == "__main__":
    sys.exit(main())
