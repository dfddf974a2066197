"""A job's environment carries the mark of its run, the import hook, and what DeepSpeed passes to other hosts."""

import pwd
from pathlib import Path

import pytest
from ftmon.protocol.run.environment import monitor_environment
from ftmon.protocol.run.rundir import MultiHost
from ftmon.trainer.host.processes import INJECT_DIR
from ftmon.trainer.launch.environment import find_hosts, flight_recorder, job_environment

TWO = "worker-0 slots=4\nworker-1 slots=4  # the new one\n\n# worker-2 slots=4\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hosts").write_text(TWO)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("deepspeed --hostfile hosts train.py", MultiHost(["worker-0", "worker-1"])),
        ("deepspeed -H hosts --ssh_port 2222 train.py", MultiHost(["worker-0", "worker-1"], 2222)),
        ("env A=b /opt/bin/deepspeed --hostfile=hosts train.py", MultiHost(["worker-0", "worker-1"])),
        ("python -m deepspeed.launcher.runner --hostfile hosts train.py", MultiHost(["worker-0", "worker-1"])),
        ("deepspeed --hostfile hosts --num_nodes 1 train.py", None),
        ("deepspeed --hostfile hosts --include worker-1:0,2 train.py", None),
        ("deepspeed --hostfile hosts --exclude worker-0 train.py", None),
        ("deepspeed --hostfile hosts --no_ssh --node_rank 0 train.py", MultiHost(by_hand=True)),
        ("deepspeed --hostfile hosts --launcher slurm train.py", MultiHost()),
        ("deepspeed --hostfile missing train.py", None),
        ("deepspeed --num_gpus 4 train.py --hostfile hosts", None),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py", MultiHost(by_hand=True)),
        ("torchrun --nnodes=1:4 train.py", MultiHost(by_hand=True)),
        ("torchrun --nnodes=1 train.py", None),
        ("torchrun --nproc-per-node 4 train.py --nnodes 2", None),
        ("python -m torch.distributed.run --nnodes 2 train.py", MultiHost(by_hand=True)),
        ("accelerate launch --num_machines 2 --machine_rank 0 train.py", MultiHost(by_hand=True)),
        ("srun -N 2 python train.py", MultiHost()),
        ("srun -N2 python train.py", MultiHost()),
        ("srun --nodes=2-4 python train.py", MultiHost()),
        ("srun -N 1-4 python train.py", MultiHost()),
        ("srun -N1 -n 8 python train.py", None),
        ("srun --nodes=1 python train.py", None),
        ("mpirun -np 8 -hosts a,b python train.py", MultiHost()),
        ("mpirun -np 8 python train.py", None),
        ("python train.py", None),
    ],
)
def test_a_commands_words_tell(command: str, found: MultiHost | None, folder: Path) -> None:
    assert find_hosts(command.split(), {}, folder) == found


@pytest.mark.parametrize("name", ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"])
def test_a_slurm_allocation_of_several_nodes_tells(name: str) -> None:
    assert find_hosts(["./start.sh"], {name: "4"}) == MultiHost(slurm_nodes=4)
    assert find_hosts(["srun", "-N", "2", "torchrun", "train.py"], {name: "4"}) == MultiHost(slurm_nodes=4)
    assert find_hosts(["./start.sh"], {name: "1"}) is None


OUTER = {"FTMON_RUN": "/outer", "FTMON_RANK_PID": "3", "FTMON_JOIN": "/outer/join.json", "FTMON_PLACE": "/place"}


def test_a_job_is_marked_and_hooked_and_keeps_what_the_person_set_but_the_recorder_by_torch_s_name(run):
    found = job_environment(run, {**OUTER, "PYTHONPATH": "/mine", "X": "1"})
    expected = {"FTMON_RUN": str(run.path), "PYTHONPATH": f"{INJECT_DIR}:/mine", "PYTHONUNBUFFERED": "1", "X": "1"}
    assert expected.items() <= found.items()
    assert "2000" in (found.get("TORCH_FR_BUFFER_SIZE"), found.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    assert not {"FTMON_RANK_PID", "FTMON_JOIN", "FTMON_PLACE"} & set(found), "marks of the run that this one is in"
    own = {"TORCH_FR_BUFFER_SIZE": "9", "PYTHONUNBUFFERED": ""}
    assert {**own, "PYTHONPATH": str(INJECT_DIR)}.items() <= job_environment(run, own).items()
    assert monitor_environment({**OUTER, "A": "b"}) == {"A": "b"}, "hub and launcher carry no mark"
    assert flight_recorder((2, 13)) == {"TORCH_FR_BUFFER_SIZE": "2000"}
    assert flight_recorder((2, 6)) == {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}
    assert len(flight_recorder(None)) == 2


def test_deepspeed_exports_our_marks_after_the_persons_own_lines(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(run.path)
    (tmp_path / ".deepspeed_env").write_text("MINE=1\n")
    lines = Path(job_environment(run, {})["DS_ENV_FILE"]).read_text().splitlines()
    assert lines[0] == "MINE=1"
    assert f"FTMON_RUN={run.path}" in lines
    assert all(line.count("=") >= 1 for line in lines)


def test_a_user_without_a_home_directory_can_start_a_job(run, monkeypatch):
    def unknown(_uid: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(run.path)
    (run.path / ".deepspeed_env").write_text("MINE=1\n")
    lines = Path(job_environment(run, {})["DS_ENV_FILE"]).read_text().splitlines()
    assert lines[:2] == ["MINE=1", f"FTMON_RUN={run.path}"]
