"""What goes wrong around a training that goes on: ``python bench/chaos.py [--runs 40] [--parallel 2] [--seed 1]``.

Each run is two real ranks on gloo under ``ftmon run --detach -- torchrun ...``, an app attached, and two blows drawn
from the seed: kill -9 or SIGSTOP (and CONT) of the hub, the app, a rank, the job's launcher or ftmon's own; a disk that
is full for a while; a clock that stands still (all of the monitor stopped, and continued much later). Then the run is
killed. Asserted each time:

- training: while only the monitor was hit, the ranks' own step times show no pause (their own file says so);
- the recording opens, and what is missing of the steps is at most a second in a piece;
- the verdict: a rank that was hit is named or nobody is, and nobody else ever is;
- nothing is left: no process with the run's mark, no socket; the app either shows the end, or was killed.

Blows that need several hosts (the agent, a cut link) are dealt by ``tests/integration/test_two_hosts.py``.
"""

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ftmon.protocol.control import Alert
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.rundir import RunDir
from ftmon.protocol.telemetry import Step
from ftmon.trainer import processes

from bench.scenarios.scene import FTMON, named_processes, sockets_of

STEP_SECONDS = 0.05
PAUSE_STEPS = 6
"""A step this many times as long as usual is a pause."""
LOST_SECONDS = 1.0
SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
open(os.path.join(sys.argv[1], f"pid-{rank}"), "w").write(str(os.getpid()))
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
out = open(os.path.join(sys.argv[1], f"steps-{rank}"), "w", buffering=1)
rows = torch.ones(4, 16)
step = 0
while True:
    step += 1
    loss = model(rows).pow(2).mean()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(float(sys.argv[2]))
    out.write(json.dumps([step, time.time()]) + "\\n")
