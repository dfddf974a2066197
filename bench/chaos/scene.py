"""One run that is struck: begun on this host, an app attached to it, and ended whatever happens."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftmon.protocol.errors import FtmonError
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import processes

from ..hosts import FTMON
from ..scenarios.scene import end_all, named_processes, sockets_of
from .training import SCRIPT, STEP_SECONDS, steps_done

START_SECONDS = 120.0


class ChaosError(Exception):
    """The machine could not do what is asked of it."""


class Scene:
    """Two ranks on this host under ``ftmon run --detach``, and an app.

    Args:
        draw: where everything that is drawn comes from.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self.disk = self.folder / "disk"
        self.disk.mkdir()
        self.script = self.folder / "train.py"
        self.script.write_text(SCRIPT)
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("FTMON_")}
        self.environment |= {"FTMON_HOME": str(self.disk / "home"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.hit: set[int] = set()
        """Ranks that were struck themselves."""
        self.counted: tuple[int, ...] = (0, 1)
        """Ranks whose missing steps must be counted as lost by some hub."""
        self.touched_at: float | None = None
        """When the training itself was struck, for good."""
        self.excused: list[tuple[float, float]] = []
        """From when to when something else may have held it up."""
        self.app: subprocess.Popen[bytes] | None = None
        self.app_killed = False
        self._run: RunDir | None = None

    @property
    def run(self) -> RunDir:
        """The run, once it was begun."""
        if self._run is None:
            raise ChaosError("no run was begun")
        return self._run

    def start(self) -> None:
        """Begin the training, wait for its first step, and attach an app."""
        self._run = self.begin(str(self.folder), str(STEP_SECONDS))
        self.wait(lambda: all((self.folder / f"steps-{rank}").exists() for rank in (0, 1)), START_SECONDS, "a step")
        self.app = subprocess.Popen(
            self.words("attach", self.run.id, "--plain"),
            env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def begin(self, *arguments: str) -> RunDir:
        """Begin the run."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        self.ftmon("run", "--detach", "--name", "chaos", "--", *torchrun, str(self.script), *arguments)
        return RunDir(next((self.disk / "home" / "runs").iterdir()))

    def words(self, *words: str) -> list[str]:
        """Give the words that run ftmon where the hub is."""
        return [*FTMON, *words]

    def ftmon(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run ftmon to its end."""
        return subprocess.run(
            self.words(*words), env=self.environment, capture_output=True, text=True, timeout=120, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    # Waiting.

    def wait(self, condition: Callable[[], Any], seconds: float, what: str) -> Any:
        """Wait for something to be true, and return it."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline:
                raise ChaosError(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.05)
        return value

    def wait_steps(self, more: int) -> None:
        """Wait until the training has done more steps."""
        before = steps_done(self.folder, 0)
        self.wait(lambda: steps_done(self.folder, 0) >= before + more, 60, "the training continues")

    def wait_quiet(self) -> None:
        """Wait until nothing is called a hang any more."""
        self.wait(lambda: all(alert.resolved for alert in self.alerts("hang")), 30, "the alert's end")

    # What can be struck.

    def hub(self) -> int:
        """Give the hub's pid."""
        return self.wait(self.run.living_hub, 40, "a living hub").process.pid

    def launcher(self) -> int:
        """Give the pid of ftmon's launcher."""
        launcher = self.run.read_run().launcher
        if launcher is None:
            raise ChaosError("no launcher")
        return launcher.pid

    def pid(self, rank: int) -> int:
        """Give a rank's pid."""
        return int((self.folder / f"pid-{rank}").read_text())

    def living_app(self) -> list[int]:
        """Give the app's pid, while it lives."""
        return [self.app.pid] if self.app is not None and self.app.poll() is None else []

    def monitor(self) -> list[int]:
        """Give the pids of all of the monitor but what is in the ranks."""
        return [self.launcher(), self.hub(), *self.living_app()]

    def rank_here(self) -> int:
        """Name a rank of the hub's own host."""
        return 0

    def freeze(self, *pids: int) -> None:
        """Stop processes, and continue them seconds later."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(self.draw.uniform(1.0, 8.0))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def touch(self, *ranks: int) -> None:
        """Note that the training itself is struck now, and which ranks."""
        self.touched_at = time.time()
        self.hit.update(ranks)

    # What is there.

    def alerts(self, *kinds: str) -> list[Alert]:
        """List the alerts of these kinds, as they stand."""
        with contextlib.suppress(FtmonError), Reader(self.run.recording) as reader:
            return [alert for alert in reader.alerts() if alert.kind in kinds]
        return []

    def living(self) -> list[processes.Process]:
        """List what lives of the run, but for the app."""
        app = self.app.pid if self.app is not None else 0
        return [process for process in named_processes(self.run) if process.pid != app]

    def sockets(self) -> list[str]:
        """List the run's sockets."""
        return [str(path) for path in sockets_of(self.run)]

    def clean(self) -> None:
        """End all that is left."""
        if self.app is not None and self.app.poll() is None:
            self.app.send_signal(signal.SIGCONT)
            self.app.kill()
            self.app.wait(20)
        if self._run is not None:
            end_all(self._run)
