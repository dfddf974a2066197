"""Whether "fits", "does not fit" and "the largest length that fits" are right at caps of 24, 40 and 80 GB.

    python bench/gpu/fit_predict.py --out bench/data/fit_predictions.json              no GPU needed
    python bench/gpu/fit_verdicts.py --predictions bench/data/fit_predictions.json --out fit.jsonl --parallel 8
    python bench/gpu/fit_verdicts.py --table fit.jsonl                                 the table again

Three real DeepSpeed steps (``fit_steps.py``) are taken at the lengths around the largest that was predicted to fit,
each in processes of their own, one a rank and GPU, whose allocators are limited, and it is noted whether they fitted.
What the output file holds already is not done again.

**What the cap means.** ``--capacity`` is what PyTorch may reserve on one GPU: nothing is subtracted for the CUDA
context, NCCL's buffers and whatever else lies outside PyTorch's allocator. ``set_per_process_memory_fraction`` limits
the same figure, so the fraction is the capacity over the device's total memory. (That a 24 GB GPU leaves less than
24 GB to PyTorch is another figure of the product, ``beside_pytorch``, and not judged here.) One difference is left:
with expandable segments PyTorch compares the whole request with what is left of the fraction, where a GPU that is full
would refuse only the pages that a segment has to grow by. It gives cached pages back and tries again before it
fails, so verdicts differ by a page of 20 MiB or so.

**What is run.** The model is made by the function that the dry run uses (``trainer/predict/model.py``), on the host and
then moved by DeepSpeed, or under ``zero.Init`` with ZeRO-3; only its random numbers are cheaper: large host tensors are
filled from a small pool of them. FusedAdam and CPUAdam are compiled once, beside the first processes that need neither.
Where that fails, functions that do nothing take their place, as in the dry run, and the rows say so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from fit_cases import GB, SHARES, Case, around, environment

STEPS = Path(__file__).resolve().with_name("fit_steps.py")
BESIDE = 1_600_000_000
"""Bytes on the GPU kept for a process beside its cap: CUDA context, loaded kernels, NCCL (1,256 MiB were measured)."""
SECONDS = 120.0
"""That a job may take to get ready, and again with the GPUs."""
AFTER_FAILURE = 8.0
"""Seconds for the other ranks once one has failed: they may wait for it in a collective."""
PORT = 20_000


class Task(NamedTuple):
    """One length of one case."""

    case: Case
    share: float
    predicted: dict[str, Any]

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from others."""
        return self.case.name, self.predicted["length"]


def tasks(predictions: dict[str, Any]) -> list[Task]:
    """Return all tasks: those next to the largest length of every case first."""
    found: list[Task] = []
    for group in (SHARES[:2], SHARES[2:]):
        for name, one in predictions.items():
            if one["largest"] is None:
                print(f"{name}: no length fits, left out", flush=True)
                continue
            points = {point["length"]: point for point in one["points"]}
            for share in group:
                (length,) = around(one["largest"], (share,))
                found.append(Task(Case(**one["settings"]), share, points[length]))
    return found


def gpus() -> list[tuple[str, int]]:
    """Return each GPU's index and free bytes; without one rows of no end, to try the script on a CPU."""
    query = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [("", 1 << 60)] * 2
    return [(index.strip(), int(free) << 20) for index, free in (line.split(",") for line in text.splitlines())]