"""
MONITOR = ("kill hub", "stop hub", "kill app", "stop app", "stop launcher", "full disk", "stop monitor")
"""What must not be felt by the training."""
TRAINING = ("stop rank", "kill rank", "kill torchrun", "kill launcher")
SIZE = 24
"""MiB of the file system that fills up."""


class ChaosError(Exception):
    """The machine could not do what is asked of it."""


class Chaos:
    """One run and its blows."""

    def __init__(self, number: int, seed: int, disk: bool) -> None:
        self.draw = random.Random(f"{seed}/{number}")
        first = self.draw.choice([blow for blow in MONITOR if disk or blow != "full disk"])
        self.blows = [first, self.draw.choice(MONITOR[:5] + TRAINING)]
        self.number = number
        self.folder = Path(tempfile.mkdtemp(prefix=f"chaos-{number}-"))
        self.disk = self.folder / "disk"
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("FTMON_")}
        self.environment |= {"FTMON_HOME": str(self.disk / "home"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.wrong: list[str] = []
        self.hit: set[int] = set()
        self.touched_at: float | None = None
        self.app: subprocess.Popen[bytes] | None = None
        self.app_killed = False

    def play(self) -> dict[str, Any]:
        begun = time.monotonic()
        run: RunDir | None = None
        mounted = False
        found: dict[str, Any] = {"run": self.number, "blows": self.blows}
        try:
            self.disk.mkdir()
            if "full disk" in self.blows:
                subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "tmpfs", self.disk], check=True)
                mounted = True
            run = self._start()
            for blow in self.blows:
                self._wait_steps(20)
                getattr(self, "_" + blow.replace(" ", "_"))(run)
                if blow in TRAINING:
                    break
            found |= self._judge(run)
        except (ChaosError, FtmonError, OSError, subprocess.SubprocessError) as error:
            self.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            self._clean(run)
            if mounted:
                subprocess.run(["umount", "-l", self.disk], check=False)
            shutil.rmtree(self.folder, ignore_errors=True)
        return {**found, "wrong": self.wrong, "wall_s": round(time.monotonic() - begun, 1)}

    # Begin.

    def _start(self) -> RunDir:
        script = self.folder / "train.py"
        script.write_text(SCRIPT)
        job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
        self._ftmon("run", "--detach", "--name", "chaos", "--", *job, str(self.folder), str(STEP_SECONDS))
        run = RunDir(next((self.disk / "home" / "runs").iterdir()))
        self._wait(lambda: all((self.folder / f"steps-{rank}").exists() for rank in (0, 1)), 120, "the first step")
        words = [*FTMON, "attach", run.id, "--plain"]
        self.app = subprocess.Popen(
            words, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return run

    def _ftmon(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*FTMON, *words], env=self.environment, capture_output=True, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def _wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise ChaosError(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.05)
        return value

    def _wait_steps(self, more: int) -> None:
        def count() -> int:
            return (self.folder / "steps-0").read_bytes().count(b"\n")

        before = count()
        self._wait(lambda: count() >= before + more, 60, "the training goes on")

    # Blows.

    def _hub(self, run: RunDir) -> int:
        return self._wait(run.living_hub, 40, "a living hub").process.pid

    def _launcher(self, run: RunDir) -> int:
        launcher = run.read_run().launcher
        if launcher is None:
            raise ChaosError("no launcher")
        return launcher.pid

    def _pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def _freeze(self, *pids: int) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.draw.uniform(1.0, 8.0))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _kill_hub(self, run: RunDir) -> None:
        pid = self._hub(run)
        os.kill(pid, signal.SIGKILL)
        self._wait(lambda: (hub := run.living_hub()) is not None and hub.process.pid != pid, 40, "another hub")

    def _stop_hub(self, run: RunDir) -> None:
        self._freeze(self._hub(run))

    def _kill_app(self, run: RunDir) -> None:
        del run
        assert self.app is not None
        self.app.kill()
        self.app.wait(20)
        self.app_killed = True

    def _stop_app(self, run: RunDir) -> None:
        del run
        assert self.app is not None
        if self.app.poll() is None:
            self._freeze(self.app.pid)

    def _stop_launcher(self, run: RunDir) -> None:
        self._freeze(self._launcher(run))

    def _stop_monitor(self, run: RunDir) -> None:
        """The monitor's clock stands still: nothing of it looks, and then much time has passed at once."""
        assert self.app is not None
        app = [self.app.pid] if self.app.poll() is None else []
        self._freeze(self._launcher(run), self._hub(run), *app)

    def _full_disk(self, run: RunDir) -> None:
        filler = self.disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        deadline = time.monotonic() + 4
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:  # what it made free, too
                file.write(bytes(4096))
            time.sleep(0.2)
        filler.unlink()
        time.sleep(3)

    def _stop_rank(self, run: RunDir) -> None:
        rank = self.draw.randrange(2)
        self._touch(rank)
        os.kill(self._pid(rank), signal.SIGSTOP)
        self._wait(lambda: self._alerts(run, "hang"), 30, "an alert of the stopped rank")
        if self.draw.random() < 0.5:
            os.kill(self._pid(rank), signal.SIGCONT)
            self._wait_steps(20)
            self._wait(lambda: all(alert.resolved for alert in self._alerts(run, "hang")), 30, "the alert's end")

    def _kill_rank(self, run: RunDir) -> None:
        rank = self.draw.randrange(2)
        self._touch(rank)
        os.kill(self._pid(rank), signal.SIGKILL)
        self._wait(run.read_exit, 60, "the run's end")

    def _kill_torchrun(self, run: RunDir) -> None:
        self._touch()
        job = processes.read(self._pid(0))
        if job is None:
            raise ChaosError("rank 0 is gone")
        os.kill(job.parent, signal.SIGKILL)
        self._wait(run.read_exit, 60, "the run's end")

    def _kill_launcher(self, run: RunDir) -> None:
        """Nobody restarts a hub any more; the job goes on."""
        os.kill(self._launcher(run), signal.SIGKILL)
        self._wait_steps(20)

    def _touch(self, *ranks: int) -> None:
        self.touched_at = time.time()
        self.hit.update(ranks)

    # Judgement.

    def _alerts(self, run: RunDir, *kinds: str) -> list[Alert]:
        with contextlib.suppress(FtmonError), Reader(run.recording) as reader:
            return [alert for alert in reader.alerts() if alert.kind in kinds]
        return []

    def _judge(self, run: RunDir) -> dict[str, Any]:
        killed = time.time()
        if run.read_exit() is None:
            done = self._ftmon("kill", run.id, "--yes")
            if done.returncode:
                self.wrong.append(f"kill: {(done.stdout + done.stderr).strip()[-300:]}")
        with contextlib.suppress(ChaosError):
            self._wait(lambda: not self._living(run), 40, "the run's end")
        for process in self._living(run):
            self.wrong.append(f"left: pid {process.pid} {process.name} {process.state}")
        self.wrong += [f"left: {path}" for path in sockets_of(run)]
        if not self.app_killed and self.app is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.app.wait(20)
            if self.app.returncode is None:
                self.wrong.append("the app has not ended with the run")
        steps = {rank: self._own_steps(rank) for rank in (0, 1)}
        until = min(self.touched_at or killed, killed)
        pause = max(self._pause(steps[rank], until) for rank in (0, 1))
        missing, gap, told = self._recorded(run, steps, until)
        for alert in self._alerts(run, "hang", "died", "failure", "oom"):
            named = set(alert.evidence.get("hung", [] if alert.rank is None else [alert.rank]))
            if alert.severity != "info" and not named <= self.hit:
                self.wrong.append(f"wrong verdict: {alert.title}")
        return {"pause_steps": round(pause, 1), "missing": missing, "gap_s": round(gap, 2), "told": told}

    def _own_steps(self, rank: int) -> list[tuple[int, float]]:
        lines = (self.folder / f"steps-{rank}").read_text().splitlines()
        return [tuple(json.loads(line)) for line in lines if line.endswith("]")]

    def _pause(self, steps: list[tuple[int, float]], until: float) -> float:
        """How many usual steps the longest one took, before the training itself was hit."""
        times = [t for _, t in steps if t < until]
        gaps = [b - a for a, b in pairwise(times[10:])]
        longest = max(gaps) / statistics.median(gaps)
        if longest > PAUSE_STEPS and max(gaps) > 0.5:
            self.wrong.append(f"the training paused {max(gaps):.2f} s")
        return longest

    def _recorded(self, run: RunDir, steps: dict[int, list[tuple[int, float]]], until: float) -> tuple[int, float, str]:
        """Compare the recording with what the ranks themselves noted: steps missing, the longest gap, what is told."""
        recorded: dict[int, set[int]] = {0: set(), 1: set()}
        with Reader(run.recording) as reader:
            after = 0
            while frames := reader.frames(after, 5000):
                after = frames[-1].seq
                for frame in frames:
                    if isinstance(frame.message, Step):
                        recorded[frame.message.rank].add(frame.message.step)
            told = reader.info().missing
        missing, longest = 0, 0.0
        for rank, own in steps.items():
            lost = [t for step, t in own if step not in recorded[rank] and t < until - 1.0]
            missing += len(lost)
            begun = previous = None
            for t in lost:
                if previous is None or t - previous > 4 * STEP_SECONDS:
                    begun = t
                previous = t
                longest = max(longest, t - (begun or t) + STEP_SECONDS)
        if (
            longest > LOST_SECONDS + STEP_SECONDS
            and "full disk" not in self.blows
            and "kill launcher" not in self.blows
        ):
            self.wrong.append(f"{missing} steps are missing, {longest:.1f} s in a piece ({told})")
        return missing, longest, told

    def _living(self, run: RunDir) -> list[processes.Process]:
        app = self.app.pid if self.app is not None else 0
        return [process for process in named_processes(run) if process.pid != app]

    def _clean(self, run: RunDir | None) -> None:
        if self.app is not None and self.app.poll() is None:
            self.app.send_signal(signal.SIGCONT)
            self.app.kill()
            self.app.wait(20)
        for _ in range(20):
            living = named_processes(run) if run is not None else []
            for process in living:
                with contextlib.suppress(OSError):
                    processes.send_signal(process, signal.SIGKILL)
            if not living:
                return
            time.sleep(0.2)


