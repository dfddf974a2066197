"""Predicted memory beside measured peaks of real DeepSpeed steps on H200s, and beside what others estimate.

    python bench/predict.py --out results.json                       every configuration, every length
    python bench/predict.py --lengths 2 --only llama                 two lengths of each configuration of one family

``bench/data/h200_peaks.jsonl``: peaks of DeepSpeed 0.19.8 steps (torch 2.11, transformers 5.17, bf16), one line a rank
and configuration, one row a length; each phase's own ``allocated_bytes.all.peak``. Each rank that can differ is
predicted in a fork of one process that has imported the libraries, one length after the other with an emptied cache, as
they were measured. ``--out`` keeps every row and is read again: what
it holds is not predicted a second time.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

DATA = Path(__file__).with_name("data") / "h200_peaks.jsonl"
MIB = 1 << 20
PHASES = ("forward", "backward", "optimizer")
KEYS = (
    *("model", "world_size", "zero_stage", "micro_batch", "grad_accum", "gradient_checkpointing"),
    *("offload_optimizer", "lora_r", "attn", "adam", "expandable_segments"),
)
LLAMA = {"model_type": "llama", "num_attention_heads": 32}
MODELS: dict[str, dict[str, Any]] = {
    "qwen1.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **LLAMA, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        **LLAMA, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 4096},
    "llama-3-8b": {
        **LLAMA, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
}  # fmt: skip


def configurations() -> dict[str, list[dict[str, Any]]]:
    """Return the measured lines by configuration."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in DATA.read_text().splitlines():
        measured = json.loads(line)
        found.setdefault(json.dumps([measured[key] for key in KEYS]), []).append(measured)
    return found


def settings(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a measured line."""
    partition: dict[str, Any] = {"stage": measured["zero_stage"]}
    if measured["offload_optimizer"]:
        partition["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "bf16": {"enabled": True},
        "zero_optimization": partition,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": measured["adam"] == "torch"}},
    }


def predict(measured: dict[str, Any], lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Predict the ranks of one configuration that can differ, at some lengths."""
    from ftmon.protocol.analysis.allocator.settings import Settings
    from ftmon.trainer.predict import ranks
    from ftmon.trainer.predict.dry import DryRun, Job
    from ftmon.trainer.predict.result import read_config

    world = measured["world_size"]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(MODELS[measured["model"]], file)
        file.flush()
        job = Job(
            read_config(file.name),
            settings(measured),
            world,
            measured["micro_batch"],
            measured["grad_accum"],
            measured["gradient_checkpointing"],
            measured["lora_r"],
            allocator=Settings(expandable_segments=measured["expandable_segments"]),
        )
        found = ranks.run(
            lambda rank: DryRun(job, rank), ranks.differing(measured["zero_stage"], world), lengths, in_turn=True
        )
    for one in found.values():
        assert one.parameters == measured["params"], (one.parameters, measured["params"])
    for index, length in enumerate(lengths):
        outcomes = {rank: one.outcomes[index] for rank, one in found.items()}
        for one in ranks.every({rank: outcome.rank for rank, outcome in outcomes.items()}, world):
            yield {
                "seq_len": length,
                "rank": one.rank,
                "seconds": sum(outcome.seconds for outcome in outcomes.values()),
                **({"work": msgspec.to_builtins(outcomes[0].work)} if one.rank == 0 else {}),
                **{f"{name}_allocated": phase.allocated_peak_bytes for name, phase in one.phases.items()},
                **{f"{name}_reserved": phase.reserved_peak_bytes for name, phase in one.phases.items()},
            }


def estimator(measured: dict[str, Any]) -> int:
    """Return what ``deepspeed.runtime.zero`` estimates for a GPU (its formulas of stage 2 and stage 3, in bytes)."""
    parameters, ranks, offload = measured["params"], measured["world_size"], measured["offload_optimizer"]
    stage = measured["zero_stage"]
    if stage == 3:  # stage3.py, estimate_zero3_model_states_mem_needs, parameters on the GPU
        shape = MODELS[measured["model"]]
        largest = 2 * 2 * shape["vocab_size"] * shape["hidden_size"] if "hidden_size" in shape else 4 * 50257 * 1024
        return largest + (2 if offload else 18) * parameters // ranks
    # stage_1_and_2.py, estimate_zero2_model_states_mem_needs
    return 2 * parameters + (0 if offload else 18 * parameters // ranks)


def estimates(measured: dict[str, Any]) -> dict[str, int]:
    """Return what others estimate for a GPU, in bytes; none of them asks for a length."""
    found = {"DeepSpeed's estimator": estimator(measured)}
    for dtype, size in accelerate_estimate(measured["model"]).items():
        found[f"accelerate estimate-memory, {dtype}"] = size
    return found


@cache
def accelerate_estimate(model: str) -> dict[str, int]:
    """Return what ``accelerate estimate-memory`` calls the peak of training with Adam, in bytes, by its data types."""
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(MODELS[model])
    with init_empty_weights():
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    size, _ = calculate_maximum_sizes(made.float())
    return {dtype: max(estimate_training_usage(size, dtype).values()) for dtype in ("float32", "float16")}


def chosen(lengths: list[int], most: int) -> list[int]:
    """Return at most so many lengths, the longest first."""
    ordered = sorted(lengths, reverse=True)
    if most == 0 or len(ordered) <= most:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / max(1, most - 1))] for i in range(most)]


