"""Which script a command starts, with what, and as how many ranks."""

import contextlib
import socket
from pathlib import Path

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.predict.commands import Launched, launchers_parse


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
    assert launchers_parse(command.split()) == Launched("train.py", False, arguments, ranks)


def test_a_module_is_taken_by_its_name() -> None:
    assert launchers_parse(["torchrun", "--nproc_per_node", "2", "-m", "my.train", "--x"]) == Launched(
        "my.train", True, ["--x"], 2
    )
    assert launchers_parse(["python", "-m", "my.train", "--x"]) == Launched("my.train", True, ["--x"], 1)


@pytest.mark.parametrize("start", ["accelerate launch", "accelerate-launch", "python -m accelerate.commands.launch"])
def test_accelerates_options_are_taken_as_it_takes_them(start: str, tmp_path: Path) -> None:
    ds = tmp_path / "ds.json"
    ds.write_text("{}")
    command = f"{start} --num_processes 4 --use_deepspeed --deepspeed_config_file {ds} train.py --lr 1"
    found = launchers_parse(command.split())
    assert (found.script, found.is_module, found.arguments, found.ranks) == ("train.py", False, ["--lr", "1"], 4)
    assert found.environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert found.environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == str(ds)
    assert launchers_parse(f"{start} --multi_gpu --num_processes 2 -m my.train".split()) == Launched(
        "my.train", True, [], 2
    )


def test_accelerates_configuration_file_is_taken_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 2\n"
        "machine_rank: 0\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n"
    )
    with socket.socket() as other:
        with contextlib.suppress(OSError):
            other.bind(("127.0.0.1", 29500))  # accelerate's own, which it refuses while somebody listens there
        other.listen()
        found = launchers_parse(["accelerate", "launch", "--config_file", "a.yaml", "train.py"])
    assert found.ranks == 8
    told = {"MIXED_PRECISION": "bf16", "DEEPSPEED_ZERO_STAGE": "3", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}
    assert found.environment.items() >= {f"ACCELERATE_{name}": value for name, value in told.items()}.items()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: [1,\n", "a.yaml: while parsing"),
        ("", "a.yaml: must be keys with values"),
        ("distributed_type: DEEPSPEED\nnosuch: 3\n", "had unknown keys"),
        ("distributed_type: NOSUCH\n", "'NOSUCH' is not a valid DistributedType"),
        ("distributed_type: DEEPSPEED\nnum_processes: two\n", "num_processes must be a whole number, not 'two'"),
        ("distributed_type: DEEPSPEED\nnum_processes: 3\nnum_machines: 2\nmachine_rank: x\n", ""),
    ],
)
def test_a_configuration_file_that_accelerate_cannot_use_is_refused_in_one_line(
    tmp_path: Path, content: str, text: str
) -> None:
    (tmp_path / "a.yaml").write_text(content)
    with pytest.raises(UsageError) as refusal:
        launchers_parse(["accelerate", "launch", "--config_file", "a.yaml", "train.py"])
    assert str(refusal.value).startswith("accelerate launch: ")
    assert text in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("bash run.sh", "takes deepspeed, torchrun, accelerate launch or python, not bash"),
        ("accelerate env", "takes accelerate launch, not 'accelerate env'"),
        ("accelerate launch", "accelerate launch: names no script"),
        ("accelerate launch --no_such_option=1 --num_processes", "accelerate launch: "),
        ("accelerate launch --config_file none.yaml train.py", "none.yaml"),
        ("accelerate launch --multi_gpu --use_deepspeed train.py", "one of"),
        ("accelerate launch --num_processes 2 other.py", "other.py: no such file"),
        ("deepspeed --num_gpus 2", "names no script"),
        ("python other.py", "other.py: no such file"),
        ("python -c pass", "takes a script, not python -c"),
    ],
)
def test_what_is_no_such_command_is_refused_with_the_flags_to_use(command: str, text: str) -> None:
    with pytest.raises(UsageError, match=text) as refusal:
        launchers_parse(command.split())
    assert "use --model and --deepspeed instead" in str(refusal.value)


@pytest.mark.parametrize("option", ["--nproc-per-node 0", "--nproc_per_node=0", "--nproc-per-node 2 --nnodes 0"])
def test_a_command_that_starts_no_rank_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match="torchrun starts no rank"):
        launchers_parse(f"torchrun {option} train.py".split())
