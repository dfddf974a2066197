"""Making a run joinable from other hosts: its keys, where its hub will be, and the file that tells of both."""

import os
import shlex
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from .. import __version__
from ..protocol import keys
from ..protocol.errors import UsageError
from ..protocol.join import JoinFile, boot_id, encode_join, join_path, read_join, write_join
from ..protocol.rundir import RunDir
from ..protocol.sockets import CHANNELS
from .listen import Listen, check_free, parse_listen

SSH_ENV = "FTMON_SSH"
"""The ssh command, where it is not ``ssh``."""

_FIRST_PORT = 7420
_BLOCKS = 200
_PUSH_SECONDS = 20.0


def free_listen() -> str:
    """Choose where a hub can listen for other hosts: every interface, and the first ports that are free.

    Raises:
        UsageError: none is.
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
    """Write what other hosts need to join a run whose hub will listen on ``listen``; return the file's path.

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


def push(run: RunDir, hosts: list[str], ssh_port: int | None, environ: Mapping[str, str]) -> list[str]:
    """Give other hosts the run's key, over ssh's standard input, where they do not share this file system.

    Args:
        run: the run.
        hosts: their names, as ssh knows them.
        ssh_port: as for ssh's -p.
        environ: ``FTMON_SSH`` names another ssh.

    Returns:
        A line about each host that could not be given it.
    """
    path = join_path(run)
    content = encode_join(msgspec.structs.replace(read_join(path), pushed=True))
    folder, name = shlex.quote(str(path.parent)), shlex.quote(str(path))
    script = f"umask 077; test -e {name} || {{ mkdir -p {folder} && cat > {name}; }}"
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *(["-p", str(ssh_port)] if ssh_port else [])]
    ssh = shlex.split(environ.get(SSH_ENV) or "ssh")
    under_way: dict[str, subprocess.Popen[bytes]] = {}
    problems: dict[str, str] = {}
    for host in hosts:
        if host in ("localhost", "127.0.0.1", socket.gethostname()):
            continue
        try:
            under_way[host] = subprocess.Popen(
                [*ssh, *options, host, script],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(environ),
            )
        except OSError as error:
            problems[host] = f"{ssh[0]}: {error.strerror}"
    deadline = time.monotonic() + _PUSH_SECONDS
    for host, process in under_way.items():
        try:
            _, errors = process.communicate(content, timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            problems[host] = f"no answer in {_PUSH_SECONDS:.0f} s"
            continue
        if process.returncode:
            words = errors.decode("utf-8", "replace").strip().splitlines()
            problems[host] = words[-1] if words else f"exit status {process.returncode}"
    return [f"{host} was not given the run's key over ssh ({why})" for host, why in problems.items()]


def _addresses(host: str) -> list[str]:
    """List where a hub that listens on ``host`` can be reached from elsewhere, the likeliest first."""
    if host not in ("0.0.0.0", "::"):
        return [host]
    found = [_outward_address()]
    for interface, addresses in psutil.net_if_addrs().items():
        if interface != "lo":
            found += [each.address for each in addresses if each.family == socket.AF_INET]
    found = [address for address in found if address and not address.startswith(("127.", "169.254."))]
    return list(dict.fromkeys([*found, os.uname().nodename]))


def _outward_address() -> str:
    """Give the address of the interface that packets to the world leave by; none is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
