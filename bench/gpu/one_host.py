"""What needs all GPUs of one host: the demo and its faults, stalls alone and beside CPU load, an 8B on 1, 2, 4, 8 GPUs.

    python bench/gpu/one_host.py --out FOLDER [--parts prepare,trl,fewer,bf16,demo,stalls] [--gpus 4] [--steps 40]

``prepare`` writes the 8B's weights and predicts each configuration, on the CPU. ``stalls`` plays
"a rank is missing from a collective" five times alone, five times beside scenes on the host's CPUs, then the other
kinds. ``trl`` trains the 8B with ZeRO-3 on all GPUs, then has TRL do the same; ``fewer`` trains it on two, if there are
more, and on another GPU with bf16 states; ``bf16`` with these states on all and on two. A part can be run by itself:
what is there of ``prepare`` is used. Results of the other benches are written into the folder; ``--table`` prints
predicted beside measured peaks of each phase and rank. ``--tiny`` shrinks the models, to try the script on a CPU.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import train_rows
import train_speed

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LOAD_SCENES = 40
RUNS = "5"
ALONE = "8b-full-bf16"


def counted() -> int:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return len(subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines())


def call(out: Path, name: str, *words: str, gpus: str | None = None, seconds: float = 300) -> None:
    """Run a bench; its output goes into the folder. After ``seconds`` it is ended, and what it started."""
    began = time.monotonic()
    environment = os.environ | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    with (out / f"{name}.log").open("w") as log:
        job = subprocess.Popen(
            [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        for patience, number in ((seconds, signal.SIGTERM), (30.0, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(patience)
                break
            os.killpg(job.pid, number)
        status = job.wait()
    print(f"{name}: status {status} after {time.monotonic() - began:.0f} s", flush=True)


def rows_of(gpus: int) -> list[str]:
    """Return the rows on as many GPUs and fewer: ZeRO-3 with fp32 and with bf16 states, and one GPU with the latter."""
    counts = [count for count in (8, 4, 2) if count <= gpus]
    return [*(f"8b-zero3-{count}" for count in counts), *(f"8b-zero3-bf16-{count}" for count in counts), ALONE]


def row_of(key: str, tiny: bool) -> train_rows.Row:
    row = train_rows.ROWS[key]
    return train_rows.shrunk(row) if tiny else row


def documents_of(work: Path, key: str, steps: int, tiny: bool) -> Path:
    """Return a row's documents; ``train_speed.py`` writes the same."""
    row, data = row_of(key, tiny), work / f"{key}.jsonl"
    train_rows.documents(data, row.micro_batch * row.length * row.gpus * (steps + 10))
    return data


