"""One scene: start the ranks under ``ftmon run``, let it happen, wait for the verdict, kill, look for what is left."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ftmon.protocol.errors import FtmonError
from ftmon.protocol.link.sockets import CHANNELS
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import processes
from ftmon.trainer.recipe.hardware import free_port

from .. import hosts
from ..hosts import FTMON
from . import gpus, limits
from .judging import Judgement, judge
from .kinds import Kind

HERE = Path(__file__).parent
START_SECONDS = 120.0
SETTLE_SECONDS = 2.0
"""A right verdict must stand so long: what follows it may be wrong."""
END_SECONDS = 40.0
PAUSE_SECONDS = 4.0
REJOIN_SECONDS = 30.0
"""So long after a kill, at most, a host that was cut off is back."""
HUB_KILLED_SECONDS = 10.0
"""So long after a cut, at most, the hub is killed: before or after it knows of the cut."""
ENDED_SECONDS = 25.0
"""So long after a verdict, at most, the hub is given to end the run."""
LOOK_SECONDS = 0.25


class SceneError(Exception):
    """The scene could not be played: the bench's or the machine's fault, no verdict."""


class Scene:
    """One run of one kind. ``play`` returns its figures."""

    def __init__(
        self,
        kind: Kind,
        number: int,
        seed: int,
        *,
        devices: tuple[int, ...] = (),
        step_ms: float = 0.0,
        alone: bool = True,
        keep: bool = False,
    ) -> None:
        """Draw the scene's rank and step.

        Args:
            kind: what happens.
            number: of the runs of this kind.
            seed: of the draws.
            devices: the GPUs to use, a rank on each; none: gloo on the CPU.
            step_ms: time added to each step of ``deepspeed_ranks``.
            alone: no other scene uses these GPUs meanwhile, so that their memory can be compared.
            keep: keep the folder.
        """
        draw = random.Random(f"{seed}/{kind.name}/{number}")
        self.kind = kind
        self.number = number
        self.devices = devices
        self.cuda = bool(devices)
        self.step_ms = step_ms
        self.alone = alone
        self.world = len(devices) or kind.ranks
        self.culprit = draw.randrange(self.world) if kind.culprit else None
        self.at = draw.randrange(16, 24)
        if kind.name.startswith("checkpoint-") or kind.name == "long-checkpoint":
            self.at = 20
        if kind.expect in ("honest", "resolves"):
            self.at = min(self.at, kind.steps - 8)
        if kind.ends:
            self.at = kind.at or 60
        self.rejoined_after = draw.uniform(0.0, REJOIN_SECONDS)
        self.hub_killed_after = draw.uniform(0.0, HUB_KILLED_SECONDS)
        self.keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix=f"scene-{kind.name}-"))
        self.environment = self._environment()
        self.hosts: hosts.Hosts | None = None
        """Where the scene has two."""
        self.history: list[tuple[float, Alert]] = []
        self._last_seq = 0
        self._reader: Reader | None = None

    def play(self) -> dict[str, Any]:
        """Play the scene; what it started is gone afterwards, or told of."""
        begun = time.monotonic()
        found: dict[str, Any] = {"kind": self.kind.name, "run": self.number, "culprit": self.culprit, "step": self.at}
        run: RunDir | None = None
        try:
            with limits.allowed(self.kind.needs, self.environment, self.folder, self.culprit) as self.hosts:
                before = gpus.used(self.devices) if self.cuda and self.alone else None
                run = self._start()
                found |= self._act(run)
                found |= self._end(run, before)
                if self.kind.expect == "killed" and (found.get("kill_status") != 0 or found["left"]):
                    found |= {"verdict": "wrong", "said": str(found.get("kill"))}
        except (SceneError, FtmonError, OSError, RuntimeError, subprocess.SubprocessError) as error:
            found |= {"verdict": "not played", "said": f"{type(error).__name__}: {error}"}
        finally:
            self._clean(run)
        found["wall_s"] = round(time.monotonic() - begun, 1)
        found["alerts"] = list(dict.fromkeys(alert.title for _, alert in self.history))
        return found

    # Beginning.

    def _environment(self) -> dict[str, str]:
        scene = {
            "kind": self.kind.name,
            "culprit": -1 if self.culprit is None else self.culprit,
            "at": self.at,
            "folder": str(self.folder),
            "steps": self.kind.steps,
            "engine": self.kind.engine,
            "cuda": self.cuda,
            "step_ms": self.step_ms,
        }
        environment = {key: value for key, value in os.environ.items() if not key.startswith("FTMON_")}
        environment |= {"SCENE": json.dumps(scene), "FTMON_HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1"}
        if self.cuda:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.devices))
        else:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return environment

    def _start(self) -> RunDir:
        if self.hosts is not None:
            return self.hosts.start(self.kind.name, HERE / "ranks.py")
        scripts = {"health": "health_ranks.py", "scaler": "health_ranks.py"}
        scripts |= dict.fromkeys(("zero2", "zero3"), "deepspeed_ranks.py")
        script = str(HERE / scripts.get(self.kind.engine, "ranks.py"))
        if self.kind.ends:  # outside of the checkout: in an editable installation that counts as a library
            script = shutil.copy(script, self.folder / "train.py")
        if self.kind.engine == "deepspeed":
            program = shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))
            job = [program, "--num_gpus", str(self.world), "--master_port", str(free_port()), script]
        else:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            job = [*torchrun, "--nproc-per-node", str(self.world), script]
        on_hang = ["--on-hang", "kill", "--hang-grace", "5"] if self.kind.ends else []
        self._ftmon("run", "--detach", "--name", self.kind.name, *on_hang, "--", *job)
        runs = list((self.folder / "home" / "runs").iterdir())
        if len(runs) != 1:
            raise SceneError("ftmon run made no run")
        return RunDir(runs[0])

    def _ftmon(self, *words: str, seconds: float = 90.0) -> "subprocess.CompletedProcess[str]":
        line = [*FTMON, *words] if self.hosts is None else self.hosts.words(*words)
        return subprocess.run(
            line, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False,
            stdin=subprocess.DEVNULL, cwd=self.folder,
        )  # fmt: skip

    # What happens.

    def _act(self, run: RunDir) -> dict[str, Any]:
        fault_file = self.folder / "fault.json"
        self._wait(lambda: self._ready() or fault_file.exists() or run.read_exit(), START_SECONDS, run)
        fault = self._strike(run)
        if fault is None and self.kind.name not in ("nothing", "ddp-nothing", "kill") and self.kind.expect != "well":
            self._wait(lambda: fault_file.exists() or run.read_exit(), START_SECONDS, run)
            if not fault_file.exists():
                raise SceneError(f"the run ended before its fault: {run.read_exit()}; {_tail(run)}")
            fault = json.loads(fault_file.read_text())["time"]
        if self.kind.expect == "killed":
            time.sleep(SETTLE_SECONDS)
            self._read_alerts(run)
            return {"verdict": "false alarm" if self.history else "right", "said": ""}
        judgement = self._await_verdict(run)
        found: dict[str, Any] = {"verdict": judgement.verdict, "said": judgement.title}
        if judgement.at is not None and fault is not None:
            found["seconds"] = round(judgement.at - fault, 2)
        if self.kind.ends and self.kind.expect != "honest":
            end = self._until_ended(run)
            found["ended"] = end is not None and end.cause.startswith("hang")
            if end is not None and fault is not None:
                found["ended_s"] = round(end.time - fault, 1)
        elif self.kind.expect in ("stall", "tangle", "exit", "cut"):
            found |= self._status(run)
            named = [] if self.kind.expect == "cut" else [self.culprit]
            if found["verdict"] == "right" and found["hung"] not in ([], named):
                found |= {"verdict": "wrong", "said": f"ftmon status calls ranks {found['hung']} hung"}
        return found

    def _until_ended(self, run: RunDir) -> Any:
        deadline = time.monotonic() + ENDED_SECONDS
        while (end := run.read_exit()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return end

    def _ready(self) -> bool:
        return all((self.folder / f"ready-{rank}").exists() for rank in range(self.world))

    def _strike(self, run: RunDir) -> float | None:
        """Do what is done from outside; return when, or None where the script does it itself."""
        name = self.kind.name
        if self.hosts is not None:
            self._wait(self._ready, START_SECONDS, run)
            self.hosts.two.cable("down")
            now = time.time()
            if name == "network-cut-hub":
                time.sleep(self.hub_killed_after)
                hub = run.living_hub()
                if hub is None:
                    raise SceneError("no hub")
                os.kill(hub.process.pid, signal.SIGKILL)
            return now
        if name == "ddp-paused":
            return self._pause_again_and_again()
        if name not in ("sigstop", "deepspeed-sigstop", "sigkill", "pause-and-resume", "launcher-killed"):
            return None
        self._wait(self._ready, START_SECONDS, run)
        pid = int((self.folder / f"pid-{self.culprit or 0}").read_text())
        if name == "launcher-killed":
            rank = processes.read(pid)
            if rank is None:
                raise SceneError("the rank is gone already")
            pid = rank.parent
        now = time.time()
        os.kill(pid, signal.SIGKILL if "kill" in name else signal.SIGSTOP)
        if name == "pause-and-resume":
            time.sleep(PAUSE_SECONDS)
            os.kill(pid, signal.SIGCONT)
        return now

    def _pause_again_and_again(self) -> float:
        """Stop and continue the culprit as cpulimit does, until it is gone."""
        pid = int((self.folder / f"pid-{self.culprit or 0}").read_text())
        self._wait(self._ready, START_SECONDS, RunDir(next((self.folder / "home" / "runs").iterdir())))

        def pause() -> None:
            with contextlib.suppress(ProcessLookupError):
                while True:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(0.12)
                    os.kill(pid, signal.SIGCONT)
                    time.sleep(0.04)

        threading.Thread(target=pause, daemon=True).start()
        return time.time()

    def _await_verdict(self, run: RunDir) -> Judgement:
        deadline = (
            time.monotonic() + self.kind.limit_s + (15.0 if self.kind.expect in ("honest", "resolves", "well") else 0.0)
        )
        settled: float | None = None
        while True:
            self._read_alerts(run)
            end = run.read_exit()
            judgement = judge(self.kind, self.culprit, self.history, end)
            now = time.monotonic()
            if judgement.verdict == "right" and settled is None:
                settled = now + SETTLE_SECONDS
            over = end is not None and not named_processes(run)
            if judgement.verdict in ("wrong", "false alarm") or over or now > min(deadline, settled or deadline):
                self._read_alerts(run)
                return judge(self.kind, self.culprit, self.history, end)
            time.sleep(LOOK_SECONDS)

    def _read_alerts(self, run: RunDir) -> None:
        with contextlib.suppress(FtmonError):
            if self._reader is None:
                self._reader = Reader(run.recording)
            while frames := self._reader.frames(self._last_seq, 5_000):
                self._last_seq = frames[-1].seq
                self.history += [(f.t, f.message) for f in frames if isinstance(f.message, Alert)]

    def _status(self, run: RunDir) -> dict[str, Any]:
        done = self._ftmon("status", run.id, "--json")
        if done.returncode:
            raise SceneError(f"ftmon status: {done.stderr.strip()}")
        ranks = json.loads(done.stdout)["ranks"]
        return {
            "hung": [rank["rank"] for rank in ranks if rank["state"] == "hung"],
            "states": {str(rank["rank"]): f"{rank['state']}: {rank['text']}" for rank in ranks},
        }

    # The end.

    def _end(self, run: RunDir, gpus_before: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if run.read_exit() is None:
            begun = time.monotonic()
            done = self._ftmon("kill", run.id, "--yes")
            found = {"kill_status": done.returncode, "kill_s": round(time.monotonic() - begun, 1)}
            found["kill"] = (done.stdout + done.stderr).strip().splitlines()[-1:]
        left: list[str] = []
        if self.hosts is not None:
            left += self._end_of_the_cut(found, run, self.hosts)
        left += _left(lambda: named_processes(run))
        left += [f"socket {path}" for path in sockets_of(run)]
        if self.hosts is not None:
            left += [f"socket {path} on the other host" for path in self.hosts.sockets_there()]
        if gpus_before is not None:
            left += gpus.left(gpus_before)
        end = run.read_exit()
        if end is None:
            left.append("no exit.json")
        return {**found, "left": left, "end": f"{end.state}: {end.text}" if end else ""}

    def _end_of_the_cut(self, found: dict[str, Any], run: RunDir, two: hosts.Hosts) -> list[str]:
        """See that the kill told what it could not reach and ended the rest; then join the hosts again."""
        there = set(two.two.pids_on_b())
        marked = lambda: processes.marked(run.path, processes.table().values())  # noqa: E731
        left = _left(lambda: [process for process in marked() if process.pid not in there])
        if found.get("kill_status") == 0 or not any("nodeb" in line for line in found.get("kill", [])):
            left.append(f"the kill did not tell what it could not reach: {found.get('kill')}")
        time.sleep(self.rejoined_after)
        two.two.cable("up")
        begun = time.monotonic()
        _left(lambda: named_processes(run))
        self._read_alerts(run)
        later = judge(self.kind, self.culprit, self.history, None)
        if later.verdict == "wrong":
            found |= {"verdict": "wrong", "said": later.title}
        found["rejoined_after_s"] = round(self.rejoined_after, 1)
        found["rejoined_end_s"] = round(time.monotonic() - begun, 1)
        return left

    def _wait(self, condition: Callable[[], Any], seconds: float, run: RunDir) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise SceneError(f"the ranks did not come up in {seconds:.0f} s: {_tail(run)}")
            time.sleep(0.02)

    def _clean(self, run: RunDir | None) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        if run is not None:
            end_all(run)
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def _left(find: Callable[[], list[processes.Process]]) -> list[str]:
    """Wait until these processes have ended; list those that do not."""
    deadline = time.monotonic() + END_SECONDS
    while find() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"pid {process.pid} {process.name} {process.state}" for process in find()]


def named_processes(run: RunDir) -> list[processes.Process]:
    """List what lives of a run: by its mark, and its launcher and hub."""
    table = processes.table()
    found = {process.pid: process for process in processes.marked(run.path, table.values())}
    for process in table.values():
        if process.alive and process.pid != os.getpid() and _names(process.pid, str(run.path)):
            found[process.pid] = process
    return list(found.values())


def end_all(run: RunDir) -> None:
    """Kill what lives of a run, and what comes up meanwhile."""
    for _ in range(20):
        living = named_processes(run)
        for process in living:
            with contextlib.suppress(OSError):
                processes.send_signal(process, signal.SIGKILL)
        if not living:
            return
        time.sleep(0.2)


def _names(pid: int, path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.fsencode(path) in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def sockets_of(run: RunDir) -> Iterator[Path]:
    for channel in CHANNELS:
        path = Path(run.ipc_address(channel).removeprefix("ipc://"))
        if path.exists():
            yield path
        if path.parent != run.path:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # asking for the address made it


def _tail(run: RunDir) -> str:
    try:
        lines = (run.logs / "launcher.log").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(lines[-6:])
