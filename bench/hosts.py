"""A training across two hosts made of network namespaces, one rank on each, begun by hand: what a person would type.

``ftmon run -- torchrun --nnodes 2 ...`` on ``nodea``, where the hub is; its ``join.json`` copied to ``nodeb``; there
``ftmon run --join FILE -- torchrun ...``. The hosts are those of ``tests/support/two_hosts.py``.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from ftmon.protocol.link.sockets import join_path
from ftmon.protocol.run.rundir import RunDir
from two_hosts import NODES, TwoHosts, two_hosts

FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
_PORT = 29500


def why_not() -> str:
    """Say why two hosts cannot be made here; empty when they can."""
    with tempfile.TemporaryDirectory() as folder:
        private = Path(folder) / "private"
        private.mkdir()
        try:
            with two_hosts(Path(folder), private):
                return ""
        except RuntimeError as error:
            return f"no two hosts can be made of namespaces here ({error})"


class Hosts:
    """Both hosts and, once begun, the training across them; use as made by ``made``.

    Args:
        two: the hosts.
        environment: of every command; ``FTMON_HOME`` in it is what the hosts do not share.
        rank_there: the rank that is to run on ``nodeb``, 0 or 1.
    """

    def __init__(self, two: TwoHosts, environment: dict[str, str], rank_there: int) -> None:
        self.two = two
        self.environment = {**environment, "GLOO_SOCKET_IFNAME": "eth0"}
        self.rank_there = rank_there
        self._there: subprocess.Popen[bytes] | None = None

    def words(self, *words: str) -> list[str]:
        """Give the words that run ftmon on ``nodea``."""
        return [*self.two.enter_a(), *FTMON, *words]

    def start(self, name: str, script: Path, *arguments: str) -> RunDir:
        """Begin the training on both.

        Raises:
            RuntimeError: one of them does not take it.
        """
        here = self._torchrun(1 - self.rank_there, script, arguments)
        self._check(self.words("run", "--detach", "--name", name, "--", *here))
        run = RunDir(next((Path(self.environment["FTMON_HOME"]) / "runs").iterdir()))
        copy = self.two.private / "join.json"
        self._check([*self.two.enter_b(), "sh", "-c", f"umask 077; cat > {copy}"], join_path(run).read_bytes())
        there = self._torchrun(self.rank_there, script, arguments)
        with (self.two.folder / "nodeb.log").open("wb") as log:
            self._there = subprocess.Popen(
                [*self.two.enter_b(), *FTMON, "run", "--join", str(copy), "--", *there],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.two.folder,
            )  # fmt: skip
        return run

    def sockets_there(self) -> list[str]:
        """List the sockets in what ``nodeb`` has for itself."""
        words = [*self.two.enter_b(), "find", str(self.two.private), "-type", "s"]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.split()

    def close(self) -> None:
        """End what was begun on ``nodeb``, if it has not ended."""
        if self._there is not None:
            for pid in self.two.pids_on_b():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._there.wait(30)

    def _torchrun(self, node: int, script: Path, arguments: tuple[str, ...]) -> list[str]:
        first = NODES["nodeb" if self.rank_there == 0 else "nodea"]
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", "--master-addr", first, "--master-port", str(_PORT), str(script), *arguments),
        ]

    def _check(self, words: list[str], given: bytes = b"") -> None:
        done = subprocess.run(
            words, env=self.environment, input=given, capture_output=True, timeout=90, check=False, cwd=self.two.folder
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words[-6:])}: {(done.stdout + done.stderr).decode().strip()[-300:]}")


@contextlib.contextmanager
def made(folder: Path, environment: dict[str, str], rank_there: int) -> Generator[Hosts]:
    """Make the two hosts; commands there begin in ``folder``.

    Raises:
        RuntimeError: this machine does not permit it.
    """
    private = Path(environment["FTMON_HOME"])
    private.mkdir(mode=0o700, exist_ok=True)
    with two_hosts(folder, private) as two:
        hosts = Hosts(two, environment, rank_there)
        try:
            yield hosts
        finally:
            hosts.close()
