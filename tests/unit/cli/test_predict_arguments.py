"""The arguments of ``ftmon predict``."""

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.tui.cli.main import parse
from ftmon.tui.cli.train import words


def test_lengths_and_sizes_are_numbers() -> None:
    words = ["predict", "--model", "m", "--sequence-length", "512,4096", "--capacity", "24GiB"]
    arguments = parse(words)
    assert arguments.sequence_length == [512, 4096]
    assert arguments.capacity == 24 * 2**30
    words = ["predict", "--model", "m", "--sequence-length", "64,32,64", "--capacity", "80gb"]
    arguments = parse(words)
    assert arguments.sequence_length == [64, 32]
    assert arguments.capacity == 80 * 10**9


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sequence-length", "512,x"),
        ("--sequence-length", "99999999999999"),
        ("--capacity", "much"),
        ("--capacity", "80"),
        ("--ranks", "0"),
        ("--optimizer", "x"),
    ],
)
def test_a_wrong_value_is_refused_with_status_2(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse(["predict", "--model", "m", option, value])
    assert refusal.value.code == 2
    assert option in capsys.readouterr().err


def test_a_configuration_goes_with_its_overrides() -> None:
    arguments = parse(["predict", "c.yaml", "--ranks", "4", "zero.stage=3", "--json"])
    assert words(arguments) == ["--ranks=4", "--json", "--", "c.yaml", "zero.stage=3"]


def test_a_script_goes_with_its_flags() -> None:
    arguments = parse(["predict", "--model", "m", "--micro-batch", "2", "--checkpointing"])
    assert words(arguments) == ["--model=m", "--micro-batch=2", "--checkpointing"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "CONFIG.yaml"),
        (["c.yaml", "--model", "m"], "not both"),
        (["c.yaml", "--micro-batch", "2"], "training.micro_batch"),
        (["c.yaml", "--checkpointing"], "model.gradient_checkpointing"),
    ],
)
def test_one_of_configuration_and_model_is_needed(given: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        words(parse(["predict", *given]))


def test_a_command_is_handed_on_untouched() -> None:
    arguments = parse(["predict", "--sequence-length", "512", "--", "deepspeed", "train.py", "--ranks", "x", "run"])
    assert words(arguments) == [
        "--sequence-length=512",
        "--script",
        "--",
        "deepspeed",
        "train.py",
        "--ranks",
        "x",
        "run",
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["c.yaml", "--", "python", "t.py"], "not both"),
        (["--model", "m", "--", "python", "t.py"], "not both"),
        (["--data", "--", "python", "t.py"], "--data needs CONFIG.yaml"),
        (["--deepspeed", "ds.json", "--", "python", "t.py"], "--deepspeed goes with --model"),
    ],
)
def test_what_a_script_says_itself_is_not_given_beside_it(given: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        words(parse(["predict", *given]))
