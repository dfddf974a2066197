"""What a job is started with: its command, and its environment (its run, the import hook, the flight recorder)."""

import contextlib
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ... import __version__
from ...protocol.errors import UsageError
from ...protocol.host.process import write_private
from ...protocol.link import keys
from ...protocol.link.sockets import CHANNELS, JoinFile, boot_id, join_path, read_join, write_join
from ...protocol.run.environment import JOIN_ENV, RUN_ENV, monitor_environment
from ...protocol.run.rundir import MultiHost, RunDir, encode_file
from ..host.processes import INJECT_DIR
from ..host.sockets import Listen, check_free, parse_listen

_FLIGHT_RECORDER_NAME, _FLIGHT_RECORDER_OLD_NAME = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FLIGHT_RECORDER_ENTRIES = "2000"
_RENAMED_IN = (2, 9)  # First PyTorch version with the new name; it warns about the old one

_DEEPSPEED_FILE_ENV = "DS_ENV_FILE"


def job_environment(run: RunDir, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's job, based on the launcher's own (``base``)."""
    environment = _watched(str(run.path), base)
    if join_path(run).exists():
        environment[JOIN_ENV] = str(join_path(run))
    with contextlib.suppress(OSError):  # a full disk must not prevent the job's start
        environment[_DEEPSPEED_FILE_ENV] = str(_deepspeed_exports(run, environment, base))
    return environment


def joined_environment(path: Path, join: JoinFile, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's job on a further host; ``path`` is the file of ``join``."""
    return {**_watched(join.run, base), JOIN_ENV: str(path)}


def executable_command(command: Sequence[str], environment: Mapping[str, str], cwd: str = ".") -> list[str]:
    """Return a command with the interpreter in front of its script if the script's ``#!`` line does not work.

    The kernel ends the interpreter's path at the first space. pip avoids that for the scripts it makes (``torchrun``),
    not for those it copies, such as ``deepspeed``: in an environment whose path has a space they cannot be executed.
    """
    name = command[0]
    program = os.path.join(cwd, name) if os.sep in name else shutil.which(name, path=environment.get("PATH")) or ""
    with contextlib.suppress(OSError):
        with open(program, "rb") as file:
            mark, line = file.read(2), file.readline(1024)
        interpreter = os.fsdecode(line.strip())
        if mark == b"#!" and " " in interpreter and os.path.isfile(interpreter):
            return [interpreter, program, *command[1:]]
    return list(command)


def _watched(run: str, base: Mapping[str, str]) -> dict[str, str]:
    environment = monitor_environment(base)
    environment[RUN_ENV] = run
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INJECT_DIR), base.get("PYTHONPATH"))))
    for key, value in {**flight_recorder(_torch_version()), **_nccl_ras(), "PYTHONUNBUFFERED": "1"}.items():
        environment.setdefault(key, value)
    return environment


def flight_recorder(torch: tuple[int, int] | None) -> dict[str, str]:
    """Return the variables that enable PyTorch's flight recorder; both spellings if the version is unknown."""
    names = (_FLIGHT_RECORDER_NAME, _FLIGHT_RECORDER_OLD_NAME)
    known = names if torch is None else names[:1] if torch >= _RENAMED_IN else names[1:]
    return dict.fromkeys(known, _FLIGHT_RECORDER_ENTRIES)


def _nccl_ras() -> dict[str, str]:
    """Return the variable with the port of NCCL's RAS service: several jobs of one host share its default."""
    with contextlib.suppress(OSError), socket.create_server(("localhost", 0)) as probe:
        return {"NCCL_RAS_ADDR": f"localhost:{probe.getsockname()[1]}"}
    return {}


def _torch_version() -> tuple[int, int] | None:
    """Return the version of the installed PyTorch, without importing it; None if unknown."""
    try:
        major, minor, *_ = version("torch").split(".")
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return None


