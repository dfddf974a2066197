"""Two hosts on one machine: network namespaces, a cable between them, names, users, pids and files of their own.

``nodea`` shares files and process table with whoever made it; ``nodeb`` has its own pids, and an empty file system
where ``private`` is. Each has users of its own, so neither can look into processes of the other, or signal them.
Stand-ins for ``ssh`` and ``pdsh`` on ``nodea``'s PATH reach both. Tests use this, and benches do.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from ftmon_process import command_line
from remote_shell import RemoteShell

NODES = {"nodea": "10.77.0.1", "nodeb": "10.77.0.2"}
_TOOLS = ("unshare", "nsenter", "ip", "mount")
_LIFE_SECONDS = 1800
_USERS = ["--user", "--map-root-user"]


class TwoHosts:
    """``nodea`` and ``nodeb``; use as made by ``two_hosts``."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder, self.private = folder, private
        self.a = self.b = self._over = 0
        self._holders: list[subprocess.Popen[str]] = []
        self._shell: RemoteShell | None = None

    def open(self) -> None:
        """Make namespaces, cable and stand-ins; RuntimeError: this machine does not permit it, says what refused."""
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise RuntimeError(f"no {missing[0]} here")
        # A shell stays, not what it waits for: a host's first process has to bury others.
        stay = f"{{ echo up; sleep {_LIFE_SECONDS} & wait $!; }}"
        self._over = self._hold(["unshare", *_USERS, "sh", "-c", stay])
        over = ["nsenter", "-t", str(self._over), "-U", "--preserve-credentials", "--"]
        a = ["unshare", *_USERS, "--net", "--uts", "sh", "-c", f"hostname nodea && {stay}"]
        self.a = self._hold([*over, *a])
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        script = f"hostname nodeb && mount -t tmpfs -o mode=0700 tmpfs {self.private} && {stay}"
        outer = self._hold([*over, "unshare", *_USERS, *flags, "sh", "-c", script])
        self.b = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        cable = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self.b)]
        self._check([*over, "nsenter", "-t", str(self.a), "-n", "--", *cable])
        for enter, name in ((self.enter_a(), "nodea"), (self.enter_b(), "nodeb")):
            for words in (("addr", "add", f"{NODES[name]}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                self._check([*enter, "ip", *words])
            self._check([*enter, "ip", "link", "set", "lo", "up"])
        tools = self.folder / "bin"
        tools.mkdir()
        home = Path.home()  # its caches: DeepSpeed compiles a part of itself the first time
        path = f"{tools}:{os.path.dirname(sys.executable)}:/usr/sbin:/usr/bin:/sbin:/bin"
        self.environ = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}
        self._shell = RemoteShell(tools, {"nodea": self.enter_a(), "nodeb": self.enter_b()}, self.environ)

    def close(self) -> None:
        """End whatever lives on the two, and them."""
        if self._shell is not None:
            self._shell.close()
        left = self._inhabitants()
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()
        for pid in left:  # those of nodeb end with their first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def on_a(self, *words: str, **environ: str) -> "subprocess.Popen[str]":
        return self._start([*self.enter_a(), *words], environ)

    def on_b(self, *words: str, **environ: str) -> "subprocess.Popen[str]":
        return self._start([*self.enter_b(), *words], environ)

    def cable(self, state: str, host: str = "nodea") -> None:
        """Pull the cable out (``down``) or put it back (``up``), at one of its ends."""
        enter = self.enter_a() if host == "nodea" else self.enter_b()
        self._check([*enter, "ip", "link", "set", "eth0", state])

    def pids_on_b(self, word: str = "") -> list[int]:
        """List what lives on ``nodeb`` (with this word in its command line), but for what holds it, by pids here."""
        return sorted(pid for pid, words in self._command_lines_on_b().items() if not word or word in words)

    def processes_on_b(self) -> list[str]:
        """List the command lines of what lives on ``nodeb``, but for what holds it."""
        return [" ".join(words) for words in self._command_lines_on_b().values()]

    def _command_lines_on_b(self) -> dict[int, list[str]]:
        space = os.readlink(f"/proc/{self.b}/ns/pid")
        holding = {self.b, *map(int, Path(f"/proc/{self.b}/task/{self.b}/children").read_text().split()[:1])}
        found: dict[int, list[str]] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if process.pid not in holding and os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found[process.pid] = command_line(process)
        return {pid: words for pid, words in found.items() if words}

    def pid_from_b(self, there: int) -> int:
        """Give the pid here of a process that has the pid ``there`` on ``nodeb``; 0: there is none."""
        for pid in self.pids_on_b():
            with contextlib.suppress(OSError):
                if re.search(rf"^NSpid:.*\b{there}$", Path(f"/proc/{pid}/status").read_text(), re.M):
                    return pid
        return 0

    def kill_on_b(self, word: str, number: int = signal.SIGKILL) -> int:
        """Signal the one process on ``nodeb`` with this word in its command line; return its pid here."""
        pids = self.pids_on_b(word)
        assert len(pids) == 1, pids
        os.kill(pids[0], number)
        return pids[0]

    def enter_a(self) -> list[str]:
        return ["nsenter", "-t", str(self.a), "-U", "-n", "-u", "--preserve-credentials", "--"]

    def enter_b(self) -> list[str]:
        return ["nsenter", "-t", str(self.b), "-U", "-n", "-u", "-m", "-p", "--preserve-credentials", "--"]

    def _start(self, words: list[str], environ: dict[str, str]) -> "subprocess.Popen[str]":
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, **streams, text=True, env={**self.environ, **environ}, cwd=self.folder)

    def _hold(self, words: list[str]) -> int:
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._holders.append(holder)
        if holder.stdout.readline().strip() != "up":
            raise RuntimeError(f"{words[0]} was refused: {holder.stderr.read().strip()}")
        return holder.pid

    def _check(self, words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words[-6:])} was refused: {done.stderr.strip()}")

    def _inhabitants(self) -> list[int]:
        """List the processes in the user namespaces of ``nodea`` and of what is over both."""
        found: list[int] = []
        with contextlib.suppress(OSError):
            spaces = {os.readlink(f"/proc/{pid}/ns/user") for pid in (self._over, self.a) if pid}
            for pid in psutil.pids():
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/ns/user") in spaces:
                        found.append(pid)
        return found


@contextlib.contextmanager
def two_hosts(folder: Path, private: Path) -> Iterator[TwoHosts]:
    """Make the two hosts, gone afterwards with all that lives there; RuntimeError: this machine does not permit it."""
    hosts = TwoHosts(folder, private)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
