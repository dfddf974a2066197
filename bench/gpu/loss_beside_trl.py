"""Whether ftmon learns what TRL's SFTTrainer learns: losses of both, step by step, on the same batches.

    python bench/gpu/loss_beside_trl.py --out losses.json [--seeds 1,2,3] [--gpu 0] [--work FOLDER] [--tiny [--bf16]]
    python bench/gpu/loss_beside_trl.py --table losses.json [MORE.json ...]

A seed gives the initial weights and the order of the rows. Rows are text of this repository, one document each, cut to
the full length, with every token learned. ftmon's own data pipeline encodes and orders them, and TRL is handed these
token ids in this order, without shuffling or packing; its trainer refuses a batch that is not the expected one.

Both begin with the same weights (numbers that bf16 holds), and have AdamW with the same settings, a constant learning
rate, gradients clipped to 1 and no dropout. On a GPU both hold fp32 weights and compute in bf16: ftmon with bf16 copies
of its weights, TRL by autocast, which leaves norms and what is added up between layers in fp32. ``--tiny`` is a small
model on the CPU, fp32 in both, or with ``--bf16`` as on a GPU.

A step's loss is the mean over its label tokens: ftmon's as it recorded it, TRL's as its trainer backpropagated it. An
end is the mean of the last 20 steps (of half the steps, where there are fewer than 40). Results are added to ``--out``
as they come; runs that are in it already are not run again.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import train_rows
import train_speed
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir

HERE = Path(__file__).resolve()
LAST = 20
ADAMW = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
PRINTED = re.compile(r"step (\d+)/\d+  loss ([0-9.]+)  lr")
VOCABULARY = 8192
"""Size of the tokenizer; the model's own may be larger."""


@dataclass(frozen=True)
class Size:
    """What is trained, and on how much."""

    name: str
    model: dict[str, Any]
    length: int
    steps: int
    lr: float
    seeds: str
    tiny: bool = False
    bf16: bool = True
    """False: compute in fp32."""
    micro_batch: int = 4
    accumulation: int = 2

    @property
    def rows(self) -> int:
        """Rows of the whole run: one epoch."""
        return self.steps * self.micro_batch * self.accumulation


LARGE = Size("0.5b", train_rows.QWEN_05B, 1024, 200, 1e-4, "1,2,3")
TINY = Size("tiny", {**train_rows.QWEN_05B, **train_rows.TINY}, 64, 30, 1e-3, "1,2", tiny=True, bf16=False)


def overrides(size: Size, seed: int, folder: Path) -> list[str]:
    """Return a run as overrides of the trainer's configuration."""
    adamw = ", ".join(f"{name}: {value}" for name, value in ADAMW.items())
    return [
        f"model.name={folder}",
        f"data={{path: {folder.parent / 'documents.jsonl'}, format: text, truncation: keep_start, packing: false}}",
        f"training={{max_steps: {size.steps}, micro_batch: {size.micro_batch}, seed: {seed}}}",
        "evaluation=off",
        f"training={{grad_accumulation: {size.accumulation}, sequence_length: {size.length}, rehearsal: false}}",
        f"training.precision={'bf16' if size.bf16 else 'fp32'}",
        f"optimizer={{lr: {size.lr}, max_grad_norm: 1.0, {adamw}}}",
        "schedule.kind=constant",
        "output={save_model: false, log_every: 1}",
        "checkpoint={rehearse: false, at_end: false}",
        f"run={{ranks: 1, device: {'cpu' if size.tiny else 'cuda'}}}",
    ]


