"""Two nodes on one machine as their users know them: real sshd and ssh, and, where installed, SLURM with MUNGE.

Each is a set of namespaces with its own network, name, processes, ``/run``, ``/etc/ssh`` and ``FTMON_HOME``; the rest
of the file system is shared. Both have this machine's users, so it takes root.
"""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NODES = {"nodea": "10.78.0.1", "nodeb": "10.78.0.2"}
_SSHD = shutil.which("sshd", path="/usr/sbin:/sbin") or ""
_TOOLS = ("unshare", "nsenter", "ip", "mount", "ssh", "ssh-keygen")
_SLURM = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
_PATH = f"{os.path.dirname(sys.executable)}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIFE_SECONDS = 3600
_UP_SECONDS = 30.0

_SSHD_CONFIG = """\
HostKey /etc/ssh/host_key
PidFile none
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
Subsystem sftp internal-sftp
StrictModes no
SetEnv PATH={path}
"""

_SSH_CONFIG = """\
Host *
    IdentityFile /etc/ssh/id
    UserKnownHostsFile /etc/ssh/known_hosts
    StrictHostKeyChecking yes
    LogLevel ERROR
"""

_SLURM_CONF = """\
ClusterName=bench
SlurmctldHost=nodea
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MpiDefault=none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class RefusedError(RuntimeError):
    """This machine does not permit what the nodes are made of."""


def missing(slurm: bool = False) -> str:
    """Say what is missing here to make the nodes; empty when nothing is."""
    if os.geteuid() != 0:
        return "it takes root"
    if not _SSHD:
        return "no sshd"
    tools = [*_TOOLS, *(_SLURM if slurm else ())]
    lacking = [tool for tool in tools if shutil.which(tool, path=_PATH) is None]
    return f"no {', '.join(lacking)}" if lacking else ""


class Nodes:
    """``nodea`` and ``nodeb``; use as made by ``nodes``.

    Args:
        folder: what both see.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.environ = {
            "HOME": str(Path.home()),
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "FTMON_HOME": str(self.home),
            "NO_COLOR": "1",
            "SLURM_CONF": str(folder / "slurm.conf"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        self._inside: dict[str, int] = {}
        self._holders: list[subprocess.Popen[str]] = []
        self._left_alone: set[tuple[str, int]] = set()

    def open(self) -> None:
        """Make the nodes, and start what listens there.

        Raises:
            RefusedError: namespaces, or a cable between them.
            RuntimeError: what listens there does not come up.
        """
        self.home.mkdir(mode=0o700)
        ssh = self.folder / "ssh"
        ssh.mkdir(mode=0o700)
        for name in ("id", "host_key"):
            self._check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / name)])
        shutil.copy(ssh / "id.pub", ssh / "authorized_keys")
        host_key = " ".join((ssh / "host_key.pub").read_text().split()[:2])
        (ssh / "known_hosts").write_text("".join(f"{name},{at} {host_key}\n" for name, at in NODES.items()))
        (ssh / "sshd_config").write_text(_SSHD_CONFIG.format(path=_PATH))
        (ssh / "ssh_config").write_text(_SSH_CONFIG)
        (self.folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for name, at in NODES.items())
        )
        for name in NODES:
            self._inside[name] = self._make(name)
        a, b = (self._inside[name] for name in NODES)
        self._check(["ip", "link", "add", "eth0", "netns", str(a), "type", "veth", "peer", "eth0", "netns", str(b)])
        for name, address in NODES.items():
            for words in (
                ("addr", "add", f"{address}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
                ("link", "set", "lo", "up"),
            ):
                self.run(name, "ip", *words)
            self.run(name, _SSHD)
        for name in NODES:
            self._until(lambda name=name: not self.run("nodea", "ssh", name, "true", check=False).returncode, "ssh")
        self._remember()

    def start_slurm(self) -> None:
        """Start MUNGE and SLURM on both.

        Raises:
            RuntimeError: they do not come up; says what they printed.
        """
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20 // 2
        described = "".join(
            f"NodeName={name} NodeAddr={at} CPUs=1 RealMemory={memory} State=UNKNOWN\n" for name, at in NODES.items()
        )
        (self.folder / "slurm.conf").write_text(_SLURM_CONF.format(folder=self.folder, nodes=described))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for name in NODES:
            own = self.folder / f"munge-{name}"
            own.mkdir(mode=0o700)
            files = [f"--{what}={own / what.removesuffix('-file')}" for what in ("log-file", "pid-file", "seed-file")]
            self.run(name, "munged", "--force", f"--key-file={key}", *files)
        self.run("nodea", "slurmctld")
        for name in NODES:
            self.run(name, "slurmd", "-N", name)
        self._until(lambda: self.run("nodea", "sinfo", "-h", "-o", "%t %D").stdout.split() == ["idle", "2"], "SLURM")
        self._remember()

    def close(self) -> None:
        """End the nodes and all that lives there."""
        for holder in self._holders:
            holder.kill()
            holder.wait()

    def run(
        self, node: str, *words: str, check: bool = True, seconds: float = 120.0, **environ: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on a node to its end.

        Raises:
            RuntimeError: it failed, and ``check`` is set; or it took over ``seconds``.
        """
        try:
            done = subprocess.run(
                self.words(node, *words),
                env={**self.environ, **environ},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(words)} on {node} took over {seconds:.0f} s: {error.output!r}") from None
        if check and done.returncode:
            said = (done.stdout + done.stderr).strip()[-600:]
            raise RuntimeError(f"{' '.join(words)} on {node}: status {done.returncode}: {said}")
        return done

    def words(self, node: str, *words: str) -> list[str]:
        """Give the words that run a command on a node."""
        enter = ["nsenter", "-t", str(self._inside[node]), "-n", "-u", "-m", "-p", "-i", "--"]
        return [*enter, "env", "-C", str(self.folder), *words]

    def processes(self, node: str) -> list[str]:
        """List the command lines of what was started on a node since it was up."""
        return [words for pid, words in self._living(node) if (node, pid) not in self._left_alone and words]

    def _remember(self) -> None:
        self._left_alone = {(node, pid) for node in NODES for pid, _ in self._living(node)}

    def _living(self, node: str) -> list[tuple[int, str]]:
        """List (pid here, command line) of what lives on a node."""
        space = os.readlink(f"/proc/{self._inside[node]}/ns/pid")
        found: list[tuple[int, str]] = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == space:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").strip()
                    found.append((int(entry), words.decode(errors="replace")))
        return found

    def _make(self, name: str) -> int:
        """Make a node; return the pid here of its first process."""
        script = f"""set -e
            hostname {name}
            mount -t tmpfs -o mode=0755 tmpfs /run
            mkdir -p /run/sshd /run/munge
            mount -t tmpfs -o mode=0755 tmpfs /etc/ssh
            cp {self.folder}/ssh/* /etc/ssh/
            chmod 600 /etc/ssh/id /etc/ssh/host_key
            mount --bind {self.folder}/hosts /etc/hosts
            mount -t tmpfs -o mode=0700 tmpfs {self.home}
            echo up
            sleep {_LIFE_SECONDS} & wait $!"""
        spaces = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork", "--mount-proc", "--kill-child"]
        holder = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline().strip() != "up":
            raise RefusedError(f"namespaces were refused: {holder.stderr.read().strip()}")
        return int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])

    def _check(self, words: list[str]) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            raise RefusedError(f"{' '.join(words)}: {done.stderr.strip()}")

    def _until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _UP_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} did not come up in {_UP_SECONDS:.0f} s")
            time.sleep(0.3)


@contextlib.contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Make the two nodes; they and all that lives there are gone afterwards.

    Raises:
        RefusedError: this machine does not permit it.
        RuntimeError: they do not come up.
    """
    made = Nodes(folder)
    try:
        made.open()
        yield made
    finally:
        made.close()
