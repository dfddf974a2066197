"""How fast the trainer is: tokens/s, MFU and peaks of the rows of a table, beside TRL's SFTTrainer on the same text.

    python bench/gpu/train_speed.py --out speed.json [--rows 0.5b,1.2b] [--trl] [--predict] [--steps 120] [--repeat 3]

For each row a folder with random weights and a tokenizer is written once; ftmon and TRL load the same weights and read
the same documents. Runs take turns. Each is watched by ftmon, so step times, tokens and peaks come from the same probe:
the first ``WARM`` steps are left out. ``--predict`` has ``ftmon predict --data`` tell the time of each row once its run
has ended, without a GPU; compiled rows are refused. ``--tiny`` shrinks every model, to try the script itself on a CPU.
Figures are those of rank 0, so tokens/s are those of one GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ftmon.protocol.host.machine import peak_flops
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir
from train_rows import ROWS, SEED, Row, documents, folder_of, overrides, prepare, shrunk

FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
HERE = Path(__file__).resolve()
WARM = 20
DEFAULT_ROWS = 32
"""Rows of a step, where the trainer chooses."""
PHASES = ("forward", "backward", "optimizer")


def deepspeed_for_trl(bucket: int) -> dict[str, Any]:
    """Return the configuration that ftmon makes of ``zero.stage=3``, as the Hugging Face integration takes it."""
    return {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def by_ftmon(name: str, row: Row, folder: Path, data: Path, steps: int, tiny: bool) -> list[str]:
    return [*FTMON, "train", "--plain", "--name", name, *overrides(row, folder, data, steps, tiny)]


def predicted(row: Row, folder: Path, data: Path, steps: int, tiny: bool) -> dict[str, Any]:
    """Return the time and peaks that are predicted of a row, or why they are not."""
    words = [*overrides(row, folder, data, steps, tiny), "run.device=cuda"]
    done = subprocess.run(
        [*FTMON, "predict", "--data", "--json", *words],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return {"refused": done.stderr.splitlines()[-1:]}
    (point,) = json.loads(done.stdout)["points"]
    ranks = [
        {phase: rank["phases"][phase]["allocated_peak_bytes"] / (1 << 30) for phase in PHASES}
        for rank in sorted(point["ranks"], key=lambda rank: rank["rank"])
    ]
    time = point["time"]
    return {
        "step_ms": round(point["step_seconds"] * 1e3, 1),
        "error": round(time["total"]["error"], 2),
        "bound_by": time["bound_by"],
        "peak_gib": {phase: round(max(rank[phase] for rank in ranks), 3) for phase in PHASES},
        "peak_gib_by_rank": [{phase: round(peak, 4) for phase, peak in rank.items()} for rank in ranks],
    }


def by_trl(name: str, key: str, row: Row, folder: Path, data: Path, steps: int, tiny: bool) -> list[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.gpus}"]
    words = ["--trl-rank", key, "--folder", str(folder), "--data", str(data), "--steps", str(steps)]
    return [*FTMON, "run", "--plain", "--name", name, "--", *launch, str(HERE), *words, *(["--tiny"] if tiny else [])]


def trl_rank(row: Row, folder: Path, data: Path, steps: int, tiny: bool) -> None:
    """Train with TRL as far tuned as it goes without FlashAttention: bf16 weights, Liger's kernels, fused AdamW.

    Rows are cut from the joined text ("wrapped"): its default packing makes a batch one row, for FlashAttention.
    """
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_length": row.length,
        "packing": True,
        "packing_strategy": "wrapped",
        "use_liger_kernel": not tiny,
        "per_device_train_batch_size": row.micro_batch,
        "max_steps": steps,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": not tiny,
        "use_cpu": tiny,
        "logging_steps": 20,
        "save_strategy": "no",
        "report_to": [],
        "seed": SEED,
        **(row.trl or {}),
    }
    if "zero.stage=3" in row.words:  # else DistributedDataParallel on several GPUs
        from ftmon.trainer.recipe.config.schema import Zero

        options["deepspeed"] = deepspeed_for_trl(Zero().bucket_bytes // 2)
    args = SFTConfig(**options)  # first: with it the integration knows that weights are to be partitioned as they load
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if tiny else torch.bfloat16),
        args=args,
        train_dataset=datasets.load_dataset("json", data_files=str(data), split="train"),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=row.lora, target_modules="all-linear", task_type="CAUSAL_LM") if row.lora else None,
    )
    trainer.train()


def figures(name: str, tokens_per_step: int, begun: float) -> dict[str, Any]:
    """Return what a run's recording says of its steps after the first ``WARM``; ``begun``: when its command was."""
    run = rundir.find(name)
    every: dict[int, list[Step]] = {}
    with Reader(run.recording) as reader:
        after = 0
        while frames := reader.frames(after, 5000):
            after = frames[-1].seq
            for step in (frame.message for frame in frames if isinstance(frame.message, Step)):
                every.setdefault(step.rank, []).append(step)
    steps = every[0]
    timed = [step for step in steps if step.step > WARM] or steps
    seconds = timed[-1].started - timed[0].started
    counted = sum(step.tokens for step in timed[:-1])
    wait = sum(record.host_us for step in timed for record in step.phases if record.name == "data")
    flops = sum(step.flops for step in timed[:-1])
    device = device_name()
    peak = peak_flops(device, "bf16")
    return {
        "steps": len(timed),
        "first_step_s": round(steps[0].started + steps[0].host_us / 1e6 - begun, 1),
        "tokens_per_s": round(counted / seconds) if seconds else None,
        "padded": round(1 - counted / (tokens_per_step * (len(timed) - 1)), 4) if len(timed) > 1 else None,
        "mfu": round(flops / seconds / peak, 4) if peak and seconds else None,
        "step_ms": round(statistics.median(step.host_us for step in timed) / 1e3, 2),
        "phases_ms": phases(timed),
        "data_share": round(wait / sum(step.host_us for step in timed), 4),
        "peak_gib": peaks(timed),
        "peak_gib_by_rank": [peaks(steps[1:]) for _, steps in sorted(every.items())],
        "losses": [round(step.loss, 4) for step in steps[19::20] if step.loss is not None],
        "device": device,
    }


