"""What ``ftmon train --init`` chooses, beside a small exhaustive sweep on GPUs of one host: tokens/s and peak of each.

    python bench/gpu/choice.py --choose choice.json [--model 0.5b | 1.2b] [--ranks 2]    anywhere, without a GPU
    python bench/gpu/choice.py --choice choice.json --out FILE [--ranks 2] [--budget 100]             on GPUs
    python bench/gpu/choice.py --choice choice.json --out FILE [--ranks 2] --tiny                     on a CPU

The sweep trains steps of the same rows with each micro-batch, with and without recomputed layers: a process for each
kind (and ZeRO stage) takes the micro-batches one after the other, the chosen one first, then its neighbours, with the
accumulation that makes the same step. On one GPU ZeRO's stages 1 and 2 differ only in how gradients are kept. While one
GPU is measured, ``--init`` chooses on its host too, and its progress is printed with times.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from train_rows import LLAMA_12B, QWEN_DEFAULT, TINY, documents

MODELS = {"0.5b": QWEN_DEFAULT, "1.2b": LLAMA_12B}
KINDS = (("none", 1), ("layers", 1), ("none", 2), ("none", 3))
"""Recomputed layers and ZeRO stage; the last only on several GPUs."""
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
SECONDS, LEAST = 4.0, 2
WORDS = 1_500_000
"""Words of the data of a choice; a sweep needs the rows of one step."""
FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
Log = Callable[[str], None]


def make(folder: Path, model: dict[str, Any], words: int) -> tuple[Path, Path]:
    """Write a model's folder without weights and data; return their paths."""
    from ftmon.trainer.recipe.model.tokenizer import train

    data, named = folder / "data.jsonl", folder / "model"
    documents(data, words)
    with data.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(300), strict=False)]
    tokenizer = train(lambda: texts, 8192)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(named)
    (named / "config.json").write_text(json.dumps(model))
    return named, data


