"""Which script a command starts, with what, and as how many ranks."""

from pathlib import Path

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.predict.commands import Launched, parse


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


@pytest.mark.parametrize(
    ("command", "ranks", "arguments"),
    [
        ("python train.py --lr 1", 1, ["--lr", "1"]),
        ("/usr/bin/python3.11 -u train.py", 1, []),
        ("python -W ignore -X dev -uB train.py -W x", 1, ["-W", "x"]),
        ("python -W ignore -m torch.distributed.run --virtual-local-rank --nproc_per_node 2 train.py", 2, []),
        ("deepspeed -q --enable_each_rank_log logs --num_gpus 2 train.py", 2, ["--local_rank=0"]),
        ("deepspeed train.py --deepspeed ds.json", None, ["--local_rank=0", "--deepspeed", "ds.json"]),
        ("deepspeed --num_gpus 4 --num_nodes=2 train.py", 8, ["--local_rank=0"]),
        ("deepspeed --no_local_rank --include localhost:0,2,3 train.py", 3, []),
        ("deepspeed -i worker-0:0,1@worker-1:0 --master_port 29501 train.py x", 3, ["--local_rank=0", "x"]),
        ("torchrun --standalone --nproc-per-node 2 train.py --num_gpus 9", 2, ["--num_gpus", "9"]),
        ("torchrun --nproc_per_node=gpu train.py", None, []),
        ("python -m torch.distributed.run --nproc_per_node 2 --nnodes 2 train.py", 4, []),
    ],
)
def test_a_command_is_taken_apart(command: str, ranks: int | None, arguments: list[str]) -> None:
    assert parse(command.split()) == Launched("train.py", False, arguments, ranks)


def test_a_module_is_taken_by_its_name() -> None:
    found = parse(["torchrun", "--nproc_per_node", "2", "-m", "my.train", "--x"])
    assert found == Launched("my.train", True, ["--x"], 2)
    assert parse(["python", "-m", "my.train", "--x"]) == Launched("my.train", True, ["--x"], 1)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bash run.sh", "takes deepspeed, torchrun or python, not bash; use --model"),
        ("deepspeed --num_gpus 2", "names no script; use --model"),
        ("python other.py", "other.py: no such file; use --model"),
        ("python -c pass", "takes a script, not python -c; use --model"),
        ("torchrun --nproc-per-node 0 train.py", "torchrun starts no rank"),
        ("torchrun --nproc_per_node=0 train.py", "torchrun starts no rank"),
        ("torchrun --nproc-per-node 2 --nnodes 0 train.py", "torchrun starts no rank"),
        ("accelerate launch --num_processes 4 train.py", r"torchrun --nproc-per-node N train\.py"),
        ("accelerate-launch train.py", r"torchrun --nproc-per-node N train\.py"),
        ("python -m accelerate.commands.launch train.py", r"torchrun --nproc-per-node N train\.py"),
    ],
)
def test_what_is_no_such_command_is_refused_with_what_to_give(command: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        parse(command.split())