class Job:
    """The processes of one task, one a rank."""

    def __init__(self, task: Task, gpus: list[str], port: int, options: list[str]) -> None:
        words = ["--case", json.dumps(task.case._asdict()), "--length", str(task.predicted["length"]), *options]
        self._errors = [tempfile.TemporaryFile("w+") for _ in gpus]  # noqa: SIM115
        self._processes: list[subprocess.Popen[str]] = []
        for rank, (gpu, errors) in enumerate(zip(gpus, self._errors, strict=True)):
            own = {"RANK": str(rank), "WORLD_SIZE": str(len(gpus)), "LOCAL_RANK": "0", "LOCAL_SIZE": str(len(gpus))}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": gpu}
            own |= {"OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false", "DS_SKIP_CUDA_CHECK": "1"}
            command, pipe = [sys.executable, str(STEPS), *words], subprocess.PIPE
            kept = environment(task.case, **own)
            process = subprocess.Popen(command, env=kept, stdin=pipe, stdout=pipe, stderr=errors, text=True)
            self._processes.append(process)

    def ready(self) -> bool:
        """Wait until all ranks are ready; False where one is not."""
        return all(line.strip() == "ready" for line in self._lines())

    def take_steps(self) -> dict[str, Any]:
        """Let the ranks take their steps; returns the row of all, of figures the highest."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        rows = [json.loads(line) for line in self._lines() if line.startswith("{")]
        failed = [row for row in rows if not row["fitted"]]
        if not rows or (len(rows) < len(self._processes) and not failed):
            return self.error()
        row = (failed or rows)[0]
        names = {name: None for one in rows for name in one["phases"]}
        row["phases"] = {
            name: [
                max(pair) for pair in zip(*(one["phases"][name] for one in rows if name in one["phases"]), strict=True)
            ]
            for name in names
        }
        row |= {figure: max(one[figure] for one in rows) for figure in ("allocated", "reserved")}
        return row

    def _lines(self) -> list[str]:
        """Return a line of each rank; empty for those that are ended as they take too long."""
        timers = [threading.Timer(SECONDS, self.kill)]
        timers[0].start()

        def read(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line or '"fitted": false' in line:
                timers.append(threading.Timer(AFTER_FAILURE, self.kill))
                timers[-1].start()
            return line

        with ThreadPoolExecutor(len(self._processes)) as pool:
            lines = list(pool.map(read, self._processes))
        for timer in timers:
            timer.cancel()
        return lines

    def error(self) -> dict[str, Any]:
        """Return the row of a job that said nothing."""
        self.kill()
        said: list[str] = []
        for process, errors in zip(self._processes, self._errors, strict=True):
            errors.seek(0)
            said.append(f"exit status {process.wait()}: {errors.read()[-1500:]}")
        return {"error": "; ".join(said)}

    def kill(self) -> None:
        """End all ranks."""
        for process in self._processes:
            process.kill()

    def close(self) -> None:
        """End all ranks, and wait until they have ended."""
        self.kill()
        for process, errors in zip(self._processes, self._errors, strict=True):
            process.wait()
            errors.close()


class Measuring:
    """Jobs side by side: a few get ready while others have the GPUs."""

    def __init__(self, waiting: list[Task], out: Path, budget: float, options: list[str], keep: float) -> None:
        self._waiting = waiting
        self._out = out
        self._end = time.monotonic() + budget
        self._options = options
        self._changed = threading.Condition()
        listed = gpus()
        self._room = [free - round((1 + keep) * GB) for _, free in listed]
        self._names = [name for name, _ in listed]
        for task in list(waiting):
            case = task.case
            if case.ranks > len(listed) or case.cap_gb * GB + BESIDE > min(self._room):
                print(f"{case.name}: more than is free here, left out", flush=True)
                waiting.remove(task)
        self._load = [0] * len(listed)
        """Bytes of the jobs that were given each GPU, waiting ones included."""
        self._built: dict[str, bool] = {}
        self._port = PORT

    def run(self, parallel: int) -> None:
        """Run everything, or until the budget is over."""
        wanted = sorted({task.case.needs for task in self._waiting} - {""})
        workers = [threading.Thread(target=self._build, args=(name,)) for name in wanted]
        workers += [threading.Thread(target=self._work) for _ in range(parallel)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def _build(self, name: str) -> None:
        """Let DeepSpeed compile an operation, before several processes wait for each other to do so."""
        begun = time.monotonic()
        command = [sys.executable, str(STEPS), "--build", name]
        own = os.environ | {"CUDA_VISIBLE_DEVICES": self._names[0], "DS_SKIP_CUDA_CHECK": "1"}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=own, timeout=2 * SECONDS)
            failed = f"status {done.returncode}: {(done.stdout + done.stderr)[-1500:]}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = "it took too long"
        if failed:
            print(f"{name}: not compiled, a stand-in is used: {failed}", flush=True)
        else:
            print(f"{name}: compiled in {time.monotonic() - begun:.0f} s", flush=True)
        with self._changed:
            self._built[name] = not failed
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                task = self._next()
                if task is None:
                    return
                need = task.case.cap_gb * GB + BESIDE
                chosen = sorted(range(len(self._load)), key=lambda one: self._load[one])[: task.case.ranks]
                for gpu in chosen:
                    self._load[gpu] += need
                self._port += 1
                port = self._port
            try:
                row = self._one(task, chosen, port, need)
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"}
            with self._changed:
                for gpu in chosen:
                    self._load[gpu] -= need
                self._changed.notify_all()
                if row is not None:
                    self._keep(task, row)

    def _next(self) -> Task | None:
        """Take the first task whose operation is compiled; None when there is none left or the time is over."""
        while self._waiting and time.monotonic() < self._end:
            for task in self._waiting:
                if not task.case.needs or task.case.needs in self._built:
                    self._waiting.remove(task)
                    return task
            self._changed.wait(1.0)
        return None

    def _one(self, task: Task, chosen: list[int], port: int, need: int) -> dict[str, Any] | None:
        """Run one job; None where the budget was over before it had its GPUs."""
        stand_in = ["--stand-in"] * (not self._built.get(task.case.needs, True))
        job = Job(task, [self._names[gpu] for gpu in chosen], port, [*self._options, *stand_in])
        had = False
        try:
            begun = time.monotonic()
            if not job.ready():
                return job.error()
            prepared = time.monotonic() - begun
            had = self._take(chosen, need)
            if not had:
                return None
            begun = time.monotonic()
            row = job.take_steps()
            return row | {"ready_s": round(prepared, 1), "gpu_s": round(time.monotonic() - begun, 1)}
        finally:
            job.close()
            if had:
                with self._changed:
                    for gpu in chosen:
                        self._room[gpu] += need
                    self._changed.notify_all()

    def _take(self, chosen: list[int], need: int) -> bool:
        """Wait for a job's share of its GPUs; False where the budget is over before."""
        with self._changed:
            while min(self._room[gpu] for gpu in chosen) < need:
                if time.monotonic() > self._end:
                    return False
                self._changed.wait(1.0)
            for gpu in chosen:
                self._room[gpu] -= need
            return True

    def _keep(self, task: Task, row: dict[str, Any]) -> None:
        predicted = task.predicted
        row = {
            "case": task.case.name, "cap_gb": task.case.cap_gb, "share": task.share, "length": predicted["length"],
            "predicted_fits": predicted["fits"], **row,
            "predicted_fails_in": predicted["fails_in"], "predicted_needed": predicted["needed_bytes"],
            "predicted_allocated": predicted["allocated"], "predicted_reserved": predicted["reserved"],
        }  # fmt: skip
        with self._out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        told = row["error"][-600:] if "error" in row else ("fits" if row["fitted"] else f"fails in {row['fails_in']}")
        right = "" if "error" in row or row["fitted"] == row["predicted_fits"] else " WRONG"
        times = f"{row.get('ready_s')} + {row.get('gpu_s')} s, steps {row.get('step_s')}"
        print(f"{row['case']}, {row['share']} ({row['length']}): {told}{right} ({times})", flush=True)


