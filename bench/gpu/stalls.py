"""Stalls under NCCL: who is named, after how long, and whether the GPUs' memory is back after the kill.

    python bench/gpu/stalls.py [--gpus 2] [--ranks 2] [--json FILE] [--kinds missing,ddp,native,stop,exit]
                               [--runs 5] [--parallel 6]

About 25 s a kind. Every kind is a run of ``stall_loop.py`` under torchrun, watched by ftmon in a home of its own; the
last rank is at fault. Four of the kinds are ended by ``ftmon kill``, ``exit`` by ``--exit-timeout``. A line is printed
for each as it comes, then a Markdown table; the exit status is 0 when everything came out as it should. Where a verdict
did not, the run's recording and logs are kept beside ``--json``'s file. More ranks than GPUs share these, which is not
what a training does: it shows how more ranks are judged than there are GPUs at hand. With ``--parallel`` several scenes
are played at a time, each a load to the others; the GPUs' memory is then compared once, before the first and after the
last.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ftmon.protocol.errors import FtmonError
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import processes

LOOP = Path(__file__).with_name("stall_loop.py")
FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
KINDS = ("missing", "ddp", "native", "stop", "exit")
BEGIN_SECONDS = 90.0
VERDICT_SECONDS = 40.0
END_SECONDS = 60.0
EXIT_TIMEOUT = 5.0
SAME_MIB = 300
"""Memory of a GPU is back where it was when it differs by no more: the driver keeps a little."""


def used_mib() -> list[int]:
    """Return the memory in use on each GPU that these runs may use: others' may change meanwhile."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += ["-i", visible] if visible else []
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def until(condition: Callable[[], Any], seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return value


def hang_of(run: RunDir) -> Any:
    if not run.recording.exists():
        return None
    try:
        with Reader(run.recording) as reader:
            return next((alert for alert in reader.alerts() if alert.kind == "hang"), None)
    except FtmonError as error:
        print(f"{run.recording} cannot be read yet: {error}", file=sys.stderr)
        return None


def is_back(before: list[int]) -> bool:
    """Tell whether the GPUs' memory is where it was, within 10 s."""
    return bool(until(lambda: all(a <= b + SAME_MIB for a, b in zip(used_mib(), before, strict=True)), 10.0))


def play(kind: str, gpus: int, ranks: int, keep: Path | None = None, alone: bool = True) -> dict[str, Any]:
    """Play one kind; the row of the table.

    Args:
        kind: of ``KINDS``.
        gpus: how many GPUs the ranks share.
        ranks: how many ranks.
        keep: where the run goes when it did not come out as it should.
        alone: nothing else uses the GPUs, so their memory can be compared.
    """
    row: dict[str, Any] = {"kind": kind, "gpus": gpus, "ranks": ranks, "culprit": ranks - 1}
    before = used_mib()
    with tempfile.TemporaryDirectory(prefix="stall-") as folder:
        home, fault = Path(folder) / "home", Path(folder) / "fault"
        environment = {**os.environ, "FTMON_HOME": str(home), "NO_COLOR": "1"}
        options = ["--exit-timeout", str(EXIT_TIMEOUT)] if kind == "exit" else []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        words = [*FTMON, "run", "--detach", "--name", kind, *options, "--", *command, str(LOOP), kind, str(fault)]
        started = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if started.returncode:
            return {**row, "error": started.stderr.strip()[-300:]}
        run = RunDir(next((home / "runs").iterdir()))
        try:
            if not until(fault.exists, BEGIN_SECONDS):
                return {**row, "error": f"no fault in {BEGIN_SECONDS} s", "log": tail(run)}
            began = float(fault.read_text())
            row["used_mib"] = used_mib()
            if kind == "exit":
                end = until(run.read_exit, END_SECONDS)
                row |= {"seconds": round(end.time - began, 1) if end else None, "cause": end.cause if end else ""}
                row["title"] = end.text if end else "did not end"
                row["right"] = end is not None and end.cause == "hang-at-exit"
            else:
                row |= verdict(run, kind, began, ranks - 1)
                kill = subprocess.run(
                    [*FTMON, "kill", run.id, "--yes"], env=environment, capture_output=True, text=True
                )
                row |= {"kill_status": kill.returncode, "kill": kill.stdout.strip().splitlines()[-1:]}
                until(run.read_exit, END_SECONDS)
            row["left"] = len(until_none_left(run))
        finally:
            end_everything(run)
            if keep is not None and not row.get("right"):
                name = f"{run.id}-{ranks}-ranks-{time.monotonic_ns()}"
                shutil.copytree(run.path, keep / name, ignore=shutil.ignore_patterns("*.sock"))
        back = is_back(before) if alone else None
        row |= {"before_mib": before, "after_mib": used_mib(), "memory_back": back}
    row["ok"] = bool(row["right"] and row["left"] == 0 and back is not False and row.get("kill_status", 0) == 0)
    return row


def verdict(run: RunDir, kind: str, began: float, culprit: int) -> dict[str, Any]:
    alert = until(lambda: hang_of(run), VERDICT_SECONDS)
    if alert is None:
        return {"right": False, "seconds": None, "title": "nothing said"}
    named = alert.evidence.get("hung") or ([alert.rank] if alert.rank is not None else [])
    found = {"seconds": round(alert.time - began, 1), "title": alert.title, "named": named}
    found["at"] = alert.evidence.get("ranks", {}).get(str(culprit), {}).get("at", "")
    found["groups"] = alert.evidence.get("groups", [])
    found["right"] = named == [culprit] and (kind == "stop" or bool(found["at"]))
    return found


def until_none_left(run: RunDir) -> list[Any]:
    left: list[Any] = []

    def none() -> bool:
        left[:] = processes.of_run(run.path, [], [])
        return not left

    until(none, 15.0)
    return left


def tail(run: RunDir) -> str:
    try:
        return (run.logs / "launcher.log").read_text()[-1500:]
    except OSError:
        return ""


def end_everything(run: RunDir) -> None:
    """End what this bench started, whatever became of it."""
    import signal

    for process in processes.of_run(run.path, [], []):
        processes.send_signal(process, signal.SIGKILL)
    launcher = run.read_run().launcher
    if launcher is not None:
        until(lambda: not is_alive(launcher), 30.0)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| under NCCL | ranks on GPUs | verdict | s | memory MiB before, during, after | left | ok |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = f"{row.get('before_mib')} {row.get('used_mib')} {row.get('after_mib')}"
        words = row.get("error") or row.get("title")
        where = f"{row['ranks']} on {row['gpus']}"
        cells = (row["kind"], where, words, row.get("seconds"), memory, row.get("left"), row.get("ok"))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--ranks", type=int, default=0, help="default: one a GPU")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=int, default=1, help="of each kind")
    parser.add_argument("--parallel", type=int, default=1, help="scenes at a time")
    arguments = parser.parse_args()
    gpus = arguments.gpus or len(used_mib())
    keep = arguments.json.parent if arguments.json else None
    before = used_mib()
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(arguments.parallel) as pool:
        scenes = [
            pool.submit(play, kind, gpus, arguments.ranks or gpus, keep, arguments.parallel == 1)
            for _ in range(arguments.runs)
            for kind in arguments.kinds.split(",")
        ]
        for scene in as_completed(scenes):
            rows.append({**scene.result(), "parallel": arguments.parallel})
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=2))
    print(table(rows))
    back = is_back(before)
    seconds = sorted(row["seconds"] for row in rows if row.get("seconds") is not None and row["kind"] != "exit")
    right = sum(bool(row.get("ok")) for row in rows)
    print(f"{right} of {len(rows)} right; verdicts after {seconds} s; memory back: {back}")
    return 0 if back and all(row.get("ok") for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
