"""Determines whether a command trains on several hosts, and on which, from its arguments and the environment."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...protocol.run.run_options import MultiHost

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
    """Return a launcher's own arguments, without the script and its arguments."""
    for place, word in enumerate(words):
        if re.search(r"\.(py|sh)$", word):
            return words[:place]
    return words


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
