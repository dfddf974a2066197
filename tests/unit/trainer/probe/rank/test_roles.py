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
        ["python", "-u", "-m", "ftmon.trainer.recipe.launcher", "--", "-m", "ftmon.trainer.recipe"],
        ["python", "-m", "accelerate.commands.launch", "train.py"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch", "train.py"],
        ["python", "/venv/bin/accelerate-launch", "train.py"],
    ],
)
def test_launchers_are_known_by_their_command(argv):
    assert launcher_name(parse_program(argv))
    assert decide(argv, {}, 10) == "launcher"


@pytest.mark.parametrize("words", ["/venv/bin/accelerate env", "torchrun_helper.py", "train.py torchrun"])
def test_what_only_looks_like_a_launcher_is_none(words):
    assert not launcher_name(parse_program(["python", *words.split()]))


INSIDE = {**RANK, RANK_PID_ENV: str(os.getpid())}
GONE = {RANK_PID_ENV: str(2**22 + 1)}  # above the kernel's largest pid


@pytest.mark.parametrize(
    ("script", "environment", "role"),
    [
        ("train.py", RANK, "rank"), ("train.py", {}, "candidate"),
        ("train.py", {**RANK, RANK_PID_ENV: "10"}, "rank"), ("worker.py", INSIDE, "other"),
        ("/bin/deepspeed", INSIDE, "refused"), ("/bin/torchrun", GONE, "launcher"),
    ],
)  # fmt: skip
def test_a_role_follows_from_the_script_and_from_whether_a_rank_that_lives_started_it(script, environment, role):
    assert decide(["python", script, "train.py"], environment, 10) == role


def test_an_environment_without_a_whole_rank_names_none():
    places = ({"RANK": "0"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "3", "WORLD_SIZE": "4"})
    assert list(map(parse_rank, places)) == [None, None, (3, 3, 4)]
