"""What ftmon makes of a training on two nodes, begun by each launcher as its users begin it.

    python -m bench.launchers [--kinds pdsh,by-hand,slurm-batch,...] [--json FILE]

Takes root and Debian's ``openssh-server`` and ``pdsh``; for SLURM also ``slurm-wlm`` (with ``munge``). The nodes are
namespaces of this machine (``nodes.py``): real sshd and ssh, real pdsh, real slurmctld, slurmd and MUNGE; one rank on
each, DeepSpeed on gloo. Each time: both hosts' ranks are seen and step, the other host's agent came up by itself,
stacks of both ranks come, the run is followed from the other node through ``ftmon attach ssh://``, a rank of the other
host that is stopped (SIGSTOP) is named, and the end, by ``ftmon kill``, by the launcher or by the training itself,
leaves no process on either node and no key on the other.
"""

import argparse
import contextlib
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import nodes
from .nodes import NODES, Nodes

TRAIN = str(Path(__file__).with_name("train.py"))
FTMON = (sys.executable, "-m", "ftmon.tui.cli")
FOR_EVER = "100000"
BEGIN_SECONDS, VERDICT_SECONDS, END_SECONDS = 120.0, 30.0, 60.0


class LauncherError(Exception):
    """Something did not come out as it should."""


def until(what: str, found: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > deadline:
            raise LauncherError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.3)
    return value