def table(rows: list[dict[str, Any]]) -> None:
    """Print how many verdicts were right, how many largest lengths, and what was wrong."""
    judged = [row for row in rows if "error" not in row]
    right = [row for row in judged if row["fitted"] == row["predicted_fits"]]
    cases: dict[str, dict[float, bool]] = {}
    for row in judged:
        cases.setdefault(row["case"], {})[row["share"]] = row["fitted"]
    whole = {name: one for name, one in cases.items() if {0.99, 1.01} <= set(one)}
    near = [name for name, one in whole.items() if one[0.99] and not one[1.01]]
    print("| | right | of | share |\n| --- | ---: | ---: | ---: |")
    for title, some in (
        ("all verdicts", judged),
        *((f"{share:g} of the largest length", [r for r in judged if r["share"] == share]) for share in sorted(SHARES)),
        *((f"cap of {cap} GB", [r for r in judged if r["cap_gb"] == cap]) for cap in (24, 40, 80)),
    ):
        good = sum(row in right for row in some)
        print(f"| {title} | {good} | {len(some)} | {good / max(1, len(some)):.1%} |")
    print(f"| largest length within 1 % | {len(near)} | {len(whole)} | {len(near) / max(1, len(whole)):.1%} |")
    print("\n| wrong | length | predicted | measured | needed, predicted | allocated (GB), both | reserved, measured |")
    print("| --- | ---: | --- | --- | ---: | --- | ---: |")
    for row in judged:
        if row not in right:
            told = ["fits" if fits else f"fails in {phase}" for fits, phase in verdicts(row)]
            print(
                f"| {row['case']} | {row['share']:g}: {row['length']:,} | {told[0]} | {told[1]} | "
                f"{row['predicted_needed'] / GB:.2f} | {allocated(row)} | {row['reserved'] / GB:.2f} |"
            )
    for row in rows:
        if "error" in row:
            print(f"\nnot measured: {row['case']}, {row['length']:,} tokens: {row['error'][-300:]}")
    stood = sum(bool(row.get("stand_in")) for row in judged)
    if stood:
        print(f"\n{stood} rows with a stand-in for the compiled optimizer")


