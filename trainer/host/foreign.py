"""``python -m ftmon.trainer.host.foreign PID | --all``: watches runs that were started without ftmon.

Finds the processes that are ranks, creates a run directory for each of their runs, and starts its hub, which observes
them from outside (``trainer.hub.foreign``). Prints one JSON line per run, ``{"run": DIRECTORY, "notes": [...]}``.

A rank is the topmost Python process with a rank in its environment that a launcher set (``RANK``, ``WORLD_SIZE``): its
children inherit it. Ranks with one ``TORCHELASTIC_RUN_ID``, or else one ``MASTER_PORT``, are a run. A process that
has loaded PyTorch and has no rank is a run of its own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...protocol.errors import FtmonError, UsageError
from ...protocol.host.process import ProcessId, never_fail, proc_bytes, write_private
from ...protocol.run import rundir
from ...protocol.run.environment import RUN_ENV
from ...protocol.run.rundir import Foreign, ForeignRank, RunDir
from ...protocol.run.start import spawn_hub
from ...protocol.text import counted, ranks_in_words
from . import processes
from .inspection.outside import why_no_stacks
from .processes import Process, ancestors

_LAUNCHERS = frozenset(
    (
        *("torchrun", "deepspeed", "ds", "accelerate", "accelerate-launch", "mpirun", "mpiexec", "mpiexec.hydra"),
        *("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"),
        *("deepspeed.launcher.runner", "deepspeed.launcher.launch"),
    )
)
"""Programs that start ranks and nothing else: a kill of the whole run ends them too."""
_RAS_ADDRESS = "localhost:28028"  # Default of NCCL_RAS_ADDR
_PYTHON = re.compile(rb"/(?:lib)?python(3\.\d+)")
_INJECT_SECONDS = 20.0
_AGE_SECONDS = 10.0  # Of a process without a rank that ``--all`` takes for a training


@dataclass
class Job:
    """Ranks of one run on this host."""

    key: str
    ranks: dict[int, Process] = field(default_factory=dict[int, Process])
    environments: dict[int, dict[str, str]] = field(default_factory=dict[int, dict[str, str]])

    def place(self, rank: int) -> ForeignRank:
        """Return a rank with its process."""
        found, process = self.environments[rank], self.ranks[rank]
        world = _number(found.get("WORLD_SIZE")) or 1
        local = _number(found.get("LOCAL_RANK"))
        return ForeignRank(rank, rank if local is None else local, world, ProcessId(process.pid, process.start_ticks))


def rank_of(environment: Mapping[str, str]) -> int | None:
    """Return the rank that a launcher's variables name; None if they name none."""
    rank, world = _number(environment.get("RANK")), _number(environment.get("WORLD_SIZE"))
    return rank if rank is not None and world and rank < world else None


