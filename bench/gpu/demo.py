"""``ftmon demo`` and its faults on the GPUs that are there: what is said of each, how it ends, what is left.

    python bench/gpu/demo.py --out demo.md [--pictures FOLDER] [--only oom,hang]

Prints a Markdown table. Runs that end by themselves go first, the demo alone, then its faults side by side; a hung and
a stopped one are killed while the app (without a terminal) looks on; its screen goes to ``--pictures``.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ftmon.protocol.errors import FtmonError
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Hello
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir

FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
ENDING = ("spike", "slow", "oom", "crash")
STANDING = ("hang", "stop")
ENDING_SECONDS = 100
KIND = {"spike": "spike", "slow": "slow", "oom": "oom", "crash": "died", "hang": "hang", "stop": "hang"}
"""Which alert each fault is to bring; a crash may also be told as ``failure``."""


def start(name: str, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*FTMON, "demo", "--plain", "--name", name, *words, f"output.dir={tempfile.mkdtemp()}/out"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def recorded(name: str) -> tuple[list[Alert], list[int]]:
    """Give the alerts of a run and the pids of its ranks."""
    with Reader(rundir.find(name).recording) as reader:
        frames = reader.state_at(time.time())
        return reader.alerts(), [frame.message.pid for frame in frames if isinstance(frame.message, Hello)]


def smi() -> list[tuple[int, int]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(int(pid), int(mib)) for pid, mib in (row.split(",") for row in rows)]


def used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(row) for row in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def told(alerts: list[Alert]) -> str:
    titles = [f"{alert.kind}: {alert.title}" for alert in alerts if alert.kind != "growth"]
    return "; ".join(titles[:3]) or "none"


async def look_on(name: str, folder: Path | None) -> str:
    """Kill a run with the app attached; return what its screen says of the ranks afterwards."""
    from ftmon.tui.app import FtmonApp
    from ftmon.tui.source.live import LiveSource

    run = rundir.find(name)
    source = LiveSource(run)
    app = FtmonApp(source)
    async with app.run_test(size=(120, 34)) as pilot:
        deadline = time.monotonic() + 20
        while not source.model.ranks and time.monotonic() < deadline:
            await pilot.pause(0.2)
        await pilot.pause(2)
        if folder is not None:
            (folder / f"{name}-before.svg").write_text(app.export_screenshot(title="ftmon"))
        killing = await asyncio.create_subprocess_exec(*FTMON, "kill", name, "--yes", stdout=asyncio.subprocess.PIPE)
        said = (await killing.communicate())[0].decode().strip()
        await pilot.pause(2.5)
        if folder is not None:
            (folder / f"{name}-after.svg").write_text(app.export_screenshot(title="ftmon"))
        states = ", ".join(f"rank {rank.rank} {rank.state}" for rank in source.model.ranks.values())
    source.close()
    return f"{said} | app: {states}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--steps", default="60")
    parser.add_argument("--only", default=",".join(("none", *ENDING, *STANDING)), help="none: the demo without a fault")
    options = parser.parse_args()
    os.environ.setdefault("FTMON_HOME", tempfile.mkdtemp())
    before = used_mib()
    lines = [
        f"### demo: {len(before)} GPUs",
        "",
        "| run | exit | alerts | what was seen |",
        "| --- | ---: | --- | --- |",
    ]

    def say(*cells: object) -> None:
        lines.append("| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in cells) + " |")
        print(lines[-1], flush=True)

    only = options.only.split(",")
    if "none" in only:
        began = time.monotonic()
        job = start("demo", "--steps", options.steps)
        first = None
        text: list[str] = []
        assert job.stdout is not None
        for line in job.stdout:
            text.append(line.rstrip())
            if first is None and " step " in f" {line}":
                first = time.monotonic() - began
        code = job.wait(300)
        alerts, pids = recorded("demo")
        say(
            "demo",
            code,
            told(alerts),
            f"{len(pids)} ranks; first step after {first or -1:.1f} s; {' '.join(text[-2:])}",
        )
    jobs = {kind: start(kind, "--steps", options.steps, "--fault", kind) for kind in ENDING if kind in only}
    for kind, job in jobs.items():
        try:
            output = job.communicate(timeout=ENDING_SECONDS)[0]
        except subprocess.TimeoutExpired:
            print(subprocess.run([*FTMON, "stacks", kind], capture_output=True, text=True, check=False).stdout)
            subprocess.run([*FTMON, "kill", kind, "--yes"], check=False)
            output = f"DID NOT END in {ENDING_SECONDS} s"
        alerts, pids = recorded(kind)
        kinds = {alert.kind for alert in alerts}
        right = KIND[kind] in kinds or (kind == "crash" and "failure" in kinds)
        words = f"{'right' if right else 'NOT NAMED'}; {output.splitlines()[-1]}"
        say(f"--fault {kind}", job.returncode, told(alerts), words)

    jobs = {kind: start(kind, "--fault", kind) for kind in STANDING if kind in only}
    for kind, job in jobs.items():
        deadline = time.monotonic() + 120
        alerts, pids = [], []
        while not any(alert.kind == KIND[kind] for alert in alerts) and time.monotonic() < deadline:
            time.sleep(1)
            with contextlib.suppress(FtmonError):  # not there yet
                alerts, pids = recorded(kind)
        held = [mib for pid, mib in smi() if pid in pids]
        seen = asyncio.run(look_on(kind, options.pictures))
        left = [mib for pid, mib in smi() if pid in pids]
        job.communicate(timeout=60)
        say(f"--fault {kind}", job.returncode, told(alerts), f"held {held} MiB, after the kill {left}; {seen}")
    deadline = time.monotonic() + 20
    while used_mib() != before and time.monotonic() < deadline:
        time.sleep(0.5)
    say("nvidia-smi, MiB used", "", "", f"before {before}, after all {used_mib()}")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
