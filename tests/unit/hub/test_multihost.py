"""Whether a command trains on several hosts."""

from pathlib import Path

import pytest
from ftmon.protocol.run.rundir import MultiHost
from ftmon.trainer.launch.environment import find_hosts

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
