"""A DeepSpeed training with the hangs that people report, and with long honest work. Knows nothing of ftmon.

What is to happen is in ``$SCENE`` (JSON): ``kind`` (a function's name below), ``culprit`` (rank), ``at`` (step),
``folder`` (for what the runner reads), ``steps``, ``step_ms`` (device time added to each step), ``engine`` (``zero2``
or ``zero3``) and ``cuda``.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

SCENE = json.loads(os.environ["SCENE"])
KIND, AT, STEPS = SCENE["kind"], SCENE["at"], SCENE["steps"]
FOLDER = Path(SCENE["folder"])
FOR_EVER = 100_000
WIDTH = 1024 if SCENE["cuda"] else 32
CHECKPOINT_S, EVALUATION_S, COMPILATION_S, UPLOAD_S, GENERATION_S = 60.0, 90.0, 60.0, 50.0, 60.0
RETRY_S = (3.0, 6.0, 12.0, 24.0)
"""Pauses of a data set between attempts to reach its server, in seconds."""
IRREGULAR_S = (*[0.1] * 10, 0.2, 0.2, 0.5, 0.5, 1.0, 1.0, 2.0, 2.0, 5.0, 20.0)
COMPILER = "import sys, time; end = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"
"""A child that computes, as a compiler does."""
CYCLES_PER_SECOND = 1.9e9
"""Clock of the GPU that ``torch.cuda._sleep`` counts in."""


def begins():
    """Record once when the fault begins."""
    path = FOLDER / "fault.json"
    if not path.exists():
        temporary = FOLDER / f"fault-{os.getpid()}"
        temporary.write_text(json.dumps({"time": time.time()}))
        temporary.replace(path)


def is_due(step):
    """Return whether this rank is at fault in this step."""
    return step == AT and dist.get_rank() == SCENE["culprit"]


class Rows(Dataset):
    """Random rows, one batch an index; the culprit's may come late, or never."""

    def __init__(self, mine):
        self.mine = mine

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if self.mine and index + 1 == AT:
            if KIND in ("asleep-data", "worker-hang"):
                begins()
                time.sleep(FOR_EVER)
            elif KIND == "honest-retries":
                begins()
                for pause in RETRY_S:
                    with contextlib.suppress(OSError):
                        socket.create_connection(("127.0.0.1", 9), timeout=1.0)
                    time.sleep(pause)
        return torch.randn(4, WIDTH)


