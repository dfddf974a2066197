"""A predicted run's configuration, checked as for training on another machine's GPUs, and documents of packed rows."""

from pathlib import Path

import pytest
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import recipe
from ftmon.trainer.predict.deepspeed_file import KEEPS_GATHERED
from ftmon.trainer.predict.dry import H200
from ftmon.trainer.predict.recipe import make_shallow, of_rows, read, repeats
from ftmon.trainer.recipe.config.schema import Config

MODEL = "model: {config: {model_type: llama, vocab_size: 512, hidden_size: 64}}\n"


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "d.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    (tmp_path / "c.yaml").write_text(
        f"{MODEL}data: {{path: {tmp_path}/d.jsonl}}\noutput: {{dir: {tmp_path}/out}}\nrun: {{ranks: 3}}\n"
    )
    return str(tmp_path / "c.yaml")


def test_a_recipe_is_settled_for_gpus_that_are_not_here_and_refused_at_the_line_where_training_would(config):
    found = read(config, [], None, [])
    assert (found.run.ranks, found.run.device, found.training.precision) == (3, "cuda", "bf16")
    assert read(config, [], 64, []).run.ranks == 64
    assert read(config, [], None, [512, 4096, 8]).training.sequence_length == 4096
    assert read(config, ["training.sequence_length=256"], None, []).training.sequence_length == 256
    file = Path(config)
    file.write_text(f"{file.read_text()}zero: {{offload_parameters: true}}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml:5: zero\.offload_parameters needs zero\.stage 3"):
        read(config, [], None, [])
    with pytest.raises(ConfigError, match=r"training\.total_batch is 4, but .* x 3 ranks is 3"):
        read(config, ["zero.stage=3", "training.total_batch=4"], None, [])


@pytest.mark.parametrize(
    "setting", ["run.device=cpu", "model.activation_offload=all", "model.attention=flash_attention_2"]
)
def test_what_a_dry_run_cannot_follow_is_refused_by_its_key(config, setting):
    with pytest.raises(ConfigError, match=rf"^command line: {setting.partition('=')[0]} "):
        read(config, [setting], None, [])


PARTITIONED = ["zero.stage=3", "model.config.num_hidden_layers=8"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], True),
        (["zero.stage=2"], False),
        (["model.config.num_hidden_layers=7"], False),
        (["model.gradient_checkpointing=layers"], False),
        (["model.config.model_type=gemma2"], False),  # every second layer has another attention
        ([f"deepspeed.zero_optimization.{KEEPS_GATHERED[0]}=100"], False),
    ],
)
def test_layers_that_are_many_partitioned_and_alike_repeat(config, settings, expected):
    assert repeats(read(config, [*PARTITIONED, *settings], None, [])) == expected


@pytest.mark.parametrize(("live", "released"), [(10**9, False), (10**6, True)])
def test_a_few_layers_are_gathered_as_they_are_among_all(config, monkeypatch, live, released):
    made: list[Config] = []
    monkeypatch.setattr(recipe, "RecipeRun", lambda config, *_: made.append(config))
    monkeypatch.setattr(recipe, "LIVE_PARAMETERS", live)
    make_shallow(read(config, PARTITIONED, None, []), Settings(), H200, None, 2, 0)
    (few,) = made
    assert few.model.config["num_hidden_layers"] == 2
    assert few.deepspeed == ({"zero_optimization": dict.fromkeys(KEEPS_GATHERED, 0)} if released else {})


ROWS = [[5, 3], [8], [2, 2, 2], [1, 6, 1]]


def pairs(documents: list[int]) -> int:
    return sum(1 for tokens in documents for query in range(tokens) for key in range(tokens) if key <= query)


def test_a_token_attends_to_the_mean_of_all_rows_and_a_row_is_packed_as_densely_as_the_densest():
    found = of_rows(ROWS)
    assert found.pairs_a_token == found.pairs(8) == sum(map(pairs, ROWS)) / sum(map(sum, ROWS))
    assert found.pairs(2) == pairs([2]) / 2, "no document is longer than the row"
    assert (found.longest, found.densest) == (8, [2, 2, 2])
    assert [found.row(length) for length in (6, 3, 7)] == [[2, 2, 2], [2, 1], [2, 2, 2, 1]]