def choose(model: dict[str, Any], ranks: int, target: Path) -> None:
    """Have the command choose for H200s, and write its settings, lines and time."""
    import yaml

    with tempfile.TemporaryDirectory() as made:
        named, data = make(Path(made), model, WORDS)
        file = Path(made, "train.yaml")
        began = time.perf_counter()
        command = [*FTMON, "train", "--init", f"--output={file}", f"--gpus={ranks}xH200", str(named), str(data)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = {"chosen": yaml.safe_load(file.read_text()), "lines": done.stdout.splitlines()}
    target.write_text(json.dumps({**found, "seconds": round(time.perf_counter() - began, 1)}, indent=1))


def rank(words: list[str], rows: int, micro_batches: list[int]) -> None:
    """Print a line for each micro-batch: its figures, or that it runs out of memory; each after a line is read.

    ``rows``: of a step, of all ranks.
    """
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
        trainer.engine.set_gradient_accumulation_boundary(start + size * world.data_ranks >= rows)
        own = start + size * world.data_rank
        return trainer.data.batch(used[own : own + size])

    def step(size: int) -> float:
        began = time.perf_counter()
        trainer.train_step([partial(fetch, start, size) for start in range(0, rows, size * world.data_ranks)], labels)
        if world.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    print("ready", file=said)
    for size in micro_batches:
        sys.stdin.readline()
        found: dict[str, Any] = {"micro_batch": size}
        try:
            last = step(size)
            if world.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            count = torch.tensor([max(LEAST, round(SECONDS / last))], device=world.device)
            torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MIN)
            seconds = [step(size) for _ in range(int(count))]
            found["tokens_per_second"] = round(tokens / min(seconds))
        except torch.OutOfMemoryError:
            found["out_of_memory"] = True
            if world.size > 1:  # the others are in a collective
                print(json.dumps(found), file=said)
                break
        if world.on_gpu:
            found["allocated_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 2)
            gc.collect()
            torch.cuda.empty_cache()
        print(json.dumps(found), file=said)
    said.flush()
    os._exit(0)


def start(words: list[str], ranks: int, rows: int, sizes: list[int], log: IO[str]) -> "list[subprocess.Popen[str]]":
    """Start the ranks of one kind."""
    from ftmon.trainer.recipe import launcher
    from ftmon.trainer.recipe.config.load import load
    from ftmon.trainer.recipe.hardware import free_port
    from ftmon.trainer.recipe.preflight.resolve import resolve
    from ftmon.trainer.recipe.start import launch_environment

    resolved = resolve(load(None, words))
    base = os.environ | launch_environment(resolved)
    del base["PYTHONSAFEPATH"]  # train_rows is beside this file
    gpus, port = ",".join(resolved.gpus), free_port()
    command = [sys.executable, __file__, "--rank", json.dumps(words), "--rows", str(rows), "--sizes", json.dumps(sizes)]
    return [
        subprocess.Popen(
            command, env=launcher.environment_of(rank, ranks, gpus, port, base),
            stdin=subprocess.PIPE, stdout=log if rank else subprocess.PIPE, stderr=log, text=True, bufsize=1,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def beside(named: Path, data: Path, log: Log) -> "subprocess.Popen[str]":
    """Have the command choose on this host, and print its progress with times."""
    command = [*FTMON, "train", "--init", "--no-measure", f"--output={named.parent}/train.yaml", str(named), str(data)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)

    def follow() -> None:
        assert process.stdout
        for line in process.stdout:
            log(f"--init: {line.rstrip()}")

    threading.Thread(target=follow, daemon=True).start()
    return process


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--choose", type=Path)
    options.add_argument("--choice", type=Path)
    options.add_argument("--out", type=Path)
    options.add_argument("--model", choices=sorted(MODELS), default="0.5b")
    options.add_argument("--ranks", type=int, default=1)
    options.add_argument("--budget", type=float, default=100.0)
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--rank", type=json.loads)
    options.add_argument("--rows", type=int)
    options.add_argument("--sizes", type=json.loads)
    given = options.parse_args()
    if given.rank:
        rank(given.rank, given.rows, given.sizes)
    if given.choose:
        choose(MODELS[given.model], given.ranks, given.choose)
        return
    began = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - began:.0f} s  {text}", flush=True)

    chosen = json.loads(given.choice.read_text())["chosen"]
    result: dict[str, Any] = {"model": given.model, "chosen": chosen, "kinds": []}
    with tempfile.TemporaryDirectory() as made, Path(given.out.parent, "choice.log").open("w") as errors:
        model = MODELS[given.model] | (TINY if given.tiny else {})
        named, data = make(Path(made), model, 60_000 if given.tiny else 200_000)
        log("the data are written")
        sweep(given, model, (named, data), chosen, result, errors, log, began + given.budget)
    given.out.write_text(json.dumps(result, indent=1))


def sweep(
    given: argparse.Namespace, model: dict[str, Any], made: tuple[Path, Path], chosen: Any, result: Any, errors: Any,
    log: Log, until: float,
) -> None:  # fmt: skip
    """Run each kind with each micro-batch, as long as there is time, and compare the choice with the best."""
    named, data = made
    own = chosen["training"]["micro_batch"]
    rows = 4 if given.tiny else own * chosen["training"]["grad_accumulation"] * given.ranks
    sizes = sorted(
        (size for size in MICRO_BATCHES if size * given.ranks <= rows),
        key=lambda size: abs(size.bit_length() - own.bit_length()),
    )
    words = [
        f"model.config={json.dumps(model)}",
        f"tokenizer.name={named}",
        f"data.path={data}",
        f"training.micro_batch={sizes[-1]}",
        f"training.grad_accumulation={rows // (sizes[-1] * given.ranks)}",
        f"training.sequence_length={256 if given.tiny else chosen['training']['sequence_length']}",
        "training.rehearsal=false",
        "output.save_model=false",
        "checkpoint={minutes: 0, keep_best: false}",
        "evaluation.share=0",
        *([f"run.ranks={given.ranks}"] if given.ranks > 1 or given.tiny else []),
        *(["run.device=cpu"] if given.tiny else []),
    ]
    stage = chosen["zero"]["stage"] if given.ranks > 1 else 1
    kinds = sorted(
        (kind for kind in KINDS if kind[1] < 3 or given.ranks > 1),
        key=lambda kind: (kind[1] != stage, kind[0] != chosen["model"]["gradient_checkpointing"]),
    )
    running: list[list[subprocess.Popen[str]]] = []
    for kind in kinds:
        more = [f"output.dir={named.parent}/out-{kind[0]}-{kind[1]}"]
        more += [f"model.gradient_checkpointing={kind[0]}", f"zero.stage={kind[1]}"]
        if kind[1] == 2 and given.ranks == 1 and not given.tiny:
            more.append("zero.grad_accum_dtype=bf16")  # else it runs as stage 1
        running.append(start([*words, *more], given.ranks, rows, sizes, errors))
    others = [] if given.tiny or given.ranks > 1 else [beside(named, data, log)]
    speeds: dict[tuple[str, int, int], int] = {}
    try:
        for kind, processes in zip(kinds, running, strict=True):
            take(kind, processes, speeds, result["kinds"], log, until)
    finally:
        for process in (*chain.from_iterable(running), *others):
            process.kill()
            process.wait()
    if speeds:
        of, best = (chosen["model"]["gradient_checkpointing"], stage, own), max(speeds, key=lambda one: speeds[one])
        result["share"] = round(speeds.get(of, 0) / speeds[best], 3)
        log(f"chosen {of} {speeds.get(of)} tokens/s, best {best} {speeds[best]}: {result['share']:.1%}")


def take(
    kind: tuple[str, int], ranks: "list[subprocess.Popen[str]]", speeds: dict[tuple[str, int, int], int],
    found: list[Any], log: Log, until: float,
) -> None:  # fmt: skip
    """Take the micro-batches of one kind in turn, as long as there is time."""
    said = ranks[0].stdout
    assert said
    end = threading.Timer(max(1.0, until - time.monotonic()), lambda: [process.kill() for process in ranks])
    end.start()
    try:
        while (line := said.readline()) not in ("ready\n", ""):
            pass
        log(f"{kind} {'is ready' if line else 'ended'}")
        while line and time.monotonic() < until:
            for process in ranks:
                assert process.stdin
                process.stdin.write("\n")
            line = said.readline()
            if line:
                one: dict[str, Any] = {"gradient_checkpointing": kind[0], "stage": kind[1], **json.loads(line)}
                found.append(one)
                log(json.dumps(one))
                if "tokens_per_second" in one:
                    speeds[(*kind, one["micro_batch"])] = one["tokens_per_second"]
    except BrokenPipeError:
        pass
    finally:
        end.cancel()


if __name__ == "__main__":
    main()