def prepare(out: Path, work: Path, gpus: int, steps: int, tiny: bool) -> None:
    """Write the weights, and predict every row before it runs."""
    began = time.monotonic()
    keys = rows_of(gpus)
    data, folder = documents_of(work, keys[0], steps, tiny), train_rows.folder_of(work, row_of(keys[0], tiny))
    words = ["--prepare", keys[0], "--folder", str(folder), "--data", str(data), *(["--tiny"] if tiny else [])]
    call(out, "weights", str(HERE / "train_speed.py"), *words)
    found: dict[str, Any] = {}

    def predict(key: str) -> None:
        began = time.monotonic()
        found[key] = train_speed.predicted(row_of(key, tiny), folder, documents_of(work, key, steps, tiny), steps, tiny)
        found[key]["seconds"] = round(time.monotonic() - began, 1)
        (out / "predicted.json").write_text(json.dumps(found, indent=1))

    threads = [threading.Thread(target=predict, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"predicted: {time.monotonic() - began:.0f} s", flush=True)


def stalls(out: Path, gpus: int) -> None:
    bench = str(HERE / "stalls.py")
    common = ["--gpus", str(gpus)]
    for name in ("alone", "loaded", "kinds"):
        (out / name).mkdir(exist_ok=True)
    call(out, "alone", bench, *common, "--kinds", "missing", "--runs", RUNS, "--json", str(out / "alone/rows.json"))
    with (out / "scenes.log").open("w") as log:
        # They begin within the first third of the budget, and end by themselves.
        words = ["--runs", "9", "--parallel", str(LOAD_SCENES), "--json", str(out / "scenes.jsonl"), "--budget", "150"]
        load = subprocess.Popen(
            [sys.executable, "-m", "bench.scenarios", *words], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        time.sleep(15)
        words = ["--kinds", "missing", "--runs", RUNS, "--parallel", "3", "--json", str(out / "loaded/rows.json")]
        call(out, "loaded", bench, *common, *words)
        print(f"load average {os.getloadavg()[0]:.0f}", flush=True)
        load.wait()
    words = ["--kinds", "ddp,native,stop,exit", "--json", str(out / "kinds/rows.json")]
    call(out, "kinds", bench, *common, *words, "--parallel", "4")


def train(out: Path, work: Path, steps: int, tiny: bool, *runs: tuple[str, range, str, bool]) -> None:
    """Train rows side by side: name of the results, GPUs, row, whether TRL trains it as well."""
    threads: list[threading.Thread] = []
    for name, devices, key, trl in runs:
        words = ["--rows", key, "--steps", str(steps), "--work", str(work), "--out", str(out / f"{name}.json")]
        words += ["--trl"] * trl + ["--tiny"] * tiny
        options: dict[str, Any] = {"gpus": ",".join(map(str, devices)), "seconds": 300 if trl else 200}
        called = (out, name, str(HERE / "train_speed.py"), *words)
        threads.append(threading.Thread(target=call, args=called, kwargs=options))
        threads[-1].start()
    for thread in threads:
        thread.join()


def table(out: Path) -> None:
    """Print speed, and each phase's peak of each rank beside its prediction."""
    predicted = json.loads((out / "predicted.json").read_text())
    results = [
        row for path in sorted(out.glob("*.json")) if path.stem != "predicted" for row in json.loads(path.read_text())
    ]
    print("| row | by | tokens/s a GPU | MFU | ms a step (predicted) | peak GiB | status |")
    print("| --- | --- | ---: | ---: | ---: | ---: | --- |")
    for row in results:
        told = predicted.get(row["row"], {}).get("step_ms") if row["by"] == "ftmon" else ""
        peak = max(row["peak_gib"].values()) if "peak_gib" in row else None
        cells = (row["row"], row["by"], row.get("tokens_per_s"), row.get("mfu"), f"{row.get('step_ms')} ({told})", peak)
        print(f"| {' | '.join(map(str, cells))} | {row['status']} |")
    print("\n| row | phase | measured by rank, GiB | error by rank |\n| --- | --- | --- | --- |")
    errors: list[float] = []
    for row in results:
        if row["by"] != "ftmon" or "peak_gib_by_rank" not in row or "peak_gib_by_rank" not in predicted[row["row"]]:
            continue
        pairs = list(zip(row["peak_gib_by_rank"], predicted[row["row"]]["peak_gib_by_rank"], strict=True))
        for phase in train_speed.PHASES:
            found = [told[phase] / measured[phase] - 1 for measured, told in pairs]
            errors += found
            figures = ", ".join(f"{measured[phase]:.3f}" for measured, _ in pairs)
            print(f"| {row['row']} | {phase} | {figures} | {', '.join(f'{error:+.2%}' for error in found)} |")
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"\n{len(errors)} peaks: median error {statistics.median(sizes):.2%}, worst {max(sizes):.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/one_host"))
    parser.add_argument("--parts", default="prepare,trl,fewer,bf16,demo,stalls")
    parser.add_argument("--gpus", type=int, default=0, help="default: all")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the tables of the folder's results, run nothing")
    given = parser.parse_args()
    if given.table:
        table(given.out)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    gpus, parts = given.gpus or counted(), given.parts.split(",")
    training = (given.out, given.work, given.steps, given.tiny)
    if "prepare" in parts:
        prepare(given.out, given.work, gpus, given.steps, given.tiny)
    if "trl" in parts:
        train(*training, ("all", range(gpus), f"8b-zero3-{gpus}", True))
    if "fewer" in parts:
        two = [("two", range(2), "8b-zero3-2", False)] if gpus > 2 else []  # else `trl` has done it
        train(*training, *two, ("one-bf16", range(gpus - 1, gpus), ALONE, False))
    if "bf16" in parts:
        train(*training, ("all-bf16", range(gpus), f"8b-zero3-bf16-{gpus}", False))
        if gpus > 2:
            train(*training, ("two-bf16", range(2), "8b-zero3-bf16-2", False))
    if "demo" in parts:
        call(given.out, "demo", str(HERE / "demo.py"), "--out", str(given.out / "demo.md"))
    if "stalls" in parts:
        stalls(given.out, gpus)


if __name__ == "__main__":
    main()
