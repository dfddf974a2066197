"""What ``ftmon train --init`` chooses, beside a small exhaustive sweep on one GPU: tokens/s and peak of each.

    python bench/gpu/choice.py --out choice.json [--model 0.5b | 1.2b] [--budget 290] [--tiny]

The sweep trains steps of the same rows with each micro-batch, with and without recomputed layers: a process for each
kind (and ZeRO stage) takes all micro-batches one after the other, with the accumulation that makes the same step, until
one runs out of memory. On one GPU stages 1 and 2 differ only in how gradients are kept, so stage 2 is run with one
kind. In what is left of the budget, the choice is made again with its three short trainings. ``--tiny``: on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from train_rows import LLAMA_12B, QWEN_DEFAULT, Row, documents, prepare, shrunk

MODELS = {"0.5b": Row(QWEN_DEFAULT, length=4096), "1.2b": Row(LLAMA_12B, length=4096)}
KINDS = (("none", 1), ("layers", 1), ("none", 2))
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SECONDS, WARM, LEAST = 6.0, 2, 2
FTMON = [sys.executable, "-m", "ftmon.tui.cli"]


def rank(words: list[str], rows: int, micro_batches: list[int]) -> None:
    """Print a line for each micro-batch: its figures, or that it runs out of memory; each after a line is read."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    from ftmon.trainer.recipe.config.load import load
    from ftmon.trainer.recipe.distributed import World
    from ftmon.trainer.recipe.preflight.resolve import resolve
    from ftmon.trainer.recipe.rehearse import compile_first
    from ftmon.trainer.recipe.train import setup

    world = World()
    trainer = setup(resolve(load(None, words)).config, world)
    if trainer.config.model.compile != "off":
        compile_first(trainer, trainer.data, trainer.model)
    used = (trainer.data.longest(rows) * rows)[:rows]
    labels = int(trainer.data.examples.label_tokens[used].sum())
    tokens = int(trainer.data.examples.tokens[used].sum())
    trainer.engine.train()

    def fetch(start: int, size: int) -> Any:
        trainer.engine.set_gradient_accumulation_boundary(start + size >= rows)
        return trainer.data.batch(used[start : start + size])

    def step(size: int) -> float:
        began = time.perf_counter()
        trainer.train_step([partial(fetch, start, size) for start in range(0, rows, size)], labels)
        if world.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    print("ready", file=said)
    for size in micro_batches:
        sys.stdin.readline()
        try:
            last = [step(size) for _ in range(WARM)][-1]
            if world.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            count = max(LEAST, round(SECONDS / last))
            seconds = sum(step(size) for _ in range(count)) / count
        except torch.OutOfMemoryError:
            print(json.dumps({"micro_batch": size, "out_of_memory": True}), file=said)
            break
        found: dict[str, Any] = {"micro_batch": size, "tokens_per_second": round(tokens / seconds)}
        if world.on_gpu:
            found["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            torch.cuda.empty_cache()
        print(json.dumps(found), file=said)
    said.flush()
    os._exit(0)


def start(words: list[str], rows: int, log: Any, tiny: bool) -> "subprocess.Popen[str]":
    """Start the process of one kind."""
    from ftmon.trainer.recipe import launcher
    from ftmon.trainer.recipe.config.load import load
    from ftmon.trainer.recipe.hardware import free_port
    from ftmon.trainer.recipe.preflight.resolve import resolve
    from ftmon.trainer.recipe.start import launch_environment

    resolved = resolve(load(None, words))
    base = os.environ | launch_environment(resolved)
    del base["PYTHONSAFEPATH"]  # train_rows is beside this file
    sizes = json.dumps([size for size in MICRO_BATCHES[: 3 if tiny else None] if size <= rows])
    return subprocess.Popen(
        [sys.executable, __file__, "--rank", json.dumps(words), "--rows", str(rows), "--sizes", sizes],
        env=launcher.environment_of(0, 1, ",".join(resolved.gpus), free_port(), base),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
    )  # fmt: skip


def init(folder: Path, data: Path, name: str, *more: str) -> dict[str, Any]:
    """Have the command choose; return the settings that it wrote, its lines and its time."""
    import yaml

    target = folder.parent / f"{name}.yaml"
    began = time.perf_counter()
    command = [*FTMON, "train", "--init", f"--output={target}", *more, str(folder), str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        return {"failed": done.stderr.splitlines()[-3:], "seconds": round(seconds, 1)}
    return {
        "chosen": yaml.safe_load(target.read_text()),
        "lines": done.stdout.splitlines(),
        "seconds": round(seconds, 1),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    options.add_argument("--model", choices=sorted(MODELS), default="0.5b")
    options.add_argument("--budget", type=float, default=290.0)
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--rank", type=json.loads)
    options.add_argument("--rows", type=int)
    options.add_argument("--sizes", type=json.loads)
    given = options.parse_args()
    if given.rank:
        rank(given.rank, given.rows, given.sizes)
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:.0f} s  {text}", flush=True)

    row = shrunk(MODELS[given.model]) if given.tiny else MODELS[given.model]
    row = replace(row, length=4096)
    result: dict[str, Any] = {"model": given.model, "kinds": []}
    with tempfile.TemporaryDirectory() as made, Path(given.out.parent, "choice.log").open("w") as errors:
        folder, data = Path(made, "model"), Path(made, "data.jsonl")
        documents(data, 120_000 if given.tiny else 1_500_000)
        prepare(row, folder, data)
        log("the model and the data are written")
        run_sweep(given, folder, data, result, errors, log, began)
    given.out.write_text(json.dumps(result, indent=1))


def run_sweep(
    given: argparse.Namespace, folder: Path, data: Path, result: dict[str, Any], errors: Any, log: Any, began: float
) -> None:
    """Choose, sweep, compare."""
    elsewhere = ["--gpus=1xH200"] if given.tiny else ["--no-measure"]
    result["choice"] = init(folder, data, "choice", *elsewhere)
    log(f"--init: {json.dumps(result['choice'])}")
    chosen = result["choice"]["chosen"]["training"]
    rows = chosen["micro_batch"] * chosen["grad_accumulation"]
    words = [
        f"model.name={folder}",
        f"data.path={data}",
        f"training.micro_batch={min(2, rows)}",
        f"training.grad_accumulation={max(1, rows // 2)}",
        f"training.sequence_length={chosen['sequence_length']}",
        "training.rehearsal=false",
        f"output.dir={folder.parent}/out",
        "output.save_model=false",
        "checkpoint.minutes=0",
        "checkpoint.keep_best=false",
        "evaluation.share=0",
        *(["run.device=cpu", "run.ranks=1"] if given.tiny else []),
    ]
    running: list[tuple[tuple[str, int], subprocess.Popen[str]]] = []
    for kind in KINDS:
        more = [f"model.gradient_checkpointing={kind[0]}", f"zero.stage={kind[1]}"]
        more += (
            ["zero.grad_accum_dtype=bf16"] if kind[1] == 2 and not given.tiny else []
        )  # else stage 2 on one rank runs as 1
        running.append((kind, start([*words, *more], rows, errors, given.tiny)))
    speeds: dict[tuple[str, int, int], int] = {}
    for kind, process in running:
        take(kind, process, speeds, result["kinds"], log, lambda: time.monotonic() - began < given.budget - 15)
    compare(result, speeds, log)
    if not given.tiny and given.budget - (time.monotonic() - began) > 100:
        result["measured"] = init(folder, data, "measured")
        log(f"--init with short trainings: {json.dumps(result['measured'])}")
        compare(result, speeds, log, "measured")


def take(kind: tuple[str, int], process: "subprocess.Popen[str]", speeds: Any, found: Any, log: Any, may: Any) -> None:
    """Take the micro-batches of one kind in turn, as long as there is time."""
    assert process.stdin
    assert process.stdout
    try:
        while process.stdout.readline() not in ("ready\n", ""):
            pass
        log(f"{kind} is ready")
        while may():
            process.stdin.write("\n")
            line = process.stdout.readline()
            if not line:
                break
            one = {"gradient_checkpointing": kind[0], "stage": kind[1], **json.loads(line)}
            found.append(one)
            log(json.dumps(one))
            if "tokens_per_second" in one:
                speeds[(*kind, one["micro_batch"])] = one["tokens_per_second"]
    except BrokenPipeError:
        pass
    finally:
        process.kill()
        process.wait()


def compare(result: dict[str, Any], speeds: dict[tuple[str, int, int], int], log: Any, name: str = "choice") -> None:
    """Add the choice's share of the best of the sweep."""
    chosen = result[name].get("chosen")
    if not chosen or not speeds:
        return
    kind = (chosen["model"]["gradient_checkpointing"], 1, chosen["training"]["micro_batch"])
    best = max(speeds, key=lambda one: speeds[one])
    share = speeds.get(kind, 0) / speeds[best]
    result[f"{name}_share"] = round(share, 3)
    log(f"{name}: {kind} {speeds.get(kind)} tokens/s, best {best} {speeds[best]}: {share:.1%}")


if __name__ == "__main__":
    main()
