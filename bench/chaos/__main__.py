"""What goes wrong around a training that goes on.

    python -m bench.chaos [--runs 40] [--parallel 2] [--seed 1] [--two-hosts] [--json FILE]

Each run is two real ranks on gloo under ``ftmon run --detach -- torchrun ...``, an app attached, and two blows drawn
from the seed: kill -9 or SIGSTOP (and CONT) of the hub, the app, a rank, the job's launcher or ftmon's own; a disk that
is full for a while; a clock that stands still (all of the monitor stopped, and continued much later). With
``--two-hosts`` the ranks are on two hosts made of network namespaces, and the first blow is one of three that exist
only there: kill -9 or SIGSTOP (and CONT) of the other host's agent, or the link cut for seconds. Then the run is
killed. Asserted each time:

- training: while only the monitor was hit, the ranks' own step times show no pause (their own file says so); a link
  that was cut may hold them up until it is back, and not end them;
- the recording opens, and what is missing of the steps is at most a second in a piece and counted as lost; what another
  host's agent kept while the link was cut arrives;
- the verdict: a rank that was hit is named or nobody is, and nobody else ever is;
- nothing is left: no process with the run's mark, no socket, on either host; the app either shows the end, or was
  killed.
"""

import argparse
import contextlib
import json
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from ftmon.protocol.errors import FtmonError

from .. import hosts
from . import judging
from .blows import MONITOR, SMALL, TRAINING
from .hosts import HOSTS, TwoHostScene
from .scene import ChaosError, Scene

SIZE = 24
"""MiB of the file system that fills up."""
UNTOLD = ("full disk", "kill launcher", "remove recording")
"""Blows after which more may be missing of the recording: it cannot be written, nobody starts another hub, or it is
gone."""
BLOWS: dict[str, Any] = {**HOSTS, **MONITOR, **TRAINING}


def drawn(draw: random.Random, disk: bool, two_hosts: bool) -> list[str]:
    """Draw the blows of a run."""
    firsts = list(HOSTS) if two_hosts else [blow for blow in MONITOR if disk or blow != "full disk"]
    seconds = [*SMALL, *TRAINING, *HOSTS] if two_hosts else [*SMALL, *TRAINING]
    return [draw.choice(firsts), draw.choice(seconds)]


def play(number: int, seed: int, disk: bool, two_hosts: bool) -> dict[str, Any]:
    """Play one run; what it started is gone afterwards."""
    begun = time.monotonic()
    draw = random.Random(f"{seed}/{number}")
    blows = drawn(draw, disk, two_hosts)
    found: dict[str, Any] = {"run": number, "blows": blows}
    wrong: list[str] = []
    scene: Scene | None = None
    mounted = False
    try:
        scene = TwoHostScene(draw) if two_hosts else Scene(draw)
        if "full disk" in blows:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m", "tmpfs", scene.disk], check=True)
            mounted = True
        scene.start()
        for blow in blows:
            scene.wait_steps(20)
            BLOWS[blow](scene)
            if blow in TRAINING:
                break
        found |= judge(scene, blows, wrong)
    except (ChaosError, FtmonError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        if scene is not None:
            scene.clean()
            if mounted:
                subprocess.run(["umount", "-l", scene.disk], check=False)
            shutil.rmtree(scene.folder, ignore_errors=True)
    return {**found, "wrong": wrong, "wall_s": round(time.monotonic() - begun, 1)}


def judge(scene: Scene, blows: list[str], wrong: list[str]) -> dict[str, Any]:
    """Kill the run, and see what must hold."""
    killed = time.time()
    if scene.run.read_exit() is None:
        done = scene.ftmon("kill", scene.run.id, "--yes")
        if done.returncode:
            wrong.append(f"kill: {(done.stdout + done.stderr).strip()[-300:]}")
    with contextlib.suppress(ChaosError):
        scene.wait(lambda: not scene.living(), 40, "the run's end")
    wrong += [f"left: pid {process.pid} {process.name} {process.state}" for process in scene.living()]
    wrong += [f"left: {path}" for path in scene.sockets()]
    if not scene.app_killed and scene.app is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            scene.app.wait(20)
        if scene.app.returncode is None:
            wrong.append("the app has not ended with the run")
    until = min(scene.touched_at or killed, killed)
    steps = judging.pause(scene, until, wrong)
    missing, gap, told = judging.recorded(scene, until, not set(blows).isdisjoint(UNTOLD), wrong)
    judging.verdicts(scene, wrong)
    return {"pause_steps": round(steps, 1), "missing": missing, "gap_s": round(gap, 2), "told": told}


def can_mount() -> bool:
    """Tell whether a file system may be mounted here."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return done.returncode == 0


def table(rows: list[dict[str, Any]]) -> str:
    """Sum the results up, a row a blow."""
    lines = [
        "| blow | runs | all well | longest step, in usual ones | longest gap in the recording |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for blow in BLOWS:
        struck = [row for row in rows if blow in row["blows"]]
        if struck:
            pause = max((row.get("pause_steps", 0.0) for row in struck), default=0.0)
            gap = max((row.get("gap_s", 0.0) for row in struck), default=0.0)
            well = sum(not row["wrong"] for row in struck)
            lines.append(f"| {blow} | {len(struck)} | {well} | {pause:.1f} | {gap:.2f} s |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--two-hosts", action="store_true", help="a rank on each of two hosts made of namespaces")
    parser.add_argument("--json", default="chaos.jsonl", help="where results go, one a line")
    args = parser.parse_args()
    refused = hosts.why_not() if args.two_hosts else ""
    if refused:
        print(f"skipped: {refused}")
        return 0
    disk = can_mount()
    if not disk and not args.two_hosts:
        print("no file system can be mounted here: no full disks")
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(args.first, args.first + args.runs):
        waiting.put(number)
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            row = play(number, args.seed, disk, args.two_hosts)
            with lock:
                rows.append(row)
                with open(args.json, "a") as file:
                    file.write(json.dumps(row) + "\n")
                words = " + ".join(row["blows"])
                print(f"{number:3} {words:32} {row['wall_s']:5} s  {row['wrong'] or 'well'}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(args.parallel)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"\n{table(rows)}")
    bad = [row for row in rows if row["wrong"]]
    for row in bad:
        print(f"run {row['run']} ({', '.join(row['blows'])}): {row['wrong']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
