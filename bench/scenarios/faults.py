"""What goes wrong, and where in the loop. The moment it begins is noted in the scene's folder, for the runner."""

import contextlib
import ctypes
import faulthandler
import fcntl
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

LONG_SECONDS = 14.0
UPLOAD_SECONDS = 24.0
EVALUATION_SECONDS = 70.0
"""Longer than any phase but evaluation, checkpoint and code between steps may take."""
RETRIES, RETRY_SECONDS = 6, 3.0
MODERATE_SECONDS = 6.0
FOR_EVER = 100_000


UPLOAD = """
import socket, threading, time
def upload(seconds):
    listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen(1)
    def serve():
        other, _ = listening.accept()
        while other.recv(65536): time.sleep(0.2)
    threading.Thread(target=serve, daemon=True).start()
    connection = socket.create_connection(listening.getsockname())
    end = time.monotonic() + seconds
    while time.monotonic() < end: connection.sendall(bytes(65536))
"""
"""Sends to a slow server (on this host): what uploads a checkpoint does the same."""
HOLD = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print(flush=True); time.sleep(1e5)"


class Fault:
    """The fault of one scene, as the rank ``rank`` of ``world`` meets it."""

    def __init__(self, scene, rank, world):
        self.kind = scene["kind"]
        self.at = scene["at"]
        self.rank = rank
        self.mine = scene["culprit"] in (rank, -1)
        self.folder = Path(scene["folder"])
        self.step = 0
        self.pairs = []
        if self.kind == "two-groups":
            self.pairs = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        elif self.kind == "ring-of-groups":
            self.pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
        elif self.kind == "subgroup":
            self.pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        self.libc = ctypes.CDLL(None)

    # Where the loop calls.

    def before_loop(self):
        if self.kind == "flock-first-step" and self.mine:
            path = self.folder / "dataset.lock"
            holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
            holder.stdout.readline()
            with path.open("w") as file:
                self.now()
                fcntl.flock(file, fcntl.LOCK_EX)
        elif self.kind == "build-lock":
            from torch.utils.file_baton import FileBaton

            folder = self.folder / "extension"
            folder.mkdir(exist_ok=True)
            for name in ("lock", "build.ninja"):
                (folder / name).touch()
                os.utime(folder / name, (1e9, 1e9))  # of a build that was killed long ago
            dist.barrier()
            self.once()
            FileBaton(str(folder / "lock")).wait()

    @property
    def skips_collectives(self):
        """From now on this rank enters no all_reduce any more."""
        skips = self.kind == "no-sync-one" and self.mine and self.step >= self.at
        if skips:
            self.once()
        return skips

    def begin(self, step):
        self.step = step
        if step == self.at:
            (self.folder / f"ready-{self.rank}").write_text(str(time.time()))

    def reading(self, step):
        """In the data set; with a worker, in the worker."""
        due = step == self.at and self.mine
        if due and self.kind in ("sleep-in-loader", "loader-worker", "deepspeed-loader"):
            self.now()
            time.sleep(FOR_EVER)
        elif due and self.kind == "dead-disk":
            pipe = self.folder / "pipe"
            os.mkfifo(pipe)
            self.now()
            with pipe.open("rb") as file:
                file.read()
        elif due and self.kind in ("stall-that-ends", "long-batch"):
            self.now()
            time.sleep(LONG_SECONDS if self.kind == "stall-that-ends" else MODERATE_SECONDS)
        elif step >= self.at and self.mine and self.kind in ("slow-disk", "ddp-data"):
            self.once()
            time.sleep(0.3)

    def batches(self, loader):
        """Batches as a script gets them: of a loader, or of what stands between it and the loop."""
        rows = iter(loader)
        for number in itertools.count(1):
            late = self.mine and number >= self.at
            if late and self.kind == "deepspeed-generator":
                self.once()
                time.sleep(0.3)
            elif late and self.kind == "ddp-outside":
                self.once()
                end = time.monotonic() + 0.3
                while time.monotonic() < end:
                    sum(range(200))
            try:
                yield next(rows)
            except StopIteration:
                return

    @property
    def slow_from_now(self):
        return self.mine and self.step >= self.at

    def micro_steps(self):
        """How many micro-steps this rank makes of a step."""
        if self.kind != "ddp-uneven" or not self.mine:
            return 1
        self.once()
        return 2

    def computing(self):
        """In forward."""
        if self.kind == "ddp-irregular":
            self.once()
            time.sleep(random.choice((0.0, 0.0, 0.0, 0.1, 0.3, 0.6, 1.2, 2.4)))
        elif self.kind in ("straggler", "ddp-forward", "fsdp-forward") and self.slow_from_now:
            self.once()
            time.sleep(0.24)
        elif self.kind == "long-first-step" and self.mine and self.step == 1:
            self.now()
            deadline = time.monotonic() + LONG_SECONDS
            while time.monotonic() < deadline:  # as a compiler or a search for the fastest kernel
                sum(range(10_000))
        elif self.kind == "asleep-first-step" and self.mine and self.step == 1:
            self.now()
            time.sleep(1e5)
        elif self.kind == "long-step" and self.step == self.at:
            self.once()
            time.sleep(MODERATE_SECONDS)

    def before_collective(self):
        """Between forward (or backward) and the first collective of the step."""
        if self.kind == "subgroup":
            group = self.pairs[self.rank // 2]
            if self.due:
                self.now()
                time.sleep(FOR_EVER)
            dist.all_reduce(torch.ones(4), group=group)
            return
        if self.step != self.at:
            return
        act = getattr(self, "_" + self.kind.replace("-", "_"), None)
        if act is not None and (self.mine or self.kind in ("recv-without-send",)):
            act()

    def between_steps(self, model):
        """After the optimizer step: checkpoints, evaluations, and work of the loop's own."""
        if self.kind in ("ddp-idle", "fsdp-idle", "deepspeed-idle") and self.slow_from_now:
            self.once()
            time.sleep(0.3)
        if self.kind == "ddp-evaluation" and self.step % 5 == 0 and self.mine:
            self.once()
            with torch.no_grad():
                for _ in range(5):
                    model.module(torch.ones(4, 16, device=next(model.parameters()).device))
        if self.kind in ("checkpoint-hang", "checkpoint-hang-gil", "long-checkpoint") and self.step % 5 == 0:
            if self.mine:
                torch.save(model.state_dict(), self.target())
            dist.barrier()
        if self.kind in ("long-evaluation", "deepspeed-evaluation") and self.step == self.at:
            if self.mine or self.kind == "deepspeed-evaluation":
                self.once()
                model.eval()
                deadline = time.monotonic() + LONG_SECONDS
                with torch.no_grad():
                    while time.monotonic() < deadline:
                        model(torch.ones(4, 16))
                model.train()
            dist.barrier()

        if self.step == self.at and self.kind.startswith(("honest-", "sleeping-")):
            if self.mine:
                self.once()
                self._work_between_steps(model)
            dist.barrier()

    def _work_between_steps(self, model):
        """What an honest rank does while the others wait for it in a barrier."""
        if self.kind == "honest-upload-child":
            command = [sys.executable, "-c", f"{UPLOAD}upload({UPLOAD_SECONDS})"]
            subprocess.run(command, check=True)
        elif self.kind == "honest-upload-thread":
            names = {}
            exec(UPLOAD, names)
            thread = threading.Thread(target=names["upload"], args=(UPLOAD_SECONDS,))
            thread.start()
            thread.join()
        elif self.kind == "honest-eval-module":
            deadline = time.monotonic() + EVALUATION_SECONDS
            device = next(model.parameters()).device
            model.eval()
            with torch.no_grad():
                while time.monotonic() < deadline:
                    model.module.layers(torch.randn(256, 16, device=device))
                    time.sleep(0.01)
            model.train()
        elif self.kind == "sleeping-retry":
            for _ in range(RETRIES):
                time.sleep(RETRY_SECONDS)

    @property
    def leaves_early(self):
        return self.kind == "uneven-exit" and self.mine

    def out_of_batches(self):
        if self.kind == "uneven-exit" and self.due:
            self.now()
            return True
        if self.kind == "uneven-batches" and self.due:
            self.now()
            return True
        return False

    def finishing(self):
        """After the loop, before the last barrier."""

    def leaving(self):
        """After the process group is gone."""
        if self.kind == "exit-hang" and self.mine:
            self.now()
            threading.Thread(target=time.sleep, args=(FOR_EVER,)).start()

    # What happens.

    @property
    def due(self):
        return self.mine and self.step == self.at

    def now(self):
        """Note that it begins."""
        text = json.dumps({"time": time.time(), "rank": self.rank, "pid": os.getpid()})
        temporary = self.folder / f".fault-{self.rank}"
        temporary.write_text(text)
        temporary.replace(self.folder / "fault.json")

    def once(self):
        if not (self.folder / "fault.json").exists():
            self.now()

    def target(self):
        """Where a checkpoint goes: a file, or what does not take it."""
        if self.step < self.at:
            return self.folder / "checkpoint.pt"
        self.once()
        if self.kind == "long-checkpoint":
            return SlowFile(self.folder / "checkpoint.pt", LONG_SECONDS if self.step < self.at + 5 else 0.0)
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        if self.kind == "checkpoint-hang-gil":
            return pipe  # PyTorch's own writer opens it, and the kernel waits for a reader
        file = os.open(pipe, os.O_RDWR)
        while True:  # fill it, so that the first write waits
            os.set_blocking(file, False)
            try:
                os.write(file, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(file, True)
        return os.fdopen(file, "wb", buffering=0)

    def _sleep_before_collective(self):
        self.now()
        time.sleep(FOR_EVER)

    _sleep_of_four = _deepspeed_sleep = _device_wait = _sleep_before_collective

    def _device_wait_mute(self):
        from ftmon.trainer.probe.link.publisher import Publisher

        Publisher._next_beat = lambda *_: time.sleep(FOR_EVER)  # what sends its telemetry and answers for it
        for number in signal.Signals:
            with contextlib.suppress(RuntimeError):  # those it dumps on by itself
                faulthandler.unregister(number)
        self._sleep_before_collective()

    def _busy_python(self):
        self.now()
        while True:
            pass

    def _native(self):
        self.now()
        self.libc.sleep(FOR_EVER)

    def _native_gil(self):
        self.now()
        ctypes.PyDLL(None).sleep(FOR_EVER)

    _kill_hung = _device_wait_gil = _native_gil

    def _lock(self):
        lock = threading.Lock()
        lock.acquire()
        self.now()
        lock.acquire()

    def _forked_child(self):
        self.now()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            while True:
                signal.pause()
        os.waitpid(pid, 0)

    def _two_groups(self):
        self.once()
        for group in self.pairs if self.rank == 0 else reversed(self.pairs):
            dist.all_reduce(torch.ones(4), group=group)

    def _ring_of_groups(self):
        self.once()
        mine, before = self.pairs[self.rank], self.pairs[self.rank - 1]
        dist.all_reduce(torch.ones(4), group=mine)
        dist.all_reduce(torch.ones(4), group=before)

    def _other_collective(self):
        self.now()
        dist.broadcast(torch.ones(16), src=self.rank - 1 if self.rank else 1)

    def _other_shape(self):
        self.now()
        dist.all_reduce(torch.ones(100_000))

    def _recv_without_send(self):
        if self.mine:
            self.now()
            dist.recv(torch.ones(4), src=(self.rank + 1) % 2)

    def _sigsegv(self):
        self.now()
        ctypes.string_at(0)

    def _abort(self):
        self.now()
        self.libc.abort()

    def _exit_3(self):
        self.now()
        os._exit(3)

    def _kernel_oom(self):
        Path(os.environ["SCENE_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
        self.now()
        kept = []
        while True:
            kept.append(bytearray(os.urandom(1 << 20)) * 8)

    def _exception(self):
        self.now()
        raise ValueError("the script gives up")

    _deepspeed_exception = _exception

    def _recursion(self):
        self.now()

        def again(depth):
            return again(depth + 1) + 1

        again(0)


class SlowFile:
    """A file whose disk needs ``seconds`` for what it is given."""

    def __init__(self, path, seconds):
        self.file = path.open("wb")
        self.left = seconds

    def write(self, data):
        pause, self.left = min(self.left, 3.0), max(0.0, self.left - 3.0)
        time.sleep(pause)
        return self.file.write(data)

    def flush(self):
        time.sleep(self.left)
        self.left = 0.0
        self.file.flush()
