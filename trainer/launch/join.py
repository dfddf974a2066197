"""Makes a run joinable from other hosts: its keys, its hub's addresses, and the join file with both."""

import os
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ... import __version__
from ...protocol.errors import UsageError
from ...protocol.link import keys
from ...protocol.link.join import JoinFile, boot_id, encode_join, join_path, read_join, write_join
from ...protocol.link.sockets import CHANNELS
from ...protocol.run.run_options import MultiHost
from ...protocol.run.rundir import RunDir
from ..host.listen import Listen, check_free, parse_listen

SSH_ENV = "FTMON_SSH"
"""Environment variable with the ssh command (default: ``ssh``)."""

_FIRST_PORT = 7420
_BLOCKS = 200
_PUSH_SECONDS = 20.0


def free_listen() -> str:
    """Return an address on which a hub can listen for other hosts: all interfaces, and the first free ports.

    Raises:
        UsageError: no ports are free.
    """
    for block in range(_BLOCKS):
        port = _FIRST_PORT + block * len(CHANNELS)
        try:
            check_free(Listen("0.0.0.0", port))
        except UsageError:
            continue
        return f"0.0.0.0:{port}"
    raise UsageError("no free ports to listen on for the run's other hosts; choose some with --listen HOST:PORT")


def prepare(run: RunDir, listen: str) -> Path:
    """Write the join file for other hosts of a run whose hub will listen on ``listen``; return its path.

    Raises:
        UsageError: ``listen`` is not an address.
        RunDirError: a key cannot be made.
    """
    where = parse_listen(listen)
    content = run.read_run()
    pair = keys.agent_pair(run)
    join = JoinFile(
        run=str(run.path),
        id=run.id,
        host=content.host,
        boot_id=boot_id(),
        addresses=_addresses(where.host),
        port=where.port,
        server_key=keys.server_pair(run).public,
        public=pair.public,
        secret=pair.secret,
        version=__version__,
        options=content.options,
    )
    return write_join(run, join)


def push(run: RunDir, hosts: MultiHost, environ: Mapping[str, str]) -> list[str]:
    """Copy the run's key to hosts that do not share this file system: over ssh's or srun's standard input.

    ``FTMON_SSH`` in ``environ`` selects another ssh command.

    Returns:
        A line for each host whose copy failed; for SLURM, one line for all nodes of the job.
    """
    path = join_path(run)
    content = encode_join(msgspec.structs.replace(read_join(path), pushed=True))
    folder, name = shlex.quote(str(path.parent)), shlex.quote(str(path))
    # On a shared directory the file exists already, and the copy sent is ignored.
    script = f"umask 077; test -e {name} || {{ mkdir -p {folder} && cat > {name}; }}"
    ways = _ways(hosts, script, environ)
    if not ways:
        return []
    with ThreadPoolExecutor(len(ways)) as pool:
        problems = pool.map(lambda words: _problem(words, content, environ), ways.values())
        return [f"{whom} ({why})" for whom, why in zip(ways, problems, strict=True) if why]


def _problem(words: list[str], content: bytes, environ: Mapping[str, str]) -> str:
    """Run a command with ``content`` on its standard input; return why it failed, empty if it did not.

    Its errors go to a file: a child that outlives it, such as ssh's ControlPersist master, would keep a pipe open.
    """
    with tempfile.TemporaryFile() as errors:
        output: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": errors, "env": dict(environ)}
        try:
            status = subprocess.run(words, input=content, timeout=_PUSH_SECONDS, check=False, **output).returncode
        except subprocess.TimeoutExpired:
            return f"no answer in {_PUSH_SECONDS:.0f} s"
        except OSError as error:
            return f"{words[0]}: {error.strerror}"
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
    if status == 0:
        return ""
    return said[-1] if said else f"exit status {status}"


def _ways(hosts: MultiHost, script: str, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the commands that run a script on the other hosts, by the error text for each."""
    if hosts.slurm_nodes:
        # A step that overlaps the job's own, one task per node; srun copies its standard input to all tasks.
        nodes = hosts.slurm_nodes
        counts = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        return {
            "the job's nodes were not given the run's key by srun": ["srun", "--overlap", *counts, "sh", "-c", script]
        }
    ssh = shlex.split(environ.get(SSH_ENV) or "ssh")
    port = ["-p", str(hosts.ssh_port)] if hosts.ssh_port else []
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *port]
    here = ("localhost", "127.0.0.1", socket.gethostname())
    return {
        f"{host} was not given the run's key over ssh": [*ssh, *options, "--", host, script]
        for host in hosts.hosts
        if host not in here
    }


def _addresses(host: str) -> list[str]:
    """Return the addresses at which other hosts can reach a hub that listens on ``host``, the most likely first."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    found = [_outward_address()]
    for interface, addresses in psutil.net_if_addrs().items():
        if interface != "lo":
            found += [each.address for each in addresses if each.family == socket.AF_INET]
    found = [address for address in found if address and not address.startswith(("127.", "169.254."))]
    return list(dict.fromkeys([*found, os.uname().nodename]))


def _outward_address() -> str:
    """Return the address of the interface with the default route; connecting a UDP socket sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