def prepare(size: Size, seed: int, folder: Path) -> None:
    """Write a seed's random weights, with a tokenizer, and its rows in the order that ftmon takes them in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    work = folder.parent
    if not (work / "documents.jsonl").exists():
        write_documents(size, work)
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    values = dict(size.model, max_position_embeddings=size.length)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = None
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    numpy.save(folder / "rows.npy", ordered_rows(size, seed, folder))


def write_documents(size: Size, work: Path) -> None:
    """Write a tokenizer that is trained on the repository's text, and pieces of the text that are longer than a row."""
    from ftmon.trainer.recipe.model.tokenizer import train
    from transformers import AutoTokenizer

    root = HERE.parents[2]
    patterns = ["docs/*.md", "*.md", "protocol/**/*.py", "trainer/**/*.py", "tui/**/*.py"]
    files = sorted(file for pattern in patterns for file in root.glob(pattern))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines(keepends=True)]
    made = train(lambda: lines, VOCABULARY)
    made.chat_template = None
    made.save_pretrained(work / "tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(work / "tokenizer")
    chance = random.Random(train_rows.SEED)
    pieces: list[str] = []
    while len(pieces) < size.rows:
        start = chance.randrange(len(lines))
        piece = "".join(lines[start : start + size.length])[: 8 * size.length]
        if len(tokenizer(piece)["input_ids"]) > size.length:
            pieces.append(piece)
    part = work / "documents.part"
    part.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces), encoding="utf-8")
    part.rename(work / "documents.jsonl")


def ordered_rows(size: Size, seed: int, folder: Path) -> Any:
    """Return the token ids of [steps x rows of a step, length], encoded and ordered as the trainer does it."""
    from ftmon.trainer.recipe.config.load import load
    from ftmon.trainer.recipe.data import pipeline
    from ftmon.trainer.recipe.data.batches import Order
    from ftmon.trainer.recipe.data.encode import Encoder
    from ftmon.trainer.recipe.data.records import read_records
    from ftmon.trainer.recipe.preflight import resolve

    config = resolve.settle_data(load(None, overrides(size, seed, folder)))
    records = read_records(config)
    forms = pipeline.record_formats(records, config)
    tokenizer = pipeline.load_tokenizer(config, records, forms)
    documents = pipeline.encode(records, Encoder(tokenizer, config, forms), tokenizer, config)
    examples = pipeline.examples(documents, records, config)
    batches = islice(Order(examples, config, 0, 1), size.steps * size.accumulation)
    rows = [examples.rows[row] for batch in batches for row in batch]
    ids = numpy.stack([row["input_ids"] for row in rows])
    labels = numpy.stack([row["labels"] for row in rows])
    if ids.shape != (size.rows, size.length) or not numpy.array_equal(ids[:, 1:], labels[:, 1:]):
        raise SystemExit(f"rows of {ids.shape} are not {size.rows} rows of {size.length} learned tokens")
    return ids


