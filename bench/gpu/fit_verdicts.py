"""Whether "fits", "does not fit" and "the largest length that fits" are right at caps of 24, 40 and 80 GB.

    python bench/gpu/fit_predict.py --out bench/data/fit_predictions.json              no GPU needed
    python bench/gpu/fit_verdicts.py --predictions bench/data/fit_predictions.json --out fit.jsonl --parallel 8
    python bench/gpu/fit_verdicts.py --table fit.jsonl                                 the table again

``STEPS`` real DeepSpeed steps are taken at the lengths around the largest that was predicted to fit, each in a process
of its own whose allocator is limited, and it is noted whether they fitted. What the output file holds already is not
done again.

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
import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

from fit_cases import GB, SHARES, Case, around, environment, files_of

HERE = Path(__file__).resolve()
STEPS = 3
BESIDE = 1_600_000_000
"""Bytes on the GPU kept for a process beside its cap: CUDA context, loaded kernels, NCCL (1,256 MiB were measured)."""
FULL = GB // 2
"""Where less than this is free on the GPU after a failure, it may not have been the cap that was reached."""
SECONDS = 120.0
"""That a process may take to get ready, and again with the GPU."""
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
    """Return each GPU's index and free bytes; without one a row of no end, to try the script on a CPU."""
    query = ["nvidia-smi", "--query-gpu=index,memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return [("", 1 << 60)]
    return [(index.strip(), int(free) << 20) for index, free in (line.split(",") for line in text.splitlines())]


class Measuring:
    """Processes side by side: a few get ready while others have the GPUs."""

    def __init__(self, waiting: list[Task], out: Path, budget: float, options: list[str], keep: float) -> None:
        self._waiting = waiting
        self._out = out
        self._end = time.monotonic() + budget
        self._options = options
        self._changed = threading.Condition()
        listed = gpus()
        self._room = [free - round((1 + keep) * GB) for _, free in listed]
        self._names = [name for name, _ in listed]
        for task in [task for task in waiting if task.case.cap_gb * GB + BESIDE > min(self._room)]:
            print(f"{task.case.name}: more than a GPU has free, left out", flush=True)
            waiting.remove(task)
        self._load = [0] * len(listed)
        """Bytes of the processes that were given each GPU, waiting ones included."""
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
        command = [sys.executable, str(HERE), "--build", name]
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
                gpu = min(range(len(self._load)), key=lambda one: self._load[one])
                self._load[gpu] += need
                self._port += 1
                port = self._port
            try:
                row = self._one(task, gpu, port, need)
            except Exception as error:
                row = {"error": f"{type(error).__name__}: {error}"}
            with self._changed:
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

    def _one(self, task: Task, gpu: int, port: int, need: int) -> dict[str, Any] | None:
        """Run one process; None where the budget was over before it had the GPU."""
        command = [sys.executable, str(HERE), "--case", json.dumps(task.case._asdict())]
        command += ["--length", str(task.predicted["length"]), *self._options]
        command += ["--stand-in"] * (not self._built.get(task.case.needs, True))
        own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        own |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "false"}
        own |= {"CUDA_VISIBLE_DEVICES": self._names[gpu], "DS_SKIP_CUDA_CHECK": "1"}
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(
                command, env=environment(task.case, **own),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
            assert child.stdin is not None
            assert child.stdout is not None
            text, had = "", False
            try:
                begun = time.monotonic()
                with ending(child):
                    ready = child.stdout.readline().strip() == "ready"
                prepared = time.monotonic() - begun
                if ready:
                    had = self._take(gpu, need)
                    if not had:
                        return None
                    begun = time.monotonic()
                    with ending(child):
                        child.stdin.write("go\n")
                        child.stdin.flush()
                        text = child.stdout.readline()
                        child.wait()
            finally:
                child.kill()
                child.wait()
                if had:
                    with self._changed:
                        self._room[gpu] += need
                        self._changed.notify_all()
            if text.startswith("{"):
                return json.loads(text) | {"ready_s": round(prepared, 1), "gpu_s": round(time.monotonic() - begun, 1)}
            errors.seek(0)
            return {"error": f"exit status {child.returncode}: {errors.read()[-1500:]}"}

    def _take(self, gpu: int, need: int) -> bool:
        """Wait for a process's share of a GPU; False where the budget is over before."""
        with self._changed:
            while self._room[gpu] < need:
                if time.monotonic() > self._end:
                    return False
                self._changed.wait(1.0)
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


@contextlib.contextmanager
def ending(child: subprocess.Popen[str]) -> Generator[None]:
    """End a process that takes too long."""
    timer = threading.Timer(SECONDS, child.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# --- one process ---------------------------------------------------------------------------------------------------


def child(case: Case, length: int, stand_in: bool, tiny: bool) -> None:
    """Get ready, wait for the word, take the steps and say in one line what came of it."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    import deepspeed
    import torch
    from ftmon.trainer.predict import model as models

    cuda: bool = torch.cuda.is_available()
    if stand_in:
        no_compiled_operations()
    cheap_numbers(torch)
    with files_of(case, tiny) as (model_file, settings_file):
        config = models.read_config(model_file)
        settings: dict[str, Any] = json.loads(Path(settings_file).read_text())
    settings["train_micro_batch_size_per_gpu"] = settings["train_batch_size"] = case.micro_batch
    settings["gradient_accumulation_steps"] = 1
    settings["steps_per_print"] = 1 << 30
    vocabulary = int(config.vocab_size)

    def make() -> Any:
        return models.make(config, torch.bfloat16, case.gradient_checkpointing, case.lora_r, "sdpa")

    model = None if case.zero_stage == 3 else make()
    print("ready", file=said)
    sys.stdin.readline()
    phases: dict[str, list[int]] = {}
    highest = [0, 0]
    row: dict[str, Any] = {"fitted": True, "fails_in": "", "stand_in": stand_in}
    phase = "init"

    def note() -> None:
        if cuda:
            phases[phase] = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
            highest[:] = [max(pair) for pair in zip(highest, phases[phase], strict=True)]
            torch.cuda.reset_peak_memory_stats()

    if cuda:
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(case.cap_gb * GB / torch.cuda.mem_get_info()[1])
    deepspeed.init_distributed(dist_backend="nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False)
    seconds: list[float] = []
    device = "cuda" if cuda else "cpu"
    try:
        if model is None:
            with deepspeed.zero.Init(config_dict_or_path=settings):
                model = make()
        trained: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
        del model, trained
        note()
        for _ in range(STEPS):
            begun = time.perf_counter()
            tokens = torch.randint(0, vocabulary, (case.micro_batch, length), device=device)
            phase = "forward"
            loss = engine(input_ids=tokens, labels=tokens).loss
            note()
            phase = "backward"
            engine.backward(loss)
            del loss
            note()
            phase = "optimizer"
            engine.step()
            note()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(round(time.perf_counter() - begun, 3))
    except torch.OutOfMemoryError as error:
        row |= {"fitted": False, "fails_in": phase, "message": str(error)[:400]}
        note()
        if torch.cuda.mem_get_info()[0] < FULL:
            row["error"] = f"the GPU itself was full: {row['message']}"
    row |= {"allocated": highest[0], "reserved": highest[1], "phases": phases, "step_s": seconds}
    if cuda:
        row["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
        row["versions"] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    print(json.dumps(row), file=said)
    os._exit(0)


def cheap_numbers(torch: Any) -> None:
    """Fill large host tensors from a small pool of random numbers: some seconds less for a billion of them."""
    pool = torch.randn(1 << 20) * 0.02

    def instead(plain: Callable[..., Any]) -> Callable[..., Any]:
        def fill(tensor: Any, *arguments: Any, **named: Any) -> Any:
            if tensor.device.type != "cpu" or tensor.numel() < len(pool) or not tensor.is_contiguous():
                return plain(tensor, *arguments, **named)
            flat, whole = tensor.view(-1), tensor.numel() // len(pool) * len(pool)
            flat[:whole].view(-1, len(pool)).copy_(pool)
            flat[whole:].copy_(pool[: tensor.numel() - whole])
            return tensor

        return fill

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, instead(getattr(torch.Tensor, name)))


def no_compiled_operations() -> None:
    """Let functions that do nothing take the place of compiled optimizers, which allocate nothing on the GPU."""
    builders: Any = importlib.import_module("deepspeed.ops.op_builder.builder")

    class Nothing:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *_, **__: 0

    builders.OpBuilder.load = lambda *_, **__: Nothing()


def build(operation: str) -> None:
    """Let DeepSpeed compile an operation."""
    import deepspeed.ops.op_builder as builders

    getattr(builders, operation)().load()


# --- the table -----------------------------------------------------------------------------------------------------


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
    parser.add_argument("--case", type=lambda text: Case(**json.loads(text)), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--build", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        child(args.case, args.length, args.stand_in, args.tiny)
    elif args.build:
        build(args.build)
    elif args.table or (args.predictions and args.out):
        measure(args)
    else:
        parser.error("--predictions and --out are needed, or --table")


if __name__ == "__main__":
    main()