def find_jobs(table: Mapping[int, Process], environments: Mapping[int, dict[str, str]]) -> list[Job]:
    """Return the runs whose ranks have one in their environment; ``environments`` by pid, of the readable ones."""
    ranks = {pid: rank_of(found) for pid, found in environments.items()}
    named = {
        pid: (rank, environments[pid].get("LOCAL_RANK"))
        for pid, rank in ranks.items()
        if rank is not None and is_python(pid)
    }
    jobs: dict[str, Job] = {}
    for pid in sorted(named, key=lambda pid: (table[pid].start_ticks, pid)):
        if any(named.get(above.pid) == named[pid] for above in ancestors(pid, table)):
            continue  # a child that has inherited the variables
        if any(named.get(below.pid, named[pid]) != named[pid] for below in processes.descendants([pid], dict(table))):
            continue  # a launcher that was given the rank of its host
        found = environments[pid]
        keys = (found.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
        key = next((key for key in keys if key not in ("", "none")), "")
        job = jobs.setdefault(key, Job(key))
        job.ranks[named[pid][0]], job.environments[named[pid][0]] = table[pid], found
    return list(jobs.values())


def jobs_of(pid: int, table: Mapping[int, Process], environments: Mapping[int, dict[str, str]]) -> list[Job]:
    """Return the runs of a launcher's or a rank's process, or of one of its children; else that process alone.

    Raises:
        UsageError: there is no such process, it is another user's, it is watched already, or it trains nothing.
    """
    if pid not in table or not table[pid].alive:
        raise UsageError(f"there is no process {pid}; 'ftmon watch --all' finds the runs of this host")
    if pid not in environments:
        own = pid in _own_line(table)
        why = (
            "runs this command: name a rank or its launcher"
            if own
            else "belongs to another user: watch it as that user"
        )
        raise UsageError(f"process {pid} {why}")
    if run := environments[pid].get(RUN_ENV):
        raise UsageError(f"process {pid} was started by ftmon: ftmon attach {Path(run).name}")
    below = {pid, *(each.pid for each in processes.descendants([pid], dict(table)))}
    line = [pid, *(above.pid for above in ancestors(pid, table))]
    jobs = find_jobs(table, environments)
    found = [job for job in jobs if any(rank.pid in below for rank in job.ranks.values())]
    found = found or [job for job in jobs if any(rank.pid in line for rank in job.ranks.values())]
    found = found or list(single_jobs(sorted(below) + line[1:], table, environments))[:1]
    if not found:
        raise UsageError(
            f"process {pid} ({table[pid].name}) is neither a rank nor a launcher of ranks, and has not loaded PyTorch"
        )
    return found


def single_jobs(
    pids: Sequence[int], table: Mapping[int, Process], environments: Mapping[int, dict[str, str]]
) -> Iterator[Job]:
    """Yield those of the processes that have loaded PyTorch in Python and are below no other that has."""
    known = (pid for pid in pids if pid in environments and is_python(pid))
    loaded = {pid for pid in known if b"/libtorch" in proc_bytes(f"/proc/{pid}/maps")}
    for pid in pids:
        if pid in loaded and not any(above.pid in loaded for above in ancestors(pid, table)):
            yield Job(f"pid {pid}", {0: table[pid]}, {0: environments[pid]})


def all_jobs(table: Mapping[int, Process], environments: Mapping[int, dict[str, str]]) -> list[Job]:
    """Return every run of this user that ftmon did not start."""
    known = {pid: found for pid, found in environments.items() if RUN_ENV not in found}
    jobs = find_jobs(table, known)
    ranks = [process.pid for job in jobs for process in job.ranks.values()]
    taken = {*ranks, *(each.pid for each in processes.descendants(ranks, dict(table)))}
    taken.update(above.pid for pid in ranks for above in ancestors(pid, table))
    return jobs + list(single_jobs([pid for pid in known if pid not in taken and _is_old(table[pid])], table, known))


def _is_old(process: Process) -> bool:
    """Return whether a process has run too long for one that prints PyTorch's version, or compiles for a training."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK") >= _AGE_SECONDS


def environments_of(table: Mapping[int, Process]) -> dict[int, dict[str, str]]:
    """Return the environments of this user's living processes, by pid, without this process's own ancestors."""
    found = readable_environments(table)
    for pid in _own_line(table):
        found.pop(pid, None)
    return found


def _own_line(table: Mapping[int, Process]) -> list[int]:
    """Return the pids of this process and its ancestors."""
    pid = os.getpid()
    return [pid, *(above.pid for above in ancestors(pid, table))] if pid in table else []


def readable_environments(table: Mapping[int, Process]) -> dict[int, dict[str, str]]:
    """Return the environments of living processes of this user, by pid."""
    found: dict[int, dict[str, str]] = {}
    for pid, process in table.items():
        entries = processes.environment_of(pid) if process.alive else [b""]
        if entries != [b""]:
            pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
            found[pid] = {name: value for name, _, value in pairs}
    return found


def launcher_of(ranks: Mapping[int, Process], table: Mapping[int, Process]) -> ProcessId | None:
    """Return the outermost launcher of ranks above all of these ranks; None without one."""
    lines = [[each.pid for each in ancestors(process.pid, table)] for process in ranks.values()]
    common = [pid for pid in lines[0] if all(pid in line for line in lines)]
    found: int | None = None
    for pid in common:
        if not _is_launcher(pid):
            break
        found = pid
    return ProcessId(found, table[found].start_ticks) if found is not None else None


def _is_launcher(pid: int) -> bool:
    words = [os.path.basename(os.fsdecode(word)) for word in proc_bytes(f"/proc/{pid}/cmdline").split(b"\0")[:8]]
    return not _LAUNCHERS.isdisjoint(words)


def watch(job: Job, table: Mapping[int, Process]) -> dict[str, object]:
    """Create the run of a job, start its hub, and return its directory and what is missing; reuse a living one."""
    ranks = [job.place(rank) for rank in sorted(job.ranks)]
    first = job.ranks[ranks[0].rank]
    known = next((run for run in rundir.all_runs() if _watches(run, ranks)), None)
    if known is not None:
        if known.living_hub() is None:
            with (known.logs / "hub.log").open("ab") as log:
                spawn_hub(known, log)
        return {"run": str(known.path), "notes": []}
    has_nccl = b"libnccl" in proc_bytes(f"/proc/{first.pid}/maps")
    environment = job.environments[ranks[0].rank]
    nccl = environment.get("NCCL_RAS_ADDR", _RAS_ADDRESS) if has_nccl else ""
    command = [os.fsdecode(word) for word in proc_bytes(f"/proc/{first.pid}/cmdline").split(b"\0") if word]
    foreign = Foreign(ranks, launcher_of(job.ranks, table), nccl)
    run = rundir.create(_name(command), command, "watch", foreign=foreign)
    with (run.logs / "hub.log").open("ab") as log:
        spawn_hub(run, log)
    return {"run": str(run.path), "notes": list(_notes(run, job, ranks))}


def _watches(run: RunDir, ranks: Sequence[ForeignRank]) -> bool:
    try:
        foreign = run.read_run().foreign
        return foreign is not None and {*foreign.ranks} == {*ranks} and run.read_exit() is None
    except FtmonError:
        return False


def _name(command: Sequence[str]) -> str:
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    return scripts[0] if scripts else Path(command[0]).name if command else "watch"


def _notes(run: RunDir, job: Job, ranks: Sequence[ForeignRank]) -> Iterator[str]:
    """Yield what is not observed, and why; inject the probe where that is possible."""
    pids = [rank.process.pid for rank in ranks]
    yield f"{counted(len(ranks), 'rank')} found: {', '.join(f'{one.rank} (pid {one.process.pid})' for one in ranks)}"
    elsewhere = sorted({*range(ranks[0].world_size)} - {one.rank for one in ranks})
    if elsewhere:
        yield f"{ranks_in_words(elsewhere)} run on other hosts: not watched"
    versions = {pid: python_version(pid) for pid in pids}
    unable = sorted({f"{major}.{minor}" for major, minor in versions.values() if (major, minor) < (3, 14)})
    if unable:
        yield f"memory by phase, losses, steps: start with ftmon run (needs Python 3.14; here {', '.join(unable)})"
    else:
        for one in ranks:
            yield inject(run, one, job.environments[one.rank])
    if reason := why_no_stacks(pids[0]):
        yield f"stacks: {reason}"


def is_python(pid: int) -> bool:
    """Return whether a process is Python, and no shell around a rank, compiler or debugger; True if it is unknown."""
    found = proc_bytes(f"/proc/{pid}/maps")
    return not found or _PYTHON.search(found) is not None


def python_version(pid: int) -> tuple[int, int]:
    """Return the version of a process's interpreter, by its mapped files; (0, 0): unknown."""
    found = _PYTHON.search(proc_bytes(f"/proc/{pid}/maps"))
    if found is None:
        return 0, 0
    major, minor = found[1].split(b".")
    return int(major), int(minor)


_INJECTOR = """
import sys
import ftmon, msgspec, zmq
sys.remote_exec(int(sys.argv[1]), sys.argv[2])
"""
_INJECTED = """
import threading
def load():
    try:
        from ftmon.trainer.probe.start.attach import attach_running
        attach_running({run!r}, {report!r})
    except BaseException as error:
        with open({report!r}, "w") as file:
            file.write("!" + type(error).__name__ + ": " + str(error))
threading.Thread(target=load, name="ftmon-attach", daemon=True).start()
"""


def inject(run: RunDir, rank: ForeignRank, environment: Mapping[str, str]) -> str:
    """Start the probe inside a running rank by ``sys.remote_exec`` of its own interpreter; return the outcome."""
    pid, who = rank.process.pid, f"rank {rank.rank}"
    script, report = run.path / f"inject-{pid}.py", run.path / f"inject-{pid}.txt"
    write_private(script, _INJECTED.format(run=str(run.path), report=str(report)).encode())
    words = [os.fsdecode(word) for word in proc_bytes(f"/proc/{pid}/cmdline").split(b"\0")]
    python = words[0] if "python" in os.path.basename(words[0]) else f"/proc/{pid}/exe"
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
        command = [python, "-c", _INJECTOR, str(pid), str(script)]
        done = subprocess.run(
            command, env=dict(environment), cwd=folder, capture_output=True, timeout=_INJECT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{who}: the probe was not injected: {error}"
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["unknown"])[-1]
        fix = f"; install ftmon there: {python} -m pip install ftmon" if "ModuleNotFound" in last else ""
        return f"{who}: the probe was not injected: {last[:200]}{fix}"
    deadline = time.monotonic() + _INJECT_SECONDS
    while time.monotonic() < deadline:
        if report.exists() and (text := report.read_text()):
            if text.startswith("!"):
                return f"{who}: the probe was not injected: {text[1:]}"
            return f"{who}: the probe was injected; its training thread stood for {float(text) * 1000:.0f} ms"
        time.sleep(0.05)
    return f"{who}: the probe starts when its call into native code returns; until then it is watched from outside"


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and len(text) < 9 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Watch the runs named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.host.foreign", description=__doc__)
    parser.add_argument("pid", type=int, nargs="?")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args(argv)
    never_fail()
    try:
        table = processes.table()
        environments = environments_of(table)
        jobs = all_jobs(table, environments) if arguments.all else jobs_of(arguments.pid, table, environments)
        if not jobs:
            raise UsageError(
                "no run of this user that ftmon did not start: no process has a rank, or has loaded PyTorch"
            )
        for job in jobs:
            print(json.dumps(watch(job, table)), flush=True)
    except FtmonError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