class Scene:
    """One training on both nodes."""

    def __init__(self, made: Nodes) -> None:
        self.nodes = made
        self.row: dict[str, Any] = {}
        (made.folder / "hostfile").write_text("".join(f"{name} slots=1\n" for name in NODES))
        exported = ("DS_ACCELERATOR", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
        (made.folder / ".deepspeed_env").write_text("".join(f"{key}={made.environ[key]}\n" for key in exported))

    def share_home(self) -> None:
        """Keep the runs where both nodes see them, as a cluster's home directory is; else each has its own."""
        home = self.nodes.folder / "shared"
        home.mkdir(mode=0o700)
        self.nodes.home = home
        self.nodes.environ["FTMON_HOME"] = str(home)

    def ftmon(self, *words: str, node: str = "nodea", check: bool = True, seconds: float = 120.0) -> str:
        return self.nodes.run(node, *FTMON, *words, check=check, seconds=seconds).stdout

    def status(self) -> dict[str, Any]:
        """Tell how the newest run stands; empty while there is none."""
        listed = json.loads(self.ftmon("ls", "--json", check=False) or "[]")
        runs = listed["runs"] if isinstance(listed, dict) else listed
        return json.loads(self.ftmon("status", runs[0]["id"], "--json", check=False) or "{}") if runs else {}

    # What is looked at while it runs.

    def both_step(self) -> str:
        """Wait until both nodes' ranks step; return the run's id."""
        began = time.monotonic()

        def stepping() -> dict[str, Any] | None:
            state = self.status()
            if state.get("state") in ("failed", "stopped", "finished"):
                raise LauncherError(f"it {state['state']} before")
            ranks = state.get("ranks", [])
            there = {rank["host"] for rank in ranks if rank["step"] >= 3}
            return state if there == set(NODES) else None

        try:
            state = until("both nodes' ranks stepping", stepping, BEGIN_SECONDS)
        except LauncherError as error:
            raise LauncherError(f"{error}; {self.words_of_the_job()}") from None
        self.row["seconds to both stepping"] = round(time.monotonic() - began, 1)
        hosts = {host["host"]: host["state"] for host in state["hosts"]}
        if hosts.get("nodeb") != "reachable":
            raise LauncherError(f"no agent speaks for nodeb: {hosts}")
        return state["id"]

    def words_of_the_job(self) -> str:
        found = self.nodes.run("nodea", "sh", "-c", f"tail -n 8 {self.nodes.home}/runs/*/logs/*", check=False)
        return found.stdout[-1500:]

    def stacks(self, run: str) -> None:
        groups = json.loads(self.ftmon("stacks", run, "--json"))["groups"]
        found = {rank: [frame["file"] for frame in group["frames"]] for group in groups for rank in group["ranks"]}
        if found.keys() != {0, 1} or not all(TRAIN in files for files in found.values()):
            raise LauncherError(f"stacks of both ranks: {groups}")

    def attach(self, run: str) -> None:
        """Follow the run from the other node over ssh."""
        words = ["timeout", "-s", "INT", "8", *FTMON, "attach", "--plain", f"ssh://nodea/{run}"]
        there = f"env FTMON_HOME={self.nodes.home} ftmon"
        done = self.nodes.run("nodeb", *words, check=False, FTMON_REMOTE=there)
        if " step " not in done.stdout or "attach again" not in done.stdout:
            raise LauncherError(f"attach over ssh: {(done.stdout + done.stderr)[-400:]}")

    def stop_rank_there(self) -> None:
        """Stop the rank of the other node, wait for the verdict, let it go on."""
        there = next(rank for rank in self.status()["ranks"] if rank["host"] == "nodeb")
        pid = str(there["pid"])
        began = time.time()
        self.nodes.run("nodeb", "kill", "-STOP", pid)

        def named() -> Any:
            hangs = [alert for alert in self.status().get("alerts", []) if alert["kind"] == "hang"]
            return next((alert for alert in hangs if alert["rank"] == there["rank"]), None)

        try:
            alert = until("the stopped rank named", named, VERDICT_SECONDS)
        finally:
            self.nodes.run("nodeb", "kill", "-CONT", pid)
        self.row |= {"verdict": alert["title"], "seconds to verdict": round(alert["time"] - began, 1)}

    def watch(self) -> str:
        run = self.both_step()
        self.stacks(run)
        self.attach(run)
        self.stop_rank_there()
        return run

    # The end.

    def kill(self, run: str, *options: str) -> None:
        self.row["kill"] = self.ftmon("kill", run, "--yes", *options).strip().splitlines()[-1]

    def ended(self, *states: str, text: str = "", seconds: float = END_SECONDS) -> None:
        """Wait for the end, said so, and that nothing is left on either node."""
        state = until("the end", lambda: self.status_if(*states), seconds)
        self.row["end"] = state["state"]
        said = self.nodes.run("nodea", "sh", "-c", f"cat {self.nodes.home}/runs/*/exit.json").stdout
        if text not in said:
            raise LauncherError(f"it ended as {said}, not as {text}")
        with contextlib.suppress(LauncherError):
            until("nothing left", lambda: not self.left(), 20.0)
        self.row["left"] = self.left()
        if self.nodes.home == self.nodes.folder / "shared":
            return
        keys = self.nodes.run("nodeb", "find", str(self.nodes.home), "-name", "join.json").stdout.split()
        if self.row["left"] or keys:
            raise LauncherError(f"left: {self.row['left']} {keys}")

    def left(self) -> list[str]:
        return [f"{node}: {words}" for node in NODES for words in self.nodes.processes(node)]

    def status_if(self, *states: str) -> dict[str, Any] | None:
        state = self.status()
        return state if state.get("state") in states else None


def pdsh(scene: Scene) -> None:
    """``deepspeed --hostfile``, over pdsh and ssh; the rank of the other node is killed."""
    job = ["deepspeed", "--hostfile", "hostfile", "--master_addr", NODES["nodea"], TRAIN, FOR_EVER]
    scene.ftmon("run", "--detach", "--", *job)
    run = scene.watch()
    scene.kill(run, "--rank", "1")
    scene.ended("failed", "stopped")


def by_hand(scene: Scene) -> None:
    """``deepspeed --no_ssh`` on each node; the key is copied with scp."""
    made = scene.nodes
    job = ["deepspeed", "--hostfile", "hostfile", "--no_ssh", "--master_addr", NODES["nodea"]]
    scene.ftmon("run", "--detach", "--", *job, "--node_rank", "0", TRAIN, FOR_EVER)
    join = made.run("nodea", "sh", "-c", f"ls {made.home}/runs/*/join.json").stdout.strip()
    copy = str(made.home / "join.json")
    made.run("nodea", "scp", "-p", "-q", join, f"nodeb:{copy}")
    words = shlex.join([*FTMON, "run", "--join", copy, "--", *job, "--node_rank", "1", TRAIN, FOR_EVER])
    made.run("nodeb", "sh", "-c", f"setsid {words} > {made.folder}/nodeb.log 2>&1 &")
    run = scene.watch()
    scene.kill(run)
    made.run("nodeb", "rm", "-f", copy)  # whoever copied it removes it
    scene.ended("failed", "stopped")


BATCH = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time={limit}

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{ftmon} run --plain -- srun --export=ALL {torchrun} --nnodes="$SLURM_NNODES" --nproc-per-node=1 \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:29500" {train} {steps}
"""


def submit(scene: Scene, steps: str, limit: str = "12:00:00") -> str:
    """Submit the guide's batch script; return the job's number."""
    script = scene.nodes.folder / "batch.sh"
    torchrun = shlex.join([sys.executable, "-m", "torch.distributed.run"])
    words = BATCH.format(limit=limit, ftmon=shlex.join(FTMON), torchrun=torchrun, train=TRAIN, steps=steps)
    script.write_text(words)
    return scene.nodes.run("nodea", "sbatch", "--parsable", str(script)).stdout.strip()


def job_of(scene: Scene, number: str) -> dict[str, str]:
    text = scene.nodes.run("nodea", "scontrol", "-o", "show", "job", number).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def slurm_batch(scene: Scene) -> None:
    """The guide's batch script, to its own end: the job's exit status is the training's. srun brings the key."""
    number = submit(scene, "250")
    scene.watch()
    until("the job's end", lambda: job_of(scene, number)["JobState"] not in ("RUNNING", "COMPLETING"), 90)
    job = job_of(scene, number)
    scene.row["job"] = f"{job['JobState']} {job['ExitCode']}"
    if scene.row["job"] != "COMPLETED 0:0":
        raise LauncherError((scene.nodes.folder / f"slurm-{number}.out").read_text()[-600:])
    scene.ended("finished")


def slurm_cancelled(scene: Scene) -> None:
    """The same from a home directory that both nodes see, and ``scancel``."""
    scene.share_home()
    number = submit(scene, FOR_EVER)
    scene.watch()
    scene.nodes.run("nodea", "scancel", number)
    scene.ended("stopped", text="cancelled by SLURM (")
    scene.row["job"] = job_of(scene, number)["JobState"]


def slurm_time_limit(scene: Scene) -> None:
    """The same with two minutes' time, which it needs more of."""
    scene.share_home()
    number = submit(scene, FOR_EVER, "00:02:00")
    scene.watch()
    scene.ended("stopped", text="cancelled by SLURM: time limit (", seconds=240.0)
    scene.row["job"] = job_of(scene, number)["JobState"]


def slurm_deepspeed(scene: Scene) -> None:
    """``deepspeed --launcher slurm``, which starts the ranks with srun; the nodes see one home directory."""
    scene.share_home()
    job = ["deepspeed", "--hostfile", "hostfile", "--launcher", "slurm", "--master_addr", NODES["nodea"]]
    scene.ftmon("run", "--detach", "--", *job, TRAIN, FOR_EVER)
    run = scene.watch()
    scene.kill(run)
    scene.ended("failed", "stopped")


KINDS: dict[str, Callable[[Scene], None]] = {
    "pdsh": pdsh,
    "by-hand": by_hand,
    "slurm-batch": slurm_batch,
    "slurm-cancelled": slurm_cancelled,
    "slurm-time-limit": slurm_time_limit,
    "slurm-deepspeed": slurm_deepspeed,
}


def play(kind: str, keep: Path | None) -> dict[str, Any]:
    """Play one kind; the row of the table."""
    with contextlib.ExitStack() as stack:
        folder = keep / kind if keep else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nodes-")))
        folder.mkdir(parents=True, exist_ok=True)
        row: dict[str, Any] = {"kind": kind}
        try:
            made = stack.enter_context(nodes.nodes(folder))
            if kind.startswith("slurm"):
                made.start_slurm()
            scene = Scene(made)
            scene.row = row
            KINDS[kind](scene)
            row["ok"] = True
        except nodes.RefusedError as error:
            row |= {"ok": None, "end": f"not played: {error}"}
        except (LauncherError, RuntimeError) as error:
            row |= {"ok": False, "wrong": str(error)}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("kind", "seconds to both stepping", "verdict", "seconds to verdict", "kill", "end", "job", "left", "ok")
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(str(row.get(column, '')) for column in columns)} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for what the nodes share, kept")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for kind in arguments.kinds.split(","):
        why_not = nodes.missing(slurm=kind.startswith("slurm"))
        row = {"kind": kind, "ok": None, "end": f"not played: {why_not}"} if why_not else play(kind, arguments.keep)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2))
    print(table(rows))
    return 0 if all(row["ok"] is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
