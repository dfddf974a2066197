"""Small jobs on ranks, several in one set of ranks, and what each job printed."""

import fcntl
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from eventually import eventually
from ftmon.trainer.recipe import start

SERVER = Path(__file__).with_name("fork_server.py")
START_SECONDS = 300
NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9"}
"""A port without a listener."""
ENVIRONMENTS = {
    "forked_ranks": {"DS_ACCELERATOR": "cpu"},
    "forked_predictions": NO_NETWORK,
    "forked_scripts": {"DS_ACCELERATOR": "cpu"},
}
"""Of each kind of server."""


def forked(plan: list[dict[str, Any]], environment: dict[str, str], seconds: float) -> str:
    """Run a plan on ranks forked from the session's server (``forked_ranks``); return what they printed."""
    text = _answer("forked_ranks", plan, environment, seconds)
    assert text.endswith("\nall ranks ended with 0\n"), text
    return text


def predictions(commands: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    """Run predictions in a folder, forked from the session's server; return exit status and output of each."""
    plan = {"folder": str(folder), "commands": commands}
    text = _answer("forked_predictions", plan, {**os.environ, "CUDA_VISIBLE_DEVICES": "", **NO_NETWORK}, 1200)
    return [json.loads(line) for line in text.splitlines()]


class ForkedScript:
    """A script in a fork of the session's server (``forked_scripts``), as ``subprocess.Popen`` has it."""

    def __init__(self, words: list[str], ranks: int, environment: dict[str, str], log: Path, folder: Path) -> None:
        plan = {"words": words, "ranks": ranks, "log": str(log), "folder": str(folder)}
        self._connection = _asked("forked_scripts", plan, environment, START_SECONDS)
        self._told = b""
        while self._told.count(b"\n") < 1 and (part := self._connection.recv(4096)):
            self._told += part
        self.pid = int(self._told.split()[0])
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.wait(0) if self.returncode is None else self.returncode

    def wait(self, timeout: float) -> int | None:
        if self._told.count(b"\n") < 2 and select.select([self._connection], [], [], timeout)[0]:
            self._told += self._connection.recv(4096)
        if self._told.count(b"\n") == 2:
            self.returncode = int(self._told.split()[1])
            self._connection.close()
        return self.returncode


def _answer(kind: str, plan: Any, environment: dict[str, str], seconds: float) -> str:
    with _asked(kind, plan, environment, seconds) as connection:
        return connection.makefile(errors="replace").read()


def _asked(kind: str, plan: Any, environment: dict[str, str], seconds: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(seconds)
    connection.connect(_server(kind))
    connection.sendall(f"{json.dumps({'plan': plan, 'environment': environment})}\n".encode())
    return connection


def _server(kind: str) -> str:
    """Return the socket of the session's server; the first of its processes that asks starts it."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    path = Path(tempfile.gettempdir()) / f"ftmon-{kind}-{session}.sock"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            cache = {"HF_HOME": str(path.with_suffix(".cache"))}
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **cache, **ENVIRONMENTS[kind]}
            environment.pop("TORCHDYNAMO_DISABLE", None)
            words = [sys.executable, "-P", str(SERVER), str(path), str(session), kind]
            log = path.with_suffix(".log")
            with log.open("w") as said:
                subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
                )
            eventually(path.exists, "a server of ranks", START_SECONDS, state=log.read_text)
    return str(path)


def outputs(words: list[str], environment: dict[str, str], seconds: float) -> dict[str, str]:
    """Run a command that must end with 0; return the text after each line ``== NAME``."""
    joined: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, env=environment, timeout=seconds, check=False, **joined)
    assert done.returncode == 0, done.stdout
    return sections(done.stdout)


def sections(text: str) -> dict[str, str]:
    return dict(re.findall(r"== (\S+)\n(.*?)(?=\n?== \S+\n|\Z)", text, re.DOTALL))


def environment_of(resolved: Any, cache: Path) -> dict[str, str]:
    """Return the environment of ranks outside of any run, with a folder of its own for prepared data sets."""
    environment = {**os.environ, **start.launch_environment(resolved), "HF_DATASETS_CACHE": str(cache)}
    environment.pop("FTMON_RUN", None)
    return environment


def launcher(resolved: Any) -> list[str]:
    """Return the launcher for the ranks of a configuration, without the module that it would start."""
    return start.launch_command(resolved)[:-2]
