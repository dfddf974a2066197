"""What training waits for the monitor: ``python bench/frozen_hub.py [--seconds 3] [--cycles 8]``.

One process trains a small model on the CPU under ``ftmon run`` and notes its own step times. Meanwhile, in short turns
so that a machine's drift falls on all alike, its hub is alive, frozen (SIGSTOP), alive again and dead (SIGKILL; the
launcher is stopped so that it starts no other, and a new hub is started for the next cycle). Prints the script's own
step times in each of the four, and their ratio to the first.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = """
import json, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(64, 512))
out = open(sys.argv[1], "w", buffering=1)
while True:
    for (x,) in torch.utils.data.DataLoader(data, batch_size=64):
        begun = time.perf_counter()
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
        out.write(json.dumps([time.time(), (time.perf_counter() - begun) * 1000]) + "\\n")
"""


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise SystemExit("the run did not come up")
        time.sleep(0.05)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each of the four lasts, a cycle")
    parser.add_argument("--cycles", type=int, default=8)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ftmon-frozen-"))
    os.environ["FTMON_HOME"] = str(folder / "home")
    from ftmon.protocol.run import rundir

    script, times = folder / "train.py", folder / "times"
    script.write_text(SCRIPT)
    ftmon = [sys.executable, "-m", "ftmon.tui.cli"]
    windows: dict[str, list[tuple[float, float]]] = {"alive": [], "frozen": [], "alive again": [], "dead": []}
    command = [*ftmon, "run", "--detach", "--name", "frozen", "--", sys.executable, str(script), str(times)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    run = rundir.find("frozen")
    launcher = wait_for(lambda: run.read_run().launcher)
    wait_for(lambda: run.living_hub() and times.exists() and times.stat().st_size > 4000)
    os.kill(launcher.pid, signal.SIGSTOP)

    def hold(name: str) -> None:
        time.sleep(0.3)
        begun = time.time()
        time.sleep(args.seconds)
        windows[name].append((begun, time.time()))

    for _ in range(args.cycles):
        pid = wait_for(run.living_hub).process.pid
        time.sleep(1.0)  # what a new hub has to catch up with
        hold("alive")
        os.kill(pid, signal.SIGSTOP)
        hold("frozen")
        os.kill(pid, signal.SIGCONT)
        hold("alive again")
        os.kill(pid, signal.SIGKILL)
        hold("dead")
        subprocess.Popen(
            [sys.executable, "-m", "ftmon.trainer.hub", str(run.path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    wait_for(run.living_hub)
    os.kill(launcher.pid, signal.SIGCONT)
    subprocess.run([*ftmon, "kill", run.id, "--yes"], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in times.read_text().splitlines() if line.endswith("]")]
    print("| hub | steps | median ms | 99 % ms | worst ms | median against alive |\n" + "| --- " + "| ---: " * 5 + "|")
    base = 0.0
    for name, spans in windows.items():
        found = sorted(ms for t, ms in rows if any(begun <= t <= end for begun, end in spans))
        median = statistics.median(found)
        base = base or median
        print(
            f"| {name} | {len(found):,} | {median:.3f} | {found[int(len(found) * 0.99)]:.3f} | {found[-1]:.1f} | "
            f"{median / base:.4f} |"
        )


if __name__ == "__main__":
    main()
