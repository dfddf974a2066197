"""Finds processes that finished runs left on this host, by an environment variable, and ends them.

``python -m ftmon.trainer.host.end.cleanup [--yes] [--json] [--elsewhere]``. A process is an orphan if its environment
names a run whose launcher and hub are both gone, or whose directory is gone. A run of another host may only be
disconnected: if its hub does not answer, its processes here are listed, but ended only on request. Processes that may
belong to a watched run are spared.
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....protocol.errors import FtmonError
from ....protocol.host.process import is_alive
from ....protocol.link.sockets import read_join
from ....protocol.run.environment import JOIN_ENV, RUN_ENV
from ....protocol.run.rundir import RunDir
from ....protocol.text import duration, gib, kernel_sleep, sanitize
from .. import processes
from ..processes import Process
from .kill import sweep, why_stays

_SETTLED_SECONDS = 60.0  # Seconds after a run's end in which its other hosts end their leftover processes
_ANSWER_SECONDS = 2.0


class Orphan(msgspec.Struct, frozen=True):
    """A process that outlived its run."""

    pid: int
    start_ticks: int
    name: str
    state: str  # ``R``, ``S``, ``D`` (uninterruptible), ``T`` (stopped) ..
    age_s: float
    run: str
    why: str  # State of that run, in words
    gpu_bytes: int  # GPU memory that it holds according to NVML; 0 if not listed
    sure: bool = True  # False: it belongs to a run of another host that does not answer but may only be disconnected

    @property
    def line(self) -> str:
        """A line of text about it."""
        held = f", holds {gib(self.gpu_bytes)} of GPU memory" if self.gpu_bytes else ""
        state = {"T": ", stopped", "t": ", traced", "D": f", {kernel_sleep()}"}.get(self.state, "")
        run = sanitize(Path(self.run).name, 120)
        return f"pid {self.pid} ({sanitize(self.name, 40)}), {duration(self.age_s)} old{state}{held}: {run}, {self.why}"


def find() -> list[Orphan]:
    """Return the orphans of all runs on this host, oldest first."""
    table = processes.table()
    mine = {os.getpid(), *(above.pid for above in processes.ancestors(os.getpid(), table))}
    runs: dict[str, OrphanReason] = {}
    found: dict[int, tuple[Process, str]] = {}
    for process in table.values():
        if process.pid in mine or not process.alive:
            continue
        mark = processes.variable_of(process.pid, RUN_ENV)
        if not mark:
            continue
        if mark not in runs:
            # A process that joined another host's run has the path of a directory on that host in its environment.
            runs[mark] = orphan_reason(RunDir(mark), processes.variable_of(process.pid, JOIN_ENV) or "")
        if runs[mark].why:
            found[process.pid] = (process, mark)
    # Descendants of an orphan may have been started with another environment.
    for process in processes.descendants(found, table):
        if process.alive and process.pid not in mine and process.parent in found:
            found.setdefault(process.pid, (process, found[process.parent][1]))
    held = _gpu_memory(set(found))
    boot = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    ticks = os.sysconf("SC_CLK_TCK")
    orphans = [
        Orphan(
            *(*process.key, process.name, process.state, max(0.0, time.time() - boot - process.start_ticks / ticks)),
            *(mark, runs[mark].why, held.get(process.pid, 0), runs[mark].sure),
        )
        for process, mark in found.values()
    ]
    return sorted(orphans, key=lambda orphan: -orphan.age_s)


class OrphanReason(NamedTuple):
    """Why a run's processes are orphans, in words; empty if they are not, or if it is unknown."""

    why: str
    sure: bool = True


def orphan_reason(run: RunDir, join: str = "") -> OrphanReason:
    """Return why a run's processes are orphans.

    A directory that does not exist here is on another host or was removed; ``join`` is the join file, if there is one.
    """
    try:
        if join and not (run.path / "run.json").exists():
            return _elsewhere(join)
        if not run.path.exists():
            return OrphanReason("whose directory is gone")
        content = run.read_run()
        end = run.read_exit()
        if content.host != socket.gethostname():
            over = end is not None and time.time() - end.time > _SETTLED_SECONDS
            return OrphanReason(f"which {end.state}") if end is not None and over else _elsewhere(join)
        launcher_lives = content.launcher is not None and is_alive(content.launcher)
        if launcher_lives or run.living_hub() is not None:
            return OrphanReason("")
    except (FtmonError, OSError):
        return OrphanReason("")
    return OrphanReason(f"which {end.state}" if end is not None else "whose launcher and hub are gone")


def _elsewhere(path: str) -> OrphanReason:
    """Return why the processes of another host's run are orphans, as far as known on this host."""
    try:
        join = read_join(Path(path))
    except FtmonError:
        return OrphanReason(f"of another host, and {sanitize(path, 200)}, its hub's address, is gone", sure=False)
    port = join.port_of("agents")
    for address in join.addresses:
        with contextlib.suppress(OSError), socket.create_connection((address, port), _ANSWER_SECONDS):
            return OrphanReason("")
    return OrphanReason(f"whose hub on {sanitize(join.host, 64)} does not answer", sure=False)


def end(orphans: Sequence[Orphan]) -> list[str]:
    """End orphans by TERM, then KILL; return a line about each one left."""
    wanted = {(orphan.pid, orphan.start_ticks) for orphan in orphans}

    def living() -> list[Process]:
        found = [processes.read(pid) for pid, _ in wanted]
        return [one for one in found if one is not None and one.alive and one.key in wanted]

    return [why_stays(process, ": another user's, perhaps") for process in sweep(living)]


def _gpu_memory(pids: set[int]) -> dict[int, int]:
    if not pids:
        return {}
    from ..hardware.gpus import gpu_use

    found = gpu_use(pids)
    return found.held if found is not None else {}


def _confirmed() -> bool:
    """Ask on a terminal, default no; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        print("nothing was ended: --yes ends them", file=sys.stderr)
        return False
    print("End them? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.host.end.cleanup``; return 0 if no orphan is left, else 1."""
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.host.end.cleanup", description=__doc__)
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="list them, and end nothing")
    parser.add_argument("--elsewhere", action="store_true", help="also of other hosts' runs whose hub does not answer")
    arguments = parser.parse_args(argv)
    orphans = find()
    if arguments.json:
        print(json.dumps(msgspec.to_builtins(orphans), indent=2))
        return 0
    unsure = [] if arguments.elsewhere else [orphan for orphan in orphans if not orphan.sure]
    orphans = [orphan for orphan in orphans if orphan not in unsure]
    if unsure:
        print(*(orphan.line for orphan in unsure), sep="\n")
        print(f"{len(unsure)} left alone, as that host may only be cut off; --elsewhere ends these too")
    if not orphans:
        print(f"nothing {'else ' if unsure else ''}of an earlier run is running here")
        return 0
    print(*(orphan.line for orphan in orphans), sep="\n", flush=True)
    if not arguments.yes and not _confirmed():
        return 1
    left = end(orphans)
    print(f"ended {len(orphans) - len(left)} of {len(orphans)}", *left, sep="\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
