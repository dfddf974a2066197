"""Records what PyTorch's allocator does on a GPU and holds the allocator's model against it.

    python bench/gpu/allocator_traces.py --out traces            all of it: some 70 traces, 15 minutes on one H200
    python bench/gpu/allocator_traces.py --out traces --only random
    python bench/gpu/allocator_traces.py --check traces          compares only, needs no GPU

Random programs (sizes, streams, ``record_stream``, ``empty_cache``, a memory limit) run with six allocator settings,
and models under DeepSpeed's ZeRO stages 0 to 3 with both kinds of segments. Each trace becomes a gzip-compressed pickle
in the format of ``torch.cuda.memory._snapshot()`` without stacks, with a JSON file beside it that says how it was made.
Exit status 0 where every trace has the recorded segments exactly and reserved bytes within 2 % at every moment.
"""

import argparse
import gc
import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
SETTINGS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "split64": "max_split_size_mb:64",
    "divisions": "roundup_power2_divisions:[1:8,64:4,>:2]",
    "collect": "garbage_collection_threshold:0.6",
    "expandable-divisions": "expandable_segments:True,roundup_power2_divisions:4",
}
LIMITED = ("native", "expandable", "split64", "collect")
"""Settings that are also run with a limit which random programs reach."""
LIMIT_MIB = 2048
SEEDS = 4
MODELS: dict[str, dict[str, Any]] = {
    "llama-0.1b": {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
        "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "use_cache": False,
    },
    "qwen-0.3b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
        "use_cache": False,
    },
    "gpt2-0.1b": {
        "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 8, "n_head": 12, "n_positions": 2048,
        "use_cache": False,
    },
}  # fmt: skip
LENGTHS = (700, 1024, 333)


# Recording, in a process for each setting --------------------------------------------------------------------------


def record(out: Path, kind: str, which: str) -> None:
    """Run and record all cases of one allocator setting; the process was started with it."""
    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    total = torch.cuda.mem_get_info()[1]
    if which == "random":
        for limited in (False, True) if kind in LIMITED else (False,):
            share = LIMIT_MIB * MIB / total if limited else 1.0
            for seed in range(SEEDS):
                name = f"random-{kind}{'-limited' if limited else ''}-{seed}"
                _recorded(
                    out, name, kind, share, total, lambda seed=seed, limited=limited: _random_program(seed, limited)
                )
        return
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29611")
    import deepspeed

    deepspeed.init_distributed()
    for model in MODELS:
        for stage in range(4):
            name = f"{model}-zero{stage}-{kind}"
            _recorded(out, name, kind, 1.0, total, lambda model=model, stage=stage: _train(model, stage, False))
        name = f"{model}-zero2-checkpointing-{kind}"
        _recorded(out, name, kind, 1.0, total, lambda model=model: _train(model, 2, True))
    torch.distributed.destroy_process_group()


def _recorded(out: Path, name: str, kind: str, share: float, total: int, program: Any) -> None:
    """Run a program under the allocator's recorder and write the snapshot."""
    import torch

    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=2_000_000)
    try:
        program()
        torch.cuda.synchronize()
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    peaks = {
        "allocated_peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
    }
    gc.collect()
    with gzip.open(out / f"{name}.pickle.gz", "wb", compresslevel=9) as file:
        pickle.dump(_without_stacks(snapshot), file, protocol=4)
    about = {
        "settings": SETTINGS[kind],
        "allowed_bytes": int(share * total) if share < 1 or kind == "collect" else None,
        "device_bytes": total,
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        **peaks,
    }
    (out / f"{name}.json").write_text(json.dumps(about, indent=1))
    print(f"recorded {name}", flush=True)


