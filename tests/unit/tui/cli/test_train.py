"""The arguments of ``ftmon predict``."""

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.tui.cli.main import parse
from ftmon.tui.cli.train import words

WRONG = "sequence-length 512,x; sequence-length 99999999999999; capacity much; capacity 80; ranks 0; optimizer x"


@pytest.mark.parametrize("given", WRONG.split("; "))
def test_lengths_and_sizes_are_numbers_and_a_wrong_value_is_refused_with_status_2(given, capsys):
    arguments = parse(["predict", "--model", "m", "--sequence-length", "64,32,64", "--capacity", "80gb"])
    assert (arguments.sequence_length, arguments.capacity) == ([64, 32], 80 * 10**9)
    arguments = parse(["predict", "--model", "m", "--sequence-length", "512,4096", "--capacity", "24GiB"])
    assert (arguments.sequence_length, arguments.capacity) == ([512, 4096], 24 * 2**30)
    option, value = given.split()
    with pytest.raises(SystemExit) as refusal:
        parse(["predict", "--model", "m", f"--{option}", value])
    assert refusal.value.code == 2
    assert f"--{option}" in capsys.readouterr().err


def test_arguments_are_passed_on_to_the_process_that_predicts():
    command = "deepspeed train.py --ranks x run"
    for given, passed in (
        ("c.yaml --ranks 4 zero.stage=3 --json", "--ranks=4 --json -- c.yaml zero.stage=3"),
        ("c.yaml --explain --price 2", "--price=2.0 --explain -- c.yaml"),
        ("--model m --micro-batch 2 --checkpointing", "--model=m --micro-batch=2 --checkpointing"),
        (f"--sequence-length 512 -- {command}", f"--sequence-length=512 --script -- {command}"),
    ):
        assert words(parse(["predict", *given.split()])) == passed.split()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("", "CONFIG.yaml"),
        ("c.yaml --model m", "not both"),
        ("c.yaml --explain --run r", "--run goes with --explain"),
        ("--run r", "--run goes with --explain"),
        ("c.yaml --micro-batch 2", "training.micro_batch"),
        ("c.yaml --checkpointing", "model.gradient_checkpointing"),
        ("--model m --data", "--data needs CONFIG.yaml"),
        ("c.yaml -- python t.py", "not both"),
        ("--model m -- python t.py", "not both"),
        ("--data -- python t.py", "--data needs CONFIG.yaml"),
        ("--deepspeed ds.json -- python t.py", "--deepspeed goes with --model"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given, text):
    with pytest.raises(UsageError, match=text):
        words(parse(["predict", *given.split()]))