def by_ftmon(size: Size, seed: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Train with ftmon; return the run's status, and what its recording says of its steps."""
    name = f"loss-{size.name}-{seed}-{os.getpid()}-{int(time.time())}"
    command = [*train_speed.FTMON, "train", "--plain", "--name", name, *overrides(size, seed, folder)]
    result = called(command, environment)
    if not result["status"]:
        run = rundir.find(name)
        steps = recorded(run.recording)
        losses = {number: step.loss for number, step in steps.items() if step.loss is not None}
        # A step that was not recorded has been printed by its rank, to four places.
        lines = PRINTED.findall((run.logs / "rank-0.out").read_text())
        printed = {int(step): float(loss) for step, loss in lines if int(step) not in losses}
        losses |= printed
        result["grad_norms"] = [step.grad_norm for _, step in sorted(steps.items())]
        result["tokens"] = sum(step.tokens for step in steps.values())
        result["rounded_steps"] = sorted(printed)
        if sorted(losses) == list(range(1, size.steps + 1)):
            result["losses"] = [losses[number] for number in sorted(losses)]
        else:
            result |= {"status": 1, "output": [f"losses of {len(losses)} of {size.steps} steps are known"]}
    return result


def recorded(recording: Path) -> dict[int, Step]:
    """Return the steps that a run recorded, by number."""
    steps: dict[int, Step] = {}
    with Reader(recording) as reader:
        after = 0
        while frames := reader.frames(after, 5000):
            after = frames[-1].seq
            steps |= {frame.message.step: frame.message for frame in frames if isinstance(frame.message, Step)}
    return steps


def by_trl(size: Size, seed: int, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Train with TRL; return the run's status, and what its trainer optimised in each step."""
    result = called(child(size, "--trl-rank", seed, folder.parent), environment)
    if not result["status"]:
        result |= json.loads((folder / "trl.json").read_text())
    return result


def trl_rank(size: Size, seed: int, folder: Path) -> None:
    """Train with TRL on exactly the rows of the folder, in their order."""
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = torch.from_numpy(numpy.load(folder / "rows.npy"))
    losses: list[torch.Tensor] = []
    logged: list[dict[str, float]] = []

    base: Any = SFTTrainer

    class Watched(base):
        """Takes the rows as they stand, and keeps what it optimises."""

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> Any:
            start = len(losses) * size.micro_batch
            if not torch.equal(inputs["input_ids"].cpu(), rows[start : start + size.micro_batch]):
                raise SystemExit(f"micro-batch {len(losses)} is not the expected one")
            losses.append(super().training_step(model, inputs, *others, **named))
            return losses[-1]

        def log(self, logs: dict[str, float], *others: Any, **named: Any) -> None:
            if "grad_norm" in logs:
                logged.append(dict(logs))
            super().log(logs, *others, **named)

    ids = rows.numpy()
    labels = ids.copy()
    labels[:, 0] = -100  # nothing predicts it: no trainer may count it
    with tempfile.TemporaryDirectory() as scratch:
        args = SFTConfig(
            output_dir=scratch,
            max_length=size.length,
            packing=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=size.accumulation,
            max_steps=size.steps,
            learning_rate=size.lr,
            lr_scheduler_type="constant",
            optim="adamw_torch" if size.tiny else "adamw_torch_fused",
            adam_beta1=ADAMW["beta1"],
            adam_beta2=ADAMW["beta2"],
            adam_epsilon=ADAMW["eps"],
            weight_decay=ADAMW["weight_decay"],
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=size.bf16,
            use_cpu=size.tiny,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=seed,
        )
        trainer = Watched(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=args,
            train_dataset=datasets.Dataset.from_dict({"input_ids": list(ids), "labels": list(labels)}),
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
        trainer.train()
    steps = torch.stack(losses).view(size.steps, size.accumulation).sum(1)
    result = {
        "losses": steps.tolist(),
        "grad_norms": [logs["grad_norm"] for logs in logged],
        "tokens": len(losses) * size.micro_batch * size.length,
    }
    (folder / "trl.json").write_text(json.dumps(result))


def child(size: Size, part: str, seed: int, work: Path) -> list[str]:
    """Return the command that does a part of a seed's work in a process of its own."""
    shape = [*(["--tiny"] if size.tiny else []), *(["--bf16"] if size.tiny and size.bf16 else [])]
    return [sys.executable, str(HERE), part, str(seed), "--work", str(work), *shape]


def called(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command; return its status, its time, and the end of what it printed if it failed."""
    begun = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    result: dict[str, Any] = {"status": done.returncode, "seconds": round(time.perf_counter() - begun, 1)}
    if done.returncode:
        result["output"] = done.stdout.splitlines()[-25:]
    return result


def ends(losses: Sequence[float]) -> float:
    """Return the mean loss of the last steps."""
    return statistics.fmean(losses[-min(LAST, len(losses) // 2) :])


def table(results: list[dict[str, Any]]) -> str:
    """Return the comparison as Markdown: a row for each seed that both have run, the spreads, and a verdict."""
    found: dict[str, dict[int, list[float]]] = {"ftmon": {}, "trl": {}}
    for result in results:
        if not result["status"]:
            found[result["by"]][result["seed"]] = result["losses"]
    ours, theirs = found["ftmon"], found["trl"]
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return "no seed has been run by both"
    count = len(ours[seeds[0]])
    last = min(LAST, count // 2)
    lines = [
        f"| seed | ftmon, step 1 | TRL, step 1 | ftmon, steps {count - last + 1} to {count} | TRL | TRL - ftmon "
        "| largest difference of a step | mean of their sizes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for seed in seeds:
        apart = [their - our for our, their in zip(ours[seed], theirs[seed], strict=True)]
        at = max(range(count), key=lambda step, apart=apart: abs(apart[step]))
        cells = [f"{losses[seed][0]:.6f}" for losses in (ours, theirs)]
        cells += [f"{ends(losses[seed]):.6f}" for losses in (ours, theirs)]
        cells += [
            f"{ends(apart):+.6f}",
            f"{apart[at]:+.6f} (step {at + 1})",
            f"{statistics.fmean(map(abs, apart)):.6f}",
        ]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    both = [[ends(losses[seed]) for seed in seeds] for losses in (ours, theirs)]
    difference = statistics.fmean(both[1]) - statistics.fmean(both[0])
    means = [f"{statistics.fmean(values):.6f}" for values in both]
    lines.append(f"| mean | | | {' | '.join(means)} | {difference:+.6f} | | |")
    if len(seeds) < 2:
        return "\n".join([*lines, "", "verdict: one seed has no spread"])
    spreads = [statistics.stdev(values) for values in both]
    apart = statistics.stdev(their - our for our, their in zip(*both, strict=True))
    lines.append(f"| standard deviation | | | {spreads[0]:.6f} | {spreads[1]:.6f} | {apart:.6f} | | |")
    holds = abs(difference) < min(spreads)
    lines += [
        "",
        f"verdict: {'within' if holds else 'NOT within'} seed noise: |mean difference| {abs(difference):.6f} "
        f"{'<' if holds else '>='} {min(spreads):.6f}, the smaller standard deviation over {len(seeds)} seeds",
    ]
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("torch", "transformers", "accelerate", "trl", "deepspeed"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def environment_of(size: Size, gpu: int) -> dict[str, str]:
    """Return the environment of the runs: one GPU or none, and no network."""
    shared = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    seen = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if size.tiny else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return {**os.environ, **shared, **seen}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", help="default: 1,2,3, with --tiny 1,2")
    parser.add_argument("--gpu", type=int, default=0, help="number of the GPU to run on")
    parser.add_argument("--work", type=Path, help="folder of weights and rows; those of an earlier call are used")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="with --tiny: compute in bf16, as on a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of results; run nothing")
    parser.add_argument("--prepare", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--trl-rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.table:
        print(table([result for path in given.table for result in read(path)]))
        return 0
    size = replace(TINY, bf16=given.bf16) if given.tiny else LARGE
    work = (given.work or Path(tempfile.mkdtemp())).absolute()
    work.mkdir(parents=True, exist_ok=True)
    if given.prepare is not None:
        prepare(size, given.prepare, work / f"seed-{given.prepare}")
        return 0
    if given.trl_rank is not None:
        trl_rank(size, given.trl_rank, work / f"seed-{given.trl_rank}")
        return 0
    environment = environment_of(size, given.gpu)
    results = read(given.out) if given.out else []
    done = {(result["seed"], result["by"]) for result in results if not result["status"]}
    about = {"size": size.name, "bf16": size.bf16, "versions": versions()}
    about["device"] = "cpu" if size.tiny else train_speed.device_name()
    for seed in map(int, (given.seeds or size.seeds).split(",")):
        folder = work / f"seed-{seed}"
        if not (folder / "rows.npy").exists():
            subprocess.run(child(size, "--prepare", seed, work), env=environment, check=True)
        for by, run in {"ftmon": by_ftmon, "trl": by_trl}.items():
            if (seed, by) in done:
                continue
            result: dict[str, Any] = {"seed": seed, "by": by, **about, **run(size, seed, folder, environment)}
            results.append(result)
            short = {name: value for name, value in result.items() if name not in ("losses", "grad_norms")}
            print(json.dumps(short | ({"end": ends(result["losses"])} if "losses" in result else {})), flush=True)
            if given.out:
                given.out.write_text(json.dumps(results, indent=1))
    print(table(results))
    return int(any(result["status"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