def phases(steps: list[Step]) -> dict[str, list[float | None]]:
    """Return the median time of each phase in a step: on the host, and on the device where that is known; in ms."""
    host: dict[str, list[float]] = {}
    device: dict[str, list[float]] = {}
    for step in steps:
        for record in step.phases:
            host.setdefault(record.name, []).append(record.host_us / 1e3)
            if record.device_us is not None:
                device.setdefault(record.name, []).append(record.device_us / 1e3)
    return {
        name: [
            round(statistics.median(times), 2),
            round(statistics.median(device[name]), 2) if name in device else None,
        ]
        for name, times in host.items()
    }


def peaks(steps: list[Step]) -> dict[str, float]:
    """Return the highest peak of each phase, in GiB."""
    found: dict[str, int] = {}
    for record in (record for step in steps for record in step.phases):
        found[record.name] = max(found.get(record.name, 0), record.peak_span.peak)
    return {name: round(peak / (1 << 30), 4) for name, peak in found.items()}


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--repeat", type=int, default=1, help="0 only writes the weights")
    parser.add_argument("--work", type=Path, help="folder of weights and documents; those of an earlier call are used")
    parser.add_argument("--trl", action="store_true", help="also TRL's SFTTrainer, tuned")
    parser.add_argument("--predict", action="store_true", help="also ftmon predict --data")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prepare", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--trl-rank", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = {key: shrunk(row) if given.tiny else row for key, row in ROWS.items()}
    if given.prepare:
        prepare(rows[given.prepare], given.folder, given.data)
        return 0
    if given.trl_rank:
        trl_rank(rows[given.trl_rank], given.folder, given.data, given.steps, given.tiny)
        return 0
    results: list[dict[str, Any]] = []
    work = given.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    for key in given.rows.split(","):
        row = rows[key]
        rows_by_rank = {
            "ftmon": DEFAULT_ROWS // row.gpus if row.defaults else row.micro_batch,
            "trl": row.micro_batch * (row.trl or {}).get("gradient_accumulation_steps", 1),
        }
        tokens_per_step = {who: count * row.length for who, count in rows_by_rank.items()}
        data = work / f"{key}.jsonl"
        documents(data, max(tokens_per_step.values()) * row.gpus * (given.steps + 10), row.chats)
        folder = folder_of(work, row)
        if not (folder / "tokenizer.json").exists():
            child = [sys.executable, str(HERE), "--prepare", key, "--folder", str(folder), "--data", str(data)]
            subprocess.run([*child, *(["--tiny"] if given.tiny else [])], check=True)
        for turn in range(given.repeat):
            runs = {"ftmon": by_ftmon(f"{key}-ftmon-{turn}", row, folder, data, given.steps, given.tiny)}
            if given.trl and row.trl is not None:
                runs["trl"] = by_trl(f"{key}-trl-{turn}", key, row, folder, data, given.steps, given.tiny)
            for who, command in runs.items():
                begun = time.time()
                done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
                result: dict[str, Any] = {"row": key, "by": who, "turn": turn, "status": done.returncode}
                if done.returncode:
                    result["output"] = done.stdout.splitlines()[-15:]
                else:
                    result["said"] = done.stdout.splitlines()[:40] if who == "ftmon" else []
                    result |= figures(f"{key}-{who}-{turn}", tokens_per_step[who], begun)
                    if given.predict and who == "ftmon":
                        result["predicted"] = predicted(row, folder, data, given.steps, given.tiny)
                results.append(result)
                print(json.dumps(result), flush=True)
                if given.out:
                    given.out.write_text(json.dumps(results, indent=1))
    return int(any(result["status"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
