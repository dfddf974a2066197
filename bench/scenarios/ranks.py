"""The training that goes wrong: a small loop that knows nothing of ftmon. What is to happen is in ``$SCENE`` (JSON).

``kind``, ``culprit`` (rank), ``at`` (step), ``folder`` (for what the runner is told), ``steps``, ``engine``, ``cuda``.
"""

import contextlib
import json
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from faults import Fault
from torch.utils.data import DataLoader, Dataset

SCENE = json.loads(os.environ["SCENE"])
COMPUTE_SECONDS = 0.08


class Rows(Dataset):
    """Random rows; the culprit's may come late, or never."""

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 4 * SCENE["steps"]

    def __getitem__(self, index):
        if index % 4 == 0:
            time.sleep(0.004)
            self.fault.reading(index // 4 + 1)
        return torch.full((16,), float(index % 7))


class Model(torch.nn.Module):
    """A layer, and time that passes."""

    def __init__(self, fault):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.fault = fault

    def forward(self, rows):
        time.sleep(COMPUTE_SECONDS)
        self.fault.computing()
        return self.layers(rows).pow(2).mean()


def main():
    if SCENE["engine"] == "deepspeed":
        import deepspeed

        deepspeed.init_distributed()
    else:
        if SCENE["cuda"]:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if SCENE["cuda"] else "gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fault = Fault(SCENE, dist.get_rank(), dist.get_world_size())
    fault.before_loop()
    {"deepspeed": with_engine, "torchrun": plain, "ddp": parallel, "fsdp": parallel}[SCENE["engine"]](fault)
    if fault.leaves_early:
        return
    fault.finishing()
    dist.barrier()
    dist.destroy_process_group()
    fault.leaving()


def loader(fault):
    return DataLoader(Rows(fault), batch_size=4, num_workers=int(SCENE["kind"] == "loader-worker"))


def plain(fault):
    device = torch.device("cuda", torch.cuda.current_device()) if SCENE["cuda"] else torch.device("cpu")
    model = Model(fault).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reduced = SCENE["kind"] in ("no-sync-one", "honest-eval-module", "uneven-exit")
    if reduced:
        model = torch.nn.parallel.DistributedDataParallel(model)
    for step, rows in enumerate(loader(fault), 1):
        fault.begin(step)
        with model.no_sync() if fault.skips_collectives else contextlib.nullcontext():
            loss = model(rows.to(device))
            loss.backward()
        fault.before_collective()
        late = SCENE["kind"].startswith("device-wait")
        own = [] if reduced else list(model.parameters())  # DistributedDataParallel reduces in backward
        works = [dist.all_reduce(parameter.grad, async_op=late) for parameter in own]
        optimizer.step()
        optimizer.zero_grad()
        if late:  # under NCCL it is the next copy from the device that waits, outside of every collective's call
            works[-1].get_future().wait()
        print("step", step, float(loss.detach()), flush=True)
        fault.between_steps(model)
        if fault.out_of_batches():
            return


def parallel(fault):
    """A model in DDP, or sharded by FSDP2: the collectives are the library's."""
    device = torch.device("cuda", torch.cuda.current_device()) if SCENE["cuda"] else torch.device("cpu")
    model = Model(fault).to(device)
    if SCENE["engine"] == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    random.seed(dist.get_rank() * 1000 + SCENE["at"])
    for step, rows in enumerate(fault.batches(loader(fault)), 1):
        fault.begin(step)
        for left in reversed(range(fault.micro_steps())):
            with contextlib.ExitStack() as stack:
                if left:
                    stack.enter_context(model.no_sync())
                model(rows.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        fault.between_steps(model)


def with_engine(fault):
    import deepspeed

    model = Model(fault)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": 100000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step, rows in enumerate(fault.batches(loader(fault)), 1):
        fault.begin(step)
        loss = engine(rows.to(engine.device))
        fault.before_collective()
        engine.backward(loss)
        engine.step()
        fault.between_steps(engine)


if __name__ == "__main__":
    Path(SCENE["folder"], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    main()