def _without_stacks(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Keep what the comparison needs."""
    kept = {"allocator_settings": snapshot.get("allocator_settings", {})}
    entries = ("action", "addr", "size", "stream", "time_us", "device_free")
    kept["device_traces"] = [
        [{**{key: entry[key] for key in entries if key in entry}, "frames": []} for entry in trace]
        for trace in snapshot["device_traces"]
    ]
    kept["segments"] = [
        {
            **{key: value for key, value in segment.items() if key not in ("frames", "blocks")},
            "frames": [],
            "blocks": [
                {**{key: value for key, value in block.items() if key not in ("frames", "history")}, "frames": []}
                for block in segment["blocks"]
            ],
        }
        for segment in snapshot["segments"]
    ]
    return kept


def _random_program(seed: int, limited: bool) -> None:
    """Allocate and free at random on three streams; at a refused request half of what is held is freed.

    With a limit, only the allocator itself gives memory back: a trace does not tell ``empty_cache`` from that.
    """
    import torch

    draw = random.Random(seed)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    held: list[Any] = []
    most = (1100, 1500, 1900, 2600)[seed % 4] * MIB
    size = 0
    for _ in range(3000):
        act = draw.random()
        if act < 0.55 and size < most:
            wanted = int(2 ** draw.uniform(*draw.choice([(4, 12), (12, 21), (20, 24), (24, 28)])))
            try:
                with torch.cuda.stream(draw.choice([streams[0], streams[0], *streams])):
                    held.append(torch.empty(wanted, dtype=torch.uint8, device="cuda"))
                size += wanted
            except torch.cuda.OutOfMemoryError:
                draw.shuffle(held)
                size -= sum(one.numel() for one in held[: len(held) // 2])
                del held[: len(held) // 2]
        elif act < 0.97 and held:
            one = held.pop(draw.randrange(len(held)))
            size -= one.numel()
            if draw.random() < 0.05:
                one.record_stream(draw.choice(streams))
            del one
        elif act > 0.997 and not limited:
            torch.cuda.empty_cache()
    held.clear()


def _train(name: str, stage: int, checkpointing: bool) -> None:
    """Make a model and an engine, and take a step at each of three lengths."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(MODELS[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        },
    )
    for length in LENGTHS:
        tokens = torch.randint(0, 32000, (2, length), device="cuda")
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.destroy()


# Comparing ---------------------------------------------------------------------------------------------------------


def check(out: Path) -> bool:
    """Compare every trace of a folder with the model; prints a line each and the sums."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from allocator_compare import compare
    from ftmon.protocol.analysis.allocator.settings import Settings
    from ftmon.protocol.snapshot.reader import open_snapshot

    exact, near, alone, total = 0, 0, 0, 0
    for path in sorted(out.glob("*.pickle.gz")):
        about = json.loads(path.with_name(path.name.replace(".pickle.gz", ".json")).read_text())
        settings, snapshot = Settings.parse(about["settings"]), open_snapshot(path)
        options = {"allowed_bytes": about["allowed_bytes"], "device_bytes": about["device_bytes"]}
        found = compare(snapshot, 0, settings, **options)
        own = compare(snapshot, 0, settings, **options, recorded_addresses=False)
        off = abs(own.modelled_reserved_peak_bytes / own.recorded_reserved_peak_bytes - 1)
        total += 1
        exact += found.same_segments and found.first_difference is None
        near += found.largest_reserved_error <= 0.02
        alone += off <= 0.02
        print(
            f"{path.name.removesuffix('.pickle.gz'):42} {found.requests:6} requests, {found.recorded_changes:5} changes"
            f" (first other: {found.first_difference}), segments {'same' if found.same_segments else 'OTHER'},"
            f" addresses {found.same_address / max(1, found.requests):.1%},"
            f" reserved off {found.largest_reserved_error:.2%}, peak with own addresses {off:.2%},"
            f" out of memory {found.ooms}/{found.modelled_ooms}",
            flush=True,
        )
    print(f"{total} traces: {exact} with the recorded segments exactly, {near} with reserved bytes within 2 %")
    print(f"with segment addresses of the model's own, {alone} have a reserved peak within 2 %")
    return total > 0 and exact == near == total


def main() -> None:
    """Record with each setting in a process of its own, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("traces"))
    parser.add_argument("--only", choices=("random", "models"))
    parser.add_argument("--kinds", default=",".join(SETTINGS), help="allocator settings, comma separated")
    parser.add_argument("--check", type=Path, help="compare the traces of this folder, record nothing")
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.out, *arguments.record)
        return
    if arguments.check is None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        for which in ("random", "models"):
            if arguments.only not in (None, which):
                continue
            for kind in arguments.kinds.split(","):
                if which == "models" and kind not in ("native", "expandable"):
                    continue
                environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": SETTINGS[kind]}
                command = [sys.executable, __file__, "--out", str(arguments.out), "--record", kind, which]
                subprocess.run(command, env=environment, check=True)
    sys.exit(0 if check(arguments.check or arguments.out) else 1)


if __name__ == "__main__":
    main()
