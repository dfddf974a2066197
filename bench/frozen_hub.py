"""What training waits for the monitor: ``python bench/frozen_hub.py [--seconds 15] [--rounds 3]``.

One process trains a small model on the CPU under ``ftmon run`` and notes its own step times. Meanwhile its hub is, in
turn, alive, frozen (SIGSTOP), alive again, and dead (killed, with the launcher stopped so that no other is started).
Prints the script's own step times in each of the four, and their ratio to the first.
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
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="how long each of the four lasts, a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ftmon-frozen-"))
    os.environ["FTMON_HOME"] = str(folder / "home")
    from ftmon.protocol import rundir

    script, times = folder / "train.py", folder / "times"
    script.write_text(SCRIPT)
    ftmon = [sys.executable, "-m", "ftmon.tui.cli"]
    windows: dict[str, list[tuple[float, float]]] = {"alive": [], "frozen": [], "alive again": [], "dead": []}
    for round_number in range(args.rounds):
        name = f"frozen{round_number}"
        times.unlink(missing_ok=True)
        command = [*ftmon, "run", "--detach", "--name", name, "--", sys.executable, str(script), str(times)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        run = rundir.find(name)
        while run.living_hub() is None or not times.exists() or times.stat().st_size < 4000:
            time.sleep(0.1)
        hub, launcher = run.living_hub(), run.read_run().launcher
        assert hub is not None
        assert launcher is not None

        def hold(name: str) -> None:
            time.sleep(0.5)
            begun = time.time()
            time.sleep(args.seconds)
            windows[name].append((begun, time.time()))

        hold("alive")
        os.kill(hub.process.pid, signal.SIGSTOP)
        hold("frozen")
        os.kill(hub.process.pid, signal.SIGCONT)
        hold("alive again")
        os.kill(launcher.pid, signal.SIGSTOP)
        os.kill(hub.process.pid, signal.SIGKILL)
        hold("dead")
        os.kill(launcher.pid, signal.SIGCONT)
        subprocess.run([*ftmon, "kill", run.id, "--yes"], check=True, stdout=subprocess.DEVNULL)
        with (folder / "all").open("a") as everything:
            everything.write(times.read_text())
    rows = [json.loads(line) for line in (folder / "all").read_text().splitlines() if line.endswith("]")]
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