class Model(torch.nn.Module):
    """Linear layers, and device time of the length asked for."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = torch.nn.Linear(WIDTH, 8)
        self.step = 0

    def forward(self, rows):
        if self.training:
            self.step += 1
            self.pause()
        return self.head(self.layers(rows)).float().pow(2).mean()

    def pause(self):
        if is_due(self.step) and KIND == "asleep-forward":
            begins()
            time.sleep(FOR_EVER)
        if is_due(self.step) and KIND == "one-behind":
            begins()
            raise ValueError("a bad row")
        seconds = SCENE["step_ms"] / 1000
        if KIND == "honest-irregular":
            seconds = random.choice(IRREGULAR_S)
        elif KIND == "honest-compilation" and self.step == 1 and dist.get_rank() == SCENE["culprit"]:
            begins()
            compiler = (
                "import time; end = time.time() + float(__import__('sys').argv[1])\nwhile time.time() < end: pass"
            )
            subprocess.run([sys.executable, "-c", compiler, str(COMPILATION_S)], check=True)
        compute(seconds)


def compute(seconds):
    """Keep the device busy; on the CPU, sleep as if a device worked."""
    if SCENE["cuda"]:
        torch.cuda._sleep(int(seconds * CYCLES_PER_SECOND))
    else:
        time.sleep(max(seconds, 0.02))


class Trainer:
    """The training loop."""

    def __init__(self):
        deepspeed.init_distributed("nccl" if SCENE["cuda"] else "gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        random.seed(self.rank * 1000 + AT)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "bf16": {"enabled": SCENE["cuda"]},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": int(SCENE["engine"][-1]), "stage3_param_persistence_threshold": 0},
            "steps_per_print": 100_000,
        }
        model = Model()
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.step = 0

    def train(self):
        rows = Rows(self.rank == SCENE["culprit"])
        for batch in DataLoader(rows, batch_size=None, num_workers=int(KIND == "worker-hang")):
            self.step += 1
            if self.step == AT:
                (FOLDER / f"ready-{self.rank}").write_text(str(time.time()))
            if KIND in ("left-loop", "left-script") and is_due(self.step):
                begins()
                break
            if KIND == "one-behind":
                self.count_tokens()
                try:
                    self.update(batch)
                except ValueError as error:
                    print("skipped a batch:", error, flush=True)
                continue
            self.update(batch)
            self.between_steps()
        if KIND != "left-script":
            dist.barrier()
            dist.destroy_process_group()

    def count_tokens(self):
        tokens = torch.ones(1, device=self.engine.device)
        dist.all_reduce(tokens)
        return tokens.item()

    def update(self, batch):
        dtype = torch.bfloat16 if SCENE["cuda"] else torch.float32
        loss = self.engine(batch.to(self.engine.device, dtype))
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def between_steps(self):
        if is_due(self.step) and KIND == "stopped":
            begins()
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.step != AT:
            return
        act = getattr(self, KIND.replace("-", "_"), None)
        if act is not None:
            act(self.rank == SCENE["culprit"])

    # Hangs.

    def save_one(self, mine):
        if mine:
            begins()
            self.engine.save_checkpoint(str(FOLDER / "checkpoint"))

    def collective_if(self, mine):
        if mine:
            begins()
            best = torch.ones(1, device=self.engine.device)
            dist.all_reduce(best)
            best.item()

    def gather_one(self, mine):
        if mine:
            begins()
            self.gather()

    def gather_unequal(self, mine):
        begins()
        for _ in range(2 if mine else 1):
            self.gather()

    def gather(self):
        with deepspeed.zero.GatheredParameters(list(self.engine.module.head.parameters())):
            return sum(parameter.float().sum().item() for parameter in self.engine.module.head.parameters())

    def unequal_sizes(self, mine):
        begins()
        rows = torch.ones(1 << 24 if mine else 1 << 12, device=self.engine.device)
        dist.all_reduce(rows)
        rows.sum().item()

    def honest_run(self, _mine):
        begins()

    honest_irregular = honest_run

    # Honest work of one rank while the others wait at a barrier.

    def honest_checkpoint(self, mine):
        if mine:
            begins()
            end = time.monotonic() + CHECKPOINT_S
            with (FOLDER / "model.pt").open("wb", buffering=0) as file:
                while time.monotonic() < end:
                    file.seek(0)
                    file.write(bytes(1 << 22))
                    os.fsync(file.fileno())
                    time.sleep(0.3)
        dist.barrier()

    def honest_evaluation(self, mine):
        if mine:
            begins()
            self.without_gradients(EVALUATION_S)
        dist.barrier()

    def honest_generation(self, mine):
        if mine:
            begins()
            self.generate(GENERATION_S)
        dist.barrier()

    def generate(self, seconds):
        self.without_gradients(seconds)

    def without_gradients(self, seconds):
        module, end = self.engine.module, time.monotonic() + seconds
        dtype = torch.bfloat16 if SCENE["cuda"] else torch.float32
        module.eval()
        with torch.no_grad():
            while time.monotonic() < end:
                module(torch.randn(4, WIDTH, device=self.engine.device, dtype=dtype)).item()
                compute(0.05)
        module.train()

    def honest_upload(self, mine):
        if mine:
            begins()
            thread = threading.Thread(target=upload)
            thread.start()
            thread.join()
        dist.barrier()


def upload():
    """Send to a slow server on this host, as the upload of a checkpoint does."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve():
        other, _ = listening.accept()
        while other.recv(65536):
            time.sleep(0.2)

    threading.Thread(target=serve, daemon=True).start()
    connection = socket.create_connection(listening.getsockname())
    end = time.monotonic() + UPLOAD_S
    while time.monotonic() < end:
        connection.sendall(bytes(65536))


if __name__ == "__main__":
    (FOLDER / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    Trainer().train()