def can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--json", default="chaos.jsonl", help="where results go, one a line")
    args = parser.parse_args()
    disk = can_mount()
    if not disk:
        print("no file system can be mounted here: no full disks")
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(args.first, args.first + args.runs):
        waiting.put(number)
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            row = Chaos(number, args.seed, disk).play()
            with lock:
                rows.append(row)
                with open(args.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
                print(
                    f"{number:3} {' + '.join(row['blows']):32} {row['wall_s']:5} s  {row['wrong'] or 'well'}",
                    flush=True,
                )

    workers = [threading.Thread(target=work) for _ in range(args.parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print("\n| blow | runs | all well | longest step, in usual ones | longest gap in the recording |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for blow in (*MONITOR, *TRAINING):
        struck = [row for row in rows if blow in row["blows"]]
        if struck:
            pause = max((row.get("pause_steps", 0.0) for row in struck), default=0.0)
            gap = max((row.get("gap_s", 0.0) for row in struck), default=0.0)
            print(f"| {blow} | {len(struck)} | {sum(not row['wrong'] for row in struck)} | {pause:.1f} | {gap:.2f} s |")
    bad = [row for row in rows if row["wrong"]]
    for row in bad:
        print(f"run {row['run']} ({', '.join(row['blows'])}): {row['wrong']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