def verdicts(row: dict[str, Any]) -> tuple[tuple[bool, str], tuple[bool, str]]:
    """Return what was predicted and what was measured."""
    return (row["predicted_fits"], row["predicted_fails_in"]), (row["fitted"], row["fails_in"])


def allocated(row: dict[str, Any]) -> str:
    """Return the allocated peaks of the phases that both know, predicted and measured, in GB."""
    return ", ".join(
        f"{name} {row['predicted_allocated'][name] / GB:.2f} / {peaks[0] / GB:.2f}"
        for name, peaks in row["phases"].items()
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; of several of one length the last."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list({(row["case"], row["length"]): row for row in map(json.loads, lines)}.values())


def measure(args: argparse.Namespace) -> None:
    """Measure what the file lacks and print the table."""
    if args.table:
        table(read(args.table))
        return
    have = {(row["case"], row["length"]) for row in read(args.out) if "error" not in row}
    found = tasks(json.loads(args.predictions.read_text()))
    waiting = [task for task in found if task.key not in have and args.only in task.case.name]
    begun, wanted = time.monotonic(), len(waiting)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    Measuring(waiting, args.out, args.budget, ["--tiny"] * args.tiny, args.keep).run(args.parallel)
    print(f"\n{time.monotonic() - begun:.0f} s; {wanted} were to be measured, {len(waiting)} are left\n", flush=True)
    table(read(args.out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--parallel", type=int, default=6, help="processes that get ready or have a GPU")
    parser.add_argument("--budget", type=float, default=540, help="seconds after which no process is started")
    parser.add_argument("--keep", type=float, default=0, help="GB of each GPU that is left to other processes")
    parser.add_argument("--tiny", action="store_true", help="shrunken models, to try the script")
    parser.add_argument("--table", type=Path, help="print the table of these rows only")
    args = parser.parse_args()
    if args.table or (args.predictions and args.out):
        measure(args)
    else:
        parser.error("--predictions and --out are needed, or --table")


if __name__ == "__main__":
    main()
