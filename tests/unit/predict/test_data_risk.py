"""Which steps of a data set do not fit, beside the batches that a run would make."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from ftmon.protocol.analysis.estimates.ranking import Need

pytest.importorskip("torch")

from ftmon.trainer.predict import recipe, what_if
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.data.batches import Collate, Order

RANKS = 2


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    lines = [" ".join(words[(row + place) % 9] for place in range(3 + row * 7 % 60)) for row in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "train.yaml").write_text(
        f"""
model: {{config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
         num_attention_heads: 2, num_key_value_heads: 2}}}}
tokenizer: {{vocab_size: 300}}
data: {{path: {tmp_path / "data.jsonl"}}}
training: {{sequence_length: 96, micro_batch: 2, grad_accumulation: 2, epochs: 1}}
"""
    )
    return recipe.read(str(tmp_path / "train.yaml"), [], RANKS, [])


def needs(limit: int) -> Callable[[list[int]], list[Need]]:
    """Return what says that a token takes a byte."""
    return lambda lengths: [Need(length, [length <= limit]) for length in lengths]


def test_steps_that_do_not_fit_are_those_whose_batches_are_too_long(config: Config) -> None:
    records, examples = what_if.read(config)
    collate = Collate(0, config.training.sequence_length)
    longest: dict[int, int] = {}
    for rank in range(RANKS):
        order = iter(Order(examples, config, rank, RANKS))
        for step in range(1, what_if.steps_an_epoch(config, examples) + 1):
            for _ in range(config.training.grad_accumulation):
                width = collate([examples.rows[row] for row in next(order)])["input_ids"].shape[1]
                longest[step] = max(longest.get(step, 0), width)
    assert len(set(longest.values())) > 3
    limit = sorted(set(longest.values()))[-3]

    risk = what_if.find(config, records, examples, limit, needs(limit))
    failing = [step for step, length in longest.items() if length > limit]
    assert (risk.steps, risk.largest_length, risk.failing_steps) == (len(longest), limit, len(failing))
    assert [step.step for step in risk.failing] == failing[:3]
    assert risk.longest.length == max(longest.values())
    first = risk.failing[0]
    assert first.length == longest[first.step]
    assert max(int(examples.tokens[row]) for row in first.rows) > first.length - 8
    assert all("data.jsonl:" in place for place in first.places)

    fitting = what_if.find(config, records, examples, 1 << 20, needs(1 << 20))
    assert (fitting.failing_steps, fitting.failing, fitting.largest_length) == (0, [], max(longest.values()))