def _deepspeed_exports(run: RunDir, environment: Mapping[str, str], base: Mapping[str, str]) -> Path:
    """Write the lines that DeepSpeed exports to other hosts, from the user's ``.deepspeed_env`` files and ftmon's own.

    DeepSpeed's runner forwards only variables with a few prefixes, plus every line of this file.
    """
    name = base.get(_DEEPSPEED_FILE_ENV, ".deepspeed_env")
    lines: list[str] = []
    for folder in ("~", "."):
        try:
            text = (Path(folder).expanduser() / name).read_text()
        except (OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: the user has no home directory
            continue
        lines += [line for line in text.splitlines() if line not in lines]
    exported = (RUN_ENV, JOIN_ENV, _FLIGHT_RECORDER_NAME, _FLIGHT_RECORDER_OLD_NAME)
    lines += [f"{key}={environment[key]}" for key in exported if key in environment]
    path = run.path / "deepspeed_env"
    write_private(path, "".join(line + "\n" for line in lines).encode())
    return path


SSH_ENV = "FTMON_SSH"  # Environment variable with the ssh command (default: ``ssh``)

_FIRST_PORT = 7420
_BLOCKS = 200
_PUSH_SECONDS = 20.0


def free_listen() -> str:
    """Return an address on which a hub can listen for other hosts: all interfaces, and the first free ports.

    Raises ``UsageError`` if no ports are free.
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

    Raises ``UsageError``: ``listen`` is not an address, ``RunDirError`` if a key cannot be made.
    """
    where = parse_listen(listen)
    content = run.read_run()
    pair = keys.agent_pair(run)
    addresses, key = _addresses(where.host), keys.server_pair(run).public
    of_run = str(run.path), run.id, content.host, boot_id()
    join = JoinFile(*of_run, addresses, where.port, key, pair.public, pair.secret, __version__, content.options)
    return write_join(run, join)


def push(run: RunDir, hosts: MultiHost, environ: Mapping[str, str]) -> list[str]:
    """Copy the run's key to hosts that do not share this file system: over ssh's or srun's standard input.

    ``FTMON_SSH`` in ``environ`` selects another ssh command.

    Returns:
        A line for each host whose copy failed; for SLURM, one line for all nodes of the job.
    """
    path = join_path(run)
    content = encode_file(msgspec.structs.replace(read_join(path), pushed=True))
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
        srun = ["srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "sh", "-c", script]
        return {"the job's nodes were not given the run's key by srun": srun}
    ssh = shlex.split(environ.get(SSH_ENV) or "ssh")
    port = ["-p", str(hosts.ssh_port)] if hosts.ssh_port else []
    options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *port]
    here = ("localhost", "127.0.0.1", socket.gethostname())
    others = [host for host in hosts.hosts if host not in here]
    return {f"{host} was not given the run's key over ssh": [*ssh, *options, "--", host, script] for host in others}


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


_DEEPSPEED = {"deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher.runner"}
_TORCHRUN = {"torchrun", "torch.distributed.run", "torch.distributed.launch"}
_ACCELERATE = {"accelerate", "accelerate-launch", "accelerate.commands.launch"}
_MPI = {"mpirun", "mpiexec", "mpirun_rsh", "mpiexec.hydra"}
_MPI_HOSTS = ("-host", "--host", "-hosts", "--hosts", "-hostfile", "--hostfile", "-machinefile", "--machinefile", "-f")
_DEFAULT_HOSTFILE = "/job/hostfile"


def find_hosts(command: Sequence[str], environ: Mapping[str, str], folder: str | Path = ".") -> MultiHost | None:
    """Return the hosts that ``command`` trains on; None if nothing indicates several.

    A hostfile's path may be relative to ``folder``.
    """
    words = list(command)
    names = [os.path.basename(word) for word in words]
    for place, name in enumerate(names):
        rest = words[place + 1 :]
        if name in _DEEPSPEED:
            return _deepspeed(_own(rest), Path(folder), environ) or _slurm(environ)
        if name in _TORCHRUN:
            return _by_number(_own(rest), "--nnodes") or _slurm(environ)
        if name in _ACCELERATE:
            return _by_number(_own(rest), "--num_machines", "--num-machines") or _slurm(environ)
        if name in _MPI and any(_value(rest, option) for option in _MPI_HOSTS):
            return MultiHost()
        if name == "srun":
            nodes = map(int, re.findall(r"\d+", _value(rest, "-N", "--nodes")))  # "2", "2-4", "2,4"
            return _slurm(environ) or (MultiHost() if max(nodes, default=0) > 1 else None)
    return _slurm(environ)


def _deepspeed(words: list[str], folder: Path, environ: Mapping[str, str]) -> MultiHost | None:
    hosts = _read_hostfile(folder / (_value(words, "-H", "--hostfile") or _DEFAULT_HOSTFILE))
    include, exclude = _value(words, "-i", "--include"), _value(words, "-e", "--exclude")
    if include:
        named = {part.split(":")[0].strip() for part in include.split("@")}
        hosts = [host for host in hosts if host in named]
    if exclude:
        without = {part.strip() for part in exclude.split("@") if ":" not in part}
        hosts = [host for host in hosts if host not in without]
    limit = _number(_value(words, "--num_nodes"))
    hosts = hosts[:limit] if limit > 0 else hosts
    if len(hosts) < 2 and "--force_multi" not in words:
        return None
    if "--no_ssh" in words:
        return MultiHost(by_hand=True)
    if (_value(words, "--launcher") or "pdsh").lower() != "pdsh":
        return _slurm(environ) or MultiHost()
    return MultiHost(hosts, _number(_value(words, "--ssh_port")) or None)


def _by_number(words: list[str], *options: str) -> MultiHost | None:
    return MultiHost(by_hand=True) if _number(_value(words, *options).rpartition(":")[2]) > 1 else None


def _slurm(environ: Mapping[str, str]) -> MultiHost | None:
    nodes = _number(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or "")
    return MultiHost(slurm_nodes=nodes) if nodes > 1 else None


def _read_hostfile(path: Path) -> list[str]:
    """Return a hostfile's hosts; empty if it cannot be read, since the job's launcher reports that itself."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = [line.split("#")[0].split() for line in lines]
    return list(dict.fromkeys(words[0] for words in found if words))


def _own(words: list[str]) -> list[str]:
    return list(itertools.takewhile(lambda word: not word.endswith((".py", ".sh")), words))


def _value(words: list[str], *options: str) -> str:
    """Return an option's value, from ``--name value``, ``--name=value`` or ``-Nvalue``; empty if it is absent."""
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            return value if equals else words[place + 1] if place + 1 < len(words) else ""
        if word[:2] in options:
            return word[2:]
    return ""


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
