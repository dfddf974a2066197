"""A configuration that cannot be used is refused by place and dotted path."""

import json
from pathlib import Path

import pytest
from ftmon.protocol.errors import ConfigError, UsageError
from ftmon.trainer.recipe.config.load import load
from places import DATA

REFUSALS = [
    *map(json.loads, (DATA / "config_errors.jsonl").read_text().splitlines()),
    ("training:\n  seed: " + "9" * 5000, "training.seed must be a whole number from 0 to 4,294,967,295, not 999"),
    ("model:\n  name: " + "x" * 100000, "model.name must be text of at most 4,096 characters"),
    ("zero:\n  " + "k" * 1000 + ": 1", "unknown key zero.kkk"),
    ("model:\n  config: " + "[" * 20000, "is nested too deeply"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("text", "words"), REFUSALS)
def test_a_mistake_in_the_file_is_one_line_with_its_place(folder: Path, text: str, words: str) -> None:
    (folder / "train.yaml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load("train.yaml")
    assert words in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("zero.stage=5", r"zero\.stage must be 0, 1, 2 or 3, not 5$"),
        ("zero.stge=1", r"unknown key zero\.stge; did you mean zero\.stage\?$"),
        ("data.path=" + "[" * 5000, r"is nested too deeply in data\.path=\[\[\["),
        ("data.path=*.jsonl", r"not valid YAML: .* in data\.path=\*\.jsonl; a text with"),
    ],
)
def test_a_mistake_on_the_command_line_says_so(word: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^command line: {words}"):
        load(None, [word])


@pytest.mark.parametrize("word", ["zero.stage", "=3", ".stage=3", "zero..stage=3"])
def test_an_override_that_is_no_assignment_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"key\.sub=value"):
        load(None, [word])


def test_overrides_win_over_the_file_the_last_over_all_and_an_empty_file_gives_the_defaults(folder):
    (folder / "train.yaml").write_text("zero: {stage: 1}\nmodel:\n  config: {hidden_size: 8, model_type: qwen2}\n")
    loaded = load("train.yaml", ["zero.stage=2", "zero.stage=3", "model.config.hidden_size=64"])
    assert loaded.config.zero.stage == 3
    assert loaded.config.model.config == {"hidden_size": 64, "model_type": "qwen2"}
    assert loaded.places["zero.stage"] == "command line"
    assert loaded.places["model.config.model_type"] == "train.yaml:3"
    (folder / "train.yaml").write_text("")
    (folder / "other.yaml").write_text("zero:\ndata:\n  path:\n")
    assert load("train.yaml").config == load("other.yaml").config == load(None).config


def test_values_are_read_by_the_type_of_their_field_and_a_file_that_cannot_be_is_named(folder):
    (folder / "train.yaml").write_text(
        "optimizer: {lr: 1e-4, eps: 1E-9}\nmodel: {config: {rope_theta: 1e6}}\nrun: {name: no}\ndata: {path: 123}\n"
    )
    config = load("train.yaml").config
    assert (config.optimizer.lr, config.optimizer.eps) == (1e-4, 1e-9)
    assert load(None, ["optimizer.lr=auto", "schedule.warmup_steps=0"]).config.schedule.warmup_steps == 0
    assert config.model.config == {"rope_theta": 1e6}
    assert (config.run.name, config.data.path) == ("no", "123")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("nowhere.yaml", r"nowhere\.yaml: no such file"),
        (str(folder), "is a directory"),
        ("binary.yaml", r"binary\.yaml: is not a text file"),
    ):
        with pytest.raises(ConfigError, match=words):
            load(name)
