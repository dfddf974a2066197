"""A configuration that cannot be used is refused by place and dotted path."""

from pathlib import Path

import pytest
from ftmon.protocol.errors import ConfigError, UsageError
from ftmon.trainer.recipe.config.load import load

REFUSALS = [
    ("zero:\n  stage: 5", "train.yaml:2: zero.stage must be 0, 1, 2 or 3, not 5"),
    ("zero:\n  stag: 3", "train.yaml:2: unknown key zero.stag; did you mean zero.stage?"),
    ("# a comment\n\nstage: 3", "train.yaml:3: unknown key stage; did you mean zero.stage?"),
    (
        "training:\n  sequence_parallel_size: 0",
        "train.yaml:2: training.sequence_parallel_size must be a whole number of at least 1, not 0",
    ),
    (
        "zero:\n  sequence_parallel_size: 2",
        "train.yaml:2: unknown key zero.sequence_parallel_size; did you mean training.sequence_parallel_size?",
    ),
    ("zero: 3", "train.yaml:1: zero must be a section with keys such as stage, offload_optimizer, bucket_bytes, not 3"),
    ("training:\n  micro_batch: 0", "train.yaml:2: training.micro_batch must be a whole number of at least 1, not 0"),
    (
        "training:\n  micro_batch: 1.5",
        "train.yaml:2: training.micro_batch must be a whole number of at least 1, not 1.5",
    ),
    ("training: {seed: [1]}", "train.yaml:1: training.seed must be a whole number from 0 to 4,294,967,295, not a list"),
    ("optimizer:\n  lr: fast", "train.yaml:2: optimizer.lr must be a number above 0, not fast"),
    ("optimizer:\n  lr: .inf", "train.yaml:2: optimizer.lr must be a number above 0, not .inf"),
    ("optimizer:\n  lr: '1e-4'", "train.yaml:2: optimizer.lr must be a number above 0, not '1e-4'"),
    ("run:\n  master_port: 70000", "train.yaml:2: run.master_port must be a whole number from 0 to 65,535, not 70000"),
    (
        f"training:\n  max_steps: {'9' * 22}",
        f"training.max_steps must be a whole number from 0 to 1,000,000,000,000,000, not {'9' * 22}",
    ),
    (
        "training:\n  micro_batch: 9223372036854775807",
        "training.micro_batch must be a whole number from 1 to 1,000,000,000,000,000, not 9223372036854775807",
    ),
    (
        "training:\n  seed: 4294967296",
        "training.seed must be a whole number from 0 to 4,294,967,295, not 4294967296",
    ),
    (f"training:\n  seed: {'9' * 5000}", "training.seed must be a whole number from 0 to 4,294,967,295, not 999"),
    ("data:\n  shuffle: maybe", "train.yaml:2: data.shuffle must be true or false, not maybe"),
    ("data:\n  path: [a]", "train.yaml:2: data.path must be text, not a list"),
    ("lora:\n  targets: q_proj", "train.yaml:2: lora.targets must be a list such as [a, b], not q_proj"),
    ("model:\n  config: qwen2", "train.yaml:2: model.config must be a section of keys and values, not qwen2"),
    (
        "schedule:\n  kind: cosin",
        "train.yaml:2: schedule.kind must be constant, cosine or linear, not cosin; did you mean cosine?",
    ),
    ("zero:\n  stage: 1\n  stage: 2", "train.yaml:3: stage is given twice, first at train.yaml:2"),
    ("- a\n- b", "train.yaml:1: the file must hold sections such as 'zero:', not a list"),
    ("zero:\n  stage: [", "train.yaml:2: not valid YAML"),
    ("zero:\n\tstage: 1", "train.yaml:2: not valid YAML"),
    ("zero: *nothing", "train.yaml:1: not valid YAML"),
    ("model: {config: &a {b: *a}}", "is nested too deeply"),
    ("? [a, b]\n: 1", "train.yaml:1: a key must be a word, not a list"),
    (f"model:\n  name: {'x' * 100_000}", "model.name must be text of at most 4,096 characters"),
    (f"zero:\n  {'k' * 1000}: 1", "unknown key zero.kkk"),
    ('"zero\\nforged: everything is well": 1', "unknown key zero\ufffdforged"),
    ('zero:\n  stage: "\\e[2J\\x9b2J\\u202e"', "must be 0, 1, 2 or 3"),
    ('model:\n  name: "a\\0b"', "without a NUL"),
    ("model:\n  name: a\0b", "not valid YAML"),
    ("model:\n  config: " + "[" * 20_000, "is nested too deeply"),
    ("model: !!python/object/apply:os.system ['true']", "must be a section"),
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


def test_a_mistake_on_the_command_line_says_so() -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, ["zero.stage=5"])
    assert str(raised.value) == "command line: zero.stage must be 0, 1, 2 or 3, not 5"


@pytest.mark.parametrize("word", ["zero.stage", "=3", ".stage=3", "zero..stage=3"])
def test_an_override_that_is_no_assignment_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match=r"key\.sub=value"):
        load(None, [word])


def test_an_override_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^command line: unknown key zero\.stge; did you mean zero\.stage\?$"):
        load(None, ["zero.stge=1"])


def test_overrides_win_over_the_file_and_the_last_one_wins(folder: Path) -> None:
    (folder / "train.yaml").write_text("zero: {stage: 1}\nmodel:\n  config: {hidden_size: 8, model_type: qwen2}\n")
    loaded = load("train.yaml", ["zero.stage=2", "zero.stage=3", "model.config.hidden_size=64"])
    assert loaded.config.zero.stage == 3
    assert loaded.config.model.config == {"hidden_size": 64, "model_type": "qwen2"}
    assert loaded.places["zero.stage"] == "command line"
    assert loaded.places["model.config.model_type"] == "train.yaml:3"


def test_numbers_that_yaml_1_1_takes_for_text_are_numbers(folder: Path) -> None:
    (folder / "train.yaml").write_text("optimizer: {lr: 1e-4, eps: 1E-9}\nmodel: {config: {rope_theta: 1e6}}\n")
    config = load("train.yaml").config
    assert (config.optimizer.lr, config.optimizer.eps) == (1e-4, 1e-9)
    assert config.model.config == {"rope_theta": 1e6}


def test_words_that_yaml_1_1_takes_for_booleans_are_text_where_text_belongs(folder: Path) -> None:
    (folder / "train.yaml").write_text("run: {name: no}\ndata: {path: 123}\n")
    config = load("train.yaml").config
    assert (config.run.name, config.data.path) == ("no", "123")


def test_an_empty_file_and_an_empty_section_give_the_defaults(folder: Path) -> None:
    (folder / "train.yaml").write_text("")
    (folder / "other.yaml").write_text("zero:\ndata:\n  path:\n")
    assert load("train.yaml").config == load("other.yaml").config == load(None).config


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such file"):
        load("nowhere.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        load(str(folder))
    with pytest.raises(ConfigError, match=r"binary\.yaml: is not a text file"):
        load("binary.yaml")


def test_a_value_of_the_command_line_that_is_nested_too_deeply_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^command line: is nested too deeply in data\.path=\[\[\["):
        load(None, ["data.path=" + "[" * 5000])


def test_a_value_of_the_command_line_that_is_not_yaml_is_named_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^command line: not valid YAML: .* in data\.path=\*\.jsonl; a text with"):
        load(None, ["data.path=*.jsonl"])
