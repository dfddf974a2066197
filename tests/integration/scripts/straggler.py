"""Two ranks, of which rank 1 loses 100 ms a step: ``straggler.py ddp|fsdp idle|forward|data [cuda]``."""

import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

LIBRARY, WHERE = sys.argv[1:3]
CUDA = "cuda" in sys.argv[3:]
STEPS = 100_000


def lose(where: str) -> None:
    if dist.get_rank() == 1 and where == WHERE:
        time.sleep(0.1)


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 0:
            lose("data")
        return torch.randn(64)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        lose("forward")
        return self.layers(rows).pow(2).mean()


def main() -> None:
    dist.init_process_group("nccl" if CUDA else "gloo")
    device = torch.device("cuda", dist.get_rank()) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: torch.nn.Module = Net().to(device)
    if LIBRARY == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (2,))
        fully_shard(model.layers, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for rows in DataLoader(Rows(), batch_size=8):
        model(rows.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        lose("idle")


if __name__ == "__main__":
    main()
