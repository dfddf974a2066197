"""A rank that trains nothing and speaks the whole protocol through real sockets, for the tests of the hub.

Options come as a JSON object in argv[1]: ``rank``, ``world``, ``rate`` (steps a second), ``steps`` (0: for ever),
``workers`` (child processes in sessions of their own), ``deaf`` (ignores INT and TERM), ``native`` (after the first
step, holds the GIL in C for ever), ``agrees`` (answers ``stop`` with yes), ``silent`` (never answers), ``exit``
(its exit status), ``gpu_bytes`` (CUDA memory it holds), ``pretends`` (name of a GPU that it says it is on),
``lingers`` (lives on after its goodbye), ``flush_s`` (seconds that its last messages wait for a hub),
``awaits`` (a file that must exist before its last step),
``traces`` (files of ``StepTrace`` messages, sent after its first step),
``daemons`` (forks twice: one process as it is, one with an environment of its own).
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import zmq
from ftmon.protocol.host.process import this_process
from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command, Result
from ftmon.protocol.messages.telemetry import DeviceInfo, Goodbye, Hello, PhaseRecord, Span, Stacks, Step
from ftmon.protocol.run.rundir import RunDir


class FakeRank:
    def __init__(self, options):
        self.options = options
        self.rank = int(options.get("rank", 0))
        self.flush_ms = 1000 * int(options.get("flush_s", 200))
        me = this_process()
        on_gpu = options.get("gpu_bytes") or options.get("pretends")
        self.hello = Hello(
            rank=self.rank,
            local_rank=self.rank,
            world_size=int(options.get("world", 1)),
            host=os.uname().nodename,
            pid=me.pid,
            start_ticks=me.start_ticks,
            device=DeviceInfo("cuda" if on_gpu else "cpu", 0, options.get("pretends") or "test", 2**30),
            memory_measure="cuda" if on_gpu else "glibc",
            time=time.time(),
        )
        self.src = f"rank-{self.rank}-{me.pid}-{me.start_ticks}"
        run = RunDir(os.environ.get("FTMON_PLACE") or os.environ["FTMON_RUN"])
        self.telemetry = zmq.Context()
        self.push = peer_socket(self.telemetry, "telemetry")
        self.push.connect(run.ipc_address("telemetry"))
        self.commands = zmq.Context()
        self.dealer = peer_socket(self.commands, "ranks", self.src.encode())
        self.dealer.connect(run.ipc_address("ranks"))
        self.lock = threading.Lock()
        self.seq = 0
        self.step = 0
        self.stop = threading.Event()

    def send(self, message):
        with self.lock:
            self.seq += 1
            self.push.send_multipart(wire.encode(self.src, self.seq, time.time(), message))

    def answer_commands(self):
        try:
            self.answer_until_terminated()
        except zmq.ZMQError:  # the sockets are closed
            pass
        finally:
            self.dealer.close(linger=self.flush_ms)

    def answer_until_terminated(self):
        while True:
            frames = self.dealer.recv_multipart()
            command = wire.decode_body(frames[1])
            if not isinstance(command, Command) or self.options.get("silent"):
                continue
            if command.verb == "identify":
                self.send(self.hello)
                continue
            ok = True
            if command.verb == "stacks":
                self.send(Stacks(self.rank, time.time(), "Thread main: train()", str(command.args.get("reason", ""))))
            elif command.verb == "stop":
                ok = bool(self.options.get("agrees"))
            self.dealer.send_multipart(
                wire.encode(self.src, 0, time.time(), Result(command.id, ok, command.verb, "" if ok else "foreign"))
            )
            if ok and command.verb == "stop":
                self.stop.set()  # not before: the process may be gone before its answer is

    def train(self):
        rate = float(self.options.get("rate", 20))
        limit = int(self.options.get("steps", 0))
        while not self.stop.is_set() and not (limit and self.step >= limit):
            self.stop.wait(1 / rate)
            while self.step + 1 == limit and self.options.get("awaits") and not Path(self.options["awaits"]).exists():
                time.sleep(0.05)
            self.step += 1
            now = time.time()
            span = Span(1000, 2000, 3000)
            phases = [
                PhaseRecord(name, 1000 * i, 1000, span, span, resident=span)
                for i, name in enumerate(("data", "forward", "backward", "optimizer"))
            ]
            self.send(Step(self.rank, self.step, now, 4000, phases, loss=1.0 / self.step, tokens=64))
            for name in self.options.get("traces", ()) if self.step == 1 else ():
                self.send(wire.decode_body(Path(name).read_bytes()))
            if self.options.get("native"):
                ctypes.PyDLL(None).sleep(600)  # the threads of zmq, which send the step, need no lock of Python's
        reason = "stopped" if self.stop.is_set() else "finished"
        self.send(Goodbye(self.rank, time.time(), self.step, reason))


def daemon(run):
    """Run a daemon; return once it is another program, or has closed ``ready``: it is closed at exec."""
    waiting, ready = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            run(ready)
        os._exit(0)
    os.wait()
    os.close(ready)
    os.read(waiting, 1)
    os.close(waiting)


def sleep_on(ready):
    os.close(ready)
    time.sleep(600)


def main():
    options = json.loads(sys.argv[1])
    options.setdefault("rank", int(os.environ.get("RANK", "0")))
    if options.get("daemons"):
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        daemon(sleep_on)
        daemon(lambda _: os.execve(sys.executable, sleep, {}))
    os.environ["FTMON_RANK_PID"] = str(os.getpid())
    if options.get("deaf"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(int(options.get("workers", 0))):
        subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, stdin=subprocess.DEVNULL
        )
    if options.get("gpu_bytes"):
        import torch

        held = torch.ones(int(options["gpu_bytes"]), dtype=torch.uint8, device="cuda")
        held.sum().item()
    rank = FakeRank(options)
    rank.send(rank.hello)
    threading.Thread(target=rank.answer_commands, daemon=True).start()
    print(f"rank {rank.rank} trains", flush=True)
    rank.train()
    rank.push.close(linger=rank.flush_ms)  # the hub may not be there yet
    rank.telemetry.term()  # waits until it has all
    rank.commands.term()
    if options.get("lingers"):
        time.sleep(600)
    status = int(options.get("exit", 0))
    sys.stdout.flush()
    os._exit(status) if status else sys.exit(0)


if __name__ == "__main__":
    main()
