"""Two hosts on one machine, for tests: network namespaces, a cable between them, names, pids and files of their own.

``nodea`` shares files and process table with the test; ``nodeb`` has its own pids, and an empty file system where
``private`` is. Stand-ins for ``ssh`` and ``pdsh`` on ``nodea``'s PATH reach both by entering their namespaces.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NODES = {"nodea": "10.77.0.1", "nodeb": "10.77.0.2"}
_TOOLS = ("unshare", "nsenter", "ip", "mount")

_SSH = """\
#!/bin/sh
# Stands in for ssh: options, a host, a command line for its shell.
while :; do
  case "$1" in
    -o|-p|-i|-l) shift 2 ;;
    -*) shift ;;
    *) break ;;
  esac
done
host=${{1##*@}}; shift
clean="env -i HOME={home} PATH={path} LANG=C.UTF-8"
case "$host" in
  nodea) exec $clean sh -c "$*" ;;
  nodeb) exec nsenter -t {pid} -n -u -m -p -- $clean sh -c "$*" ;;
  *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""

_PDSH = """\
#!{python}
# Stands in for pdsh: runs the command on every host of -w, %n being the host's number.
import subprocess, sys
words = sys.argv[1:]
hosts, command = [], []
while words:
    word = words.pop(0)
    if word in ("-f", "-w"):
        value = words.pop(0)
        hosts = value.split(",") if word == "-w" else hosts
    elif word.startswith("-") and not command:
        continue
    else:
        command = [word, *words]
        break
line = " ".join(command)
if line.startswith("pkill"):
    sys.exit(0)
started = [subprocess.Popen(["ssh", host, line.replace("%n", str(place))]) for place, host in enumerate(hosts)]
sys.exit(max(abs(process.wait()) for process in started))
"""


class TwoHosts:
    """``nodea`` and ``nodeb``; use as made by ``two_hosts``."""

    def __init__(self, folder: Path, private: Path) -> None:
        self.folder = folder
        self.private = private
        self.a = 0
        self.b = 0
        self._holders: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        """Make namespaces, cable and stand-ins.

        Raises:
            RuntimeError: this machine does not permit it; says what refused.
        """
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise RuntimeError(f"no {missing[0]} here")
        flags = ["--user", "--map-root-user", "--net", "--uts"]
        self.a = self._hold(["unshare", *flags, "sh", "-c", "hostname nodea && echo up && exec sleep 600"])
        script = f"hostname nodeb && mount -t tmpfs -o mode=0700 tmpfs {self.private} && echo up && exec sleep 600"
        flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        outer = self._hold([*self.enter_a(), "unshare", *flags, "sh", "-c", script])
        self.b = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        self._must("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(self.b))
        for enter, name in ((self.enter_a(), "nodea"), (self.enter_b(), "nodeb")):
            for words in (("addr", "add", f"{NODES[name]}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                self._check([*enter, "ip", *words])
            self._check([*enter, "ip", "link", "set", "lo", "up"])
        tools = self.folder / "bin"
        tools.mkdir()
        home = Path.home()  # its caches: DeepSpeed compiles a part of itself the first time
        path = f"{tools}:{os.path.dirname(sys.executable)}:/usr/sbin:/usr/bin:/sbin:/bin"
        for name, text in (("ssh", _SSH), ("pdsh", _PDSH)):
            (tools / name).write_text(text.format(home=home, path=path, pid=self.b, python=sys.executable))
            (tools / name).chmod(0o755)
        self.environ = {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"}

    def close(self) -> None:
        """End whatever lives on the two, and them."""
        for holder in reversed(self._holders):
            holder.kill()
            holder.wait()
        for pid in self._inhabitants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def on_a(self, *words: str, **environ: str) -> "subprocess.Popen[str]":
        """Start a command on ``nodea``."""
        return subprocess.Popen(
            [*self.enter_a(), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**self.environ, **environ},
            cwd=self.folder,
        )

    def cable(self, state: str) -> None:
        """Pull the cable out (``down``) or put it back (``up``)."""
        self._must("ip", "link", "set", "eth0", state)

    def processes_on_b(self) -> list[str]:
        """List the command lines of what lives on ``nodeb``, but for what holds it."""
        script = "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done"
        done = subprocess.run([*self.enter_b(), "sh", "-c", script], capture_output=True, text=True, timeout=30)
        ours = ("sleep 600", "sh -c for p", "tr ")
        return [line.strip() for line in done.stdout.splitlines() if line.strip() and not line.startswith(ours)]

    def kill_on_b(self, word: str, number: int = signal.SIGKILL) -> int:
        """Signal the process on ``nodeb`` with this word in its command line; return its pid there."""
        script = (
            f"for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline | grep -q -- '-m {word}' && echo ${{p#/proc/}}; done"
        )
        found = subprocess.run([*self.enter_b(), "sh", "-c", script], capture_output=True, text=True, timeout=30)
        pids = [pid for pid in found.stdout.split() if not self._is_shell(pid)]
        assert len(pids) == 1, pids
        subprocess.run([*self.enter_b(), "kill", f"-{number}", pids[0]], check=True, timeout=30)
        return int(pids[0])

    def _is_shell(self, pid: str) -> bool:
        words = [*self.enter_b(), "cat", f"/proc/{pid}/comm"]
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.strip() in ("sh", "", "grep")

    def _hold(self, words: list[str]) -> int:
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline().strip() != "up":
            raise RuntimeError(f"{words[0]} was refused: {holder.stderr.read().strip()}")
        return holder.pid

    def enter_a(self) -> list[str]:
        """Give the words that start a command on ``nodea``."""
        return ["nsenter", "-t", str(self.a), "-U", "-n", "-u", "--preserve-credentials", "--"]

    def enter_b(self) -> list[str]:
        """Give the words that start a command on ``nodeb``."""
        return ["nsenter", "-t", str(self.b), "-U", "-n", "-u", "-m", "-p", "--preserve-credentials", "--"]

    def _must(self, *words: str) -> None:
        self._check([*self.enter_a(), *words])

    def _check(self, words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words[-6:])} was refused: {done.stderr.strip()}")

    def _inhabitants(self) -> list[int]:
        """List the processes in ``nodea``'s network namespace (those of ``nodeb`` end with their first)."""
        found: list[int] = []
        with contextlib.suppress(OSError):
            space = os.readlink(f"/proc/{self.a}/ns/net")
            for entry in os.listdir("/proc"):
                with contextlib.suppress(OSError):
                    if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/net") == space:
                        found.append(int(entry))
        return found


@contextlib.contextmanager
def two_hosts(folder: Path, private: Path) -> Iterator[TwoHosts]:
    """Make the two hosts; they and all that lives there are gone afterwards.

    Raises:
        RuntimeError: this machine does not permit it.
    """
    hosts = TwoHosts(folder, private)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
