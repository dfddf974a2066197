"""Small runs of the recipe on forked ranks: a model and data on disk, configurations, one launch."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import rank_jobs
import torch
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.preflight import resolve
from transformers import LlamaConfig, LlamaForCausalLM

P = ParamSpec("P")
R = TypeVar("R")
WORDS = ["red", "green", "blue", "seven", "lines", "of", "a", "poem"]


def records(lengths: list[int]) -> list[dict[str, str]]:
    return [
        {"prompt": " ".join(WORDS) * (1 + row % 3), "response": " ".join(WORDS[(row + n) % 8] for n in range(length))}
        for row, length in enumerate(lengths)
    ]


def write_records(path: Path, lengths: list[int]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records(lengths)))


def write_model(folder: Path, **settings: Any) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**{**sizes, **heads, **settings}, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    from ftmon.trainer.recipe.model import tokenizer

    tokenizer.train(lambda: (text["prompt"] for text in records([1] * 8)), 400).save_pretrained(folder / "tokenizer")


def launch(folder: Path, module: str, jobs: dict[str, tuple[int, list[str]]]) -> dict[str, str]:
    """Run ``module.work`` on each job's ranks with its configuration; return what each job printed."""
    plan: dict[int, list[str]] = {}
    resolved: Any = None
    for name, (ranks, words) in jobs.items():
        base = [
            f"model.name={folder}/base",
            f"tokenizer.name={folder}/tokenizer",
            f"data.path={folder}/data.jsonl",
            f"output={{log_every: 1, save_model: false, dir: {folder}/out/{name}}}",
            f"run={{ranks: {ranks}, device: cpu, threads: 1}}",
        ]
        resolved = resolve.resolve(load(None, base + words))
        path = folder / f"{name}.yaml"
        path.write_text(write.dump(resolved.config))
        plan.setdefault(ranks, []).append(str(path))
    entries = [{"ranks": ranks, "module": module, "jobs": paths} for ranks, paths in plan.items()]
    environment = rank_jobs.environment_of(resolved, folder / "cache")
    environment.pop("TORCHDYNAMO_DISABLE", None)
    return rank_jobs.sections(rank_jobs.forked(entries, environment, 1400))


def once(reference: Callable[P, R]) -> Callable[P, R]:
    """Compute a slow reference once for equal arguments, rows as lists. Callers must not change the result."""
    known: dict[str, R] = {}

    @functools.wraps(reference)
    def found(*arguments: P.args, **named: P.kwargs) -> R:
        key = repr((arguments, named))
        if key not in known:
            known[key] = reference(*arguments, **named)
        return known[key]

    return found
