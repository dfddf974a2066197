"""What a hub hears, without the hub: binds its sockets, keeps every message of every rank."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import rank_jobs
import zmq
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Command
from ftmon.protocol.messages.memory import StepTrace
from ftmon.protocol.messages.telemetry import Goodbye, Hello, Step
from ftmon.protocol.run import rundir
from ftmon.trainer.host.processes import INJECT_DIR
from ftmon.trainer.hub import trace_worker
from ports import free_port

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
BIN = Path(sys.executable).parent


def alone() -> dict[str, str]:
    """Return the environment of a job's only rank."""
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return {name: str(value) for name, value in place.items()}


class Collector:
    def __init__(self, home: Path):
        self.home = home
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FTMON_HOME", str(home))
            self.run = rundir.create("probe-test", ["test"], "run")
        self.context = zmq.Context()
        self.telemetry = sockets.hub_socket(self.context, "telemetry")
        self.ranks = sockets.hub_socket(self.context, "ranks")
        sockets.bind(self.telemetry, self.run.ipc_address("telemetry"))
        sockets.bind(self.ranks, self.run.ipc_address("ranks"))
        self.messages, self.headers, self.answers = [], [], []
        self.commands, self.job = 0, None

    def environment(self, **extra):
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        path = os.pathsep.join(filter(None, (str(INJECT_DIR), os.environ.get("PYTHONPATH"))))
        cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        plain = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        run = {"FTMON_HOME": str(self.home), "FTMON_RUN": str(self.run.path)}
        return {**environment, **run, "PYTHONPATH": path, **cpu, **plain, **extra}

    def start(self, *command, **extra):
        self.log = self.run.logs / "launcher.log"
        with self.log.open("wb") as log:
            self.job = subprocess.Popen(
                [str(word) for word in command],
                env=self.environment(**extra),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.run.path,
                # As ftmon's launcher does: a shell starts what is in its background with SIGINT ignored.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        return self

    def fork(self, script, *words, ranks=1, **extra):
        """Start a script of ``SCRIPTS`` as ``start`` does, on ranks that are forks of a process with torch loaded."""
        self.log = self.run.logs / "launcher.log"
        self.log.touch()
        words = [str(word) for word in (SCRIPTS / script, *words)]
        self.job = rank_jobs.ForkedScript(words, ranks, self.environment(**extra), self.log, self.run.path)
        return self

    def collect(self, until, seconds=400):
        """Receive until ``until(self)`` holds; fails, with the job's output, when it does not in time."""
        deadline = time.monotonic() + seconds
        while not until(self):
            if self.telemetry.poll(100):
                self._receive()
            while self.ranks.poll(0):
                _, _, body = self.ranks.recv_multipart()
                self.answers.append(wire.decode_body(body))
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing after {seconds} s; got {self.kinds()}\n{self.output()}")
        return self

    def command(self, identity, verb, **args):
        self.commands += 1
        command = Command(f"c{self.commands}", verb, args)
        self.ranks.send_multipart([identity.encode(), *wire.encode("hub", 1, time.time(), command)])
        return command.id

    def finish(self, seconds=400):
        """Receive until the job has ended and everything it sent has come."""
        self.collect(lambda c: c.job.poll() is not None, seconds)
        while self.telemetry.poll(50 if self._all_said_goodbye() else 10_000 if self.of(Hello) else 1000):
            self._receive()
        return self

    def _all_said_goodbye(self):
        """Return whether each rank's last message has come."""
        return 0 < len({(hello.rank, hello.pid) for hello in self.of(Hello)}) <= len(self.of(Goodbye))

    def _receive(self):
        """Keep one message; in place of a step's trace, what the hub's worker finds in it."""
        header, body = self.telemetry.recv_multipart()
        self.headers.append(wire.decode_header(header))
        message = wire.decode_body(body)
        if isinstance(message, StepTrace):
            found = trace_worker.find(body)
            assert not found.error, found.error
            self.messages += found.messages
        else:
            self.messages.append(message)

    def of(self, kind, rank=None):
        return [m for m in self.messages if isinstance(m, kind) and (rank is None or m.rank == rank)]

    def kinds(self):
        names = [type(message).__name__ for message in self.messages]
        return {name: names.count(name) for name in set(names)}

    def output(self):
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.run.logs.iterdir()))

    def parts(self, counts, rank=None):
        """Return a rank's steps by what it trained, whose numbers are ``counts``; there are no others."""
        assert self.job.returncode == 0, self.output()
        steps = iter(self.of(Step, rank))
        found = {name: list(islice(steps, count)) for name, count in counts.items()}
        assert list(steps) == []
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        if self.job is not None and self.job.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.job.pid, 9)
            self.job.wait(200)
        self.telemetry.close()
        self.ranks.close()
        self.context.term()
        self.run.remove_sockets(("telemetry", "ranks"))
