import os

import pytest
from ftmon.protocol.run.environment import RANK_PID_ENV
from ftmon.trainer.probe.rank.roles import decide, launcher_name, parse_program, parse_rank

RANK = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("argv", "script", "module"),
    [
        (["python", "train.py", "--x"], "train.py", ""),
        (["python", "-u", "train.py"], "train.py", ""),
        (["python", "-um", "pkg.train"], "", "pkg.train"),
        (["python", "-X", "dev", "-W", "ignore", "-m", "pkg"], "", "pkg"),
        (["python", "-Wignore", "train.py"], "train.py", ""),
        (["python", "-mpkg"], "", "pkg"),
        (["python", "-c", "import torch", "torchrun"], "", ""),
        (["python"], "", ""),
        (["python", "--check-hash-based-pycs", "never", "a.py"], "a.py", ""),
    ],
)
def test_the_program_is_found_behind_the_interpreters_options(argv, script, module):
    program = parse_program(argv)
    assert (program.script, program.module) == (script, module)


@pytest.mark.parametrize(
    "argv",
    [
        ["python", "/venv/bin/deepspeed", "train.py"],
        ["python", "/venv/bin/torchrun", "train.py"],
        ["python", "/venv/bin/accelerate", "launch", "train.py"],
        ["python", "-u", "-m", "deepspeed.launcher.launch", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "train.py"],
        ["python", "/venv/bin/accelerate-launch", "train.py"],
    ],
)
def test_launchers_are_known_by_their_command(argv):
    assert launcher_name(parse_program(argv))
    assert decide(argv, {}, 10) == "launcher"


def test_what_only_looks_like_a_launcher_is_none():
    assert not launcher_name(parse_program(["python", "/venv/bin/accelerate", "env"]))
    assert not launcher_name(parse_program(["python", "torchrun_helper.py"]))
    assert not launcher_name(parse_program(["python", "train.py", "torchrun"]))


def test_a_process_with_a_rank_is_one_and_another_may_become_one():
    assert decide(["python", "train.py"], RANK, 10) == "rank"
    assert decide(["python", "train.py"], {}, 10) == "candidate"
    assert decide(["python", "train.py"], {**RANK, RANK_PID_ENV: "10"}, 10) == "rank"


def test_a_descendant_of_a_rank_is_none_and_a_launcher_there_is_refused():
    inside = {**RANK, RANK_PID_ENV: str(os.getpid())}
    assert decide(["python", "worker.py"], inside, 10) == "other"
    assert decide(["python", "/bin/deepspeed", "train.py"], inside, 10) == "refused"


def test_the_mark_of_a_rank_that_is_gone_counts_no_more():
    gone = {RANK_PID_ENV: str(2**22 + 1)}  # above the kernel's largest pid
    assert decide(["python", "/bin/torchrun", "train.py"], gone, 10) == "launcher"


def test_an_environment_without_a_whole_rank_names_none():
    assert parse_rank({"RANK": "0"}) is None
    assert parse_rank({"RANK": "x", "WORLD_SIZE": "2"}) is None
    assert parse_rank({"RANK": "3", "WORLD_SIZE": "4"}) == (3, 3, 4)