def rows(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Pair each measured row with its prediction."""
    for key, lines in configurations().items():
        predicted = {(row["seq_len"], row["rank"]): row for row in found.get(key, [])}
        for line in lines:
            for row in line["rows"]:
                at = (row["seq_len"], line["rank"])
                if at in predicted and row["allocated_start_mib"] != line["after_init_allocated_mib"]:
                    yield line, row, predicted[at]


def table(found: dict[str, Any]) -> None:
    """Print errors by phase: median, worst, share under 1 % and 5 %; the worst rows; the estimator's."""
    errors: dict[str, list[tuple[float, str]]] = {}
    for line, row, predicted in rows(found):
        name = " ".join(
            [line["model"], f"{line['world_size']}x", f"ZeRO-{line['zero_stage']}", f"batch {line['micro_batch']}"]
            + ["ckpt"] * line["gradient_checkpointing"] + ["offload"] * line["offload_optimizer"]
            + ["LoRA"] * bool(line["lora_r"]) + [line["adam"], f"rank {line['rank']}", f"{row['seq_len']} tokens"]
        )  # fmt: skip
        highest = 0.0
        for phase in PHASES:
            for kind in ("allocated", "reserved"):
                real = row[f"{phase}_{kind}_peak_mib"]
                errors.setdefault(f"{phase} {kind}", []).append(
                    (predicted[f"{phase}_{kind}"] / MIB / real - 1, f"{name}: {real} MiB")
                )
            highest = max(highest, row[f"{phase}_allocated_peak_mib"])
        ours = max(predicted[f"{phase}_allocated"] for phase in PHASES) / MIB
        errors.setdefault("highest allocated", []).append((ours / highest - 1, name))
        for peer, size in estimates(line).items():
            errors.setdefault(peer, []).append((size / MIB / highest - 1, name))
        init = predicted["init_allocated"] / MIB / line["after_init_peak_mib"] - 1
        errors.setdefault("init allocated", []).append((init, name))
    print("| phase | rows | median | worst | under 1 % | under 5 % |\n| --- | --- | --- | --- | --- | --- |")
    for name, values in errors.items():
        sizes = [abs(value) for value, _ in values]
        worst = max(values, key=lambda pair: abs(pair[0]))
        print(
            f"| {name} | {len(sizes)} | {statistics.median(sizes):.2%} | {worst[0]:+.2%} | "
            f"{sum(s < 0.01 for s in sizes) / len(sizes):.0%} | {sum(s < 0.05 for s in sizes) / len(sizes):.0%} |"
        )
    for name, values in errors.items():
        if name.endswith("allocated"):
            for value, what in sorted(values, key=lambda pair: -abs(pair[0]))[:4]:
                print(f"{name}: {value:+.2%} {what}")


def main() -> None:
    """Predict what is missing in ``--out``, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("predict.json"))
    parser.add_argument("--lengths", type=int, default=0, help="at most so many of a configuration; 0: all")
    parser.add_argument("--only", default="", help="configurations whose key contains this")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    if not args.table:
        from ftmon.trainer.predict import ranks

        ranks.warm(["peft", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen2"))])
        for key, lines in configurations().items():
            have = {row["seq_len"] for row in found.get(key, [])}
            lengths = [row["seq_len"] for row in lines[-1]["rows"]]
            missing = [length for length in chosen(lengths, args.lengths) if length not in have]
            if args.only in key and missing:
                rows_found = list(predict(lines[0], missing))
                found.setdefault(key, []).extend(rows_found)
                args.out.write_text(json.dumps(found))
                print(key, missing, f"{sum(row['seconds'] for row in rows_found if not row['rank']):.0f} s", flush=True)
    table(found)


if __name__ == "__main__":
    sys.exit(main())
