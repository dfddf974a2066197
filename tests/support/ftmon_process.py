"""The real ``ftmon`` executable as tests drive it: in a home of its own, every wait bounded, nothing left over."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from eventually import eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.link.sockets import CHANNELS
from ftmon.protocol.run.environment import RUN_ENV
from ftmon.protocol.run.rundir import RunDir
from run_picture import pictured

PROGRAM = shutil.which("ftmon") or str(Path(sys.executable).with_name("ftmon"))
LONG_SECONDS = 480.0
"""For whole trainings: two ranks that import torch on two busy cores need tens of seconds before their first step."""
SMALL = (
    "model.config.num_hidden_layers=2", "model.config.hidden_size=64", "model.config.intermediate_size=128",
    "tokenizer.vocab_size=512", "training.micro_batch=2", "training.sequence_length=64", "training.rehearsal=false",
)  # fmt: skip
"""What makes the demo cheap where a test is about the monitor: a third of its processor time."""


class Ftmon:
    """``ftmon`` with a home of its own."""

    def __init__(self, home: Path, **environ: str) -> None:
        self.home = home
        self.environ = {**os.environ, "FTMON_HOME": str(home), "NO_COLOR": "1", **environ}
        for name in (RUN_ENV, "FTMON_RANK_PID", "TMUX"):
            self.environ.pop(name, None)

    def run(self, *words: str, seconds: float = LONG_SECONDS, **options: Any) -> "subprocess.CompletedProcess[str]":
        with self.start(*words, **options) as process:
            return subprocess.CompletedProcess(words, *follow_to_end(process, seconds))

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([PROGRAM, *words], text=True, env=self.environ, **streams, **options)

    def runs(self) -> list[RunDir]:
        folder = self.home / "runs"
        found = [RunDir(path) for path in folder.iterdir()] if folder.exists() else []
        return sorted(found, key=lambda run: run.path.stat().st_mtime, reverse=True)

    def newest(self) -> RunDir:
        return eventually(self.runs, "a run directory")[0]

    def status(self, run: str) -> dict[str, Any]:
        done = self.run("status", run, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def end_everything(self) -> None:
        """Kill whatever lives of this home's runs; for the end of a test, whatever became of it."""
        for run in self.runs():
            for process in processes_of(run):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            run.remove_sockets(CHANNELS)


def processes_of(run: RunDir) -> list[psutil.Process]:
    mark, word = (os.fsencode(f"\0{text}\0") for text in (f"{RUN_ENV}={run.path}", run.path))
    found: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        # This is asked over and over: psutil would parse all environments.
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            folder = Path(f"/proc/{pid}")
            if mark in b"\0" + (folder / "environ").read_bytes() or word in (folder / "cmdline").read_bytes():
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found[pid] = process
    found.pop(os.getpid(), None)
    return list(found.values())


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def wait_until_nothing_is_left(run: RunDir) -> None:
    what = "all processes of the run gone"
    eventually(lambda: not processes_of(run), what, state=lambda: processes_of(run), every=0.1)


@contextmanager
def ftmon_home(folder: Path, **environ: str) -> Iterator[Ftmon]:
    """Give a test its ``ftmon``, end at its end whatever it started; its failure shows the newest run."""
    ftmon = Ftmon(folder, **environ)
    try:
        with pictured(lambda: next(iter(ftmon.runs()), None)):
            yield ftmon
    finally:
        ftmon.end_everything()


def follow_to_end(process: "subprocess.Popen[str]", seconds: float = LONG_SECONDS) -> tuple[int, str, str]:
    """Wait for a started command; return its exit status, output and errors."""
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, errors = process.communicate()
        raise AssertionError(f"no end of {process.args} within {seconds} s:\n{output}\n{errors}") from None
    return process.returncode, output, errors


def hub_is_alive(run: RunDir) -> bool:
    hub = run.read_hub()
    return hub is not None and is_alive(hub.process)


def lines_with(text: str, words: Sequence[str]) -> list[str]:
    return [line for line in text.splitlines() if all(word in line for word in words)]
