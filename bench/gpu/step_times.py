"""Step times and peaks of the trainer's configurations, by phase and by kind of kernel, beside their predictions.

    python bench/gpu/step_times.py --out FILE [--gpus 2] [--budget 270] [--only NAME,...] [--tiny]    measure, on GPUs
    python bench/gpu/step_times.py --table FILE [--only NAME,...] [--fit | --held-out]                predict, compare

Each configuration is a process with the trainer's own model, engine, loss and step, on rows of random tokens with the
documents of ``DOCUMENTS``. All import their libraries at once; a few at a time compile and take the first steps; their
timed steps are taken one after the other, while no other process compiles or steps. Then two steps are profiled:
microseconds and number of kernels by kind. ``kernels`` are matrix products, attention and copies alone, for the fit of
``protocol/analysis/estimates/time.py``. The predictions need no GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from train_rows import LLAMA_8B, LLAMA_12B, QWEN3_06B, QWEN_05B, QWEN_DEFAULT, TINY

DOCUMENTS = (700, 420, 310, 240, 160, 110, 70, 38)
"""Tokens of the documents of a packed row of 2,048, as many times as they fit."""
WARM, STEPS, PROFILED = 3, 12, 2
TOGETHER = 4
"""Processes that compile at the same time."""
GPU_GIB = 130
LLAMA_2B = LLAMA_12B | {
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 20,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "vocab_size": 32000,
}
LLAMA_8B_16 = LLAMA_8B | {"num_hidden_layers": 16}
"""Half the layers of an 8B."""


@dataclass(frozen=True)
class Case:
    """A configuration; compiled and packed unless its words say otherwise."""

    model: dict[str, Any]
    micro_batch: int = 8
    length: int = 2048
    stage: int = 1
    words: tuple[str, ...] = ()
    gib: int = 35
    """Memory it may take on each GPU."""
    ranks: int = 1
    held_out: bool = False
    """Whether nothing may be fitted to it."""


OFF, PADDED, LORA = "model.compile=off", "data.packing=false", "lora={rank: 16, merge: false}"
CHECKPOINTING = "model.gradient_checkpointing=layers"
ALONE = {
    "0.5b": Case(QWEN_DEFAULT),
    "0.5b off": Case(QWEN_DEFAULT, words=(OFF,), gib=45),
    "1.2b": Case(LLAMA_12B, 4),
    "1.2b off": Case(LLAMA_12B, 4, words=(OFF,), gib=45),
    "0.5b batch 1": Case(QWEN_DEFAULT, 1, gib=15),
    "0.5b batch 2, held out": Case(QWEN_DEFAULT, 2, gib=20, held_out=True),
    "0.5b stage 2": Case(QWEN_DEFAULT, stage=2, words=("zero.grad_accum_dtype=bf16",)),
    "0.5b stage 3": Case(QWEN_DEFAULT, 4, stage=3),
    "0.5b checkpointing, held out": Case(QWEN_DEFAULT, words=(CHECKPOINTING,), gib=25, held_out=True),
    "0.5b LoRA": Case(QWEN_DEFAULT, words=(LORA,)),
    "1.2b batch 8, held out": Case(LLAMA_12B, 8, gib=50, held_out=True),
    "1.2b LoRA 4096, held out": Case(LLAMA_12B, 2, 4096, words=(LORA,), held_out=True),
    "1.2b off checkpointing, held out": Case(LLAMA_12B, 8, words=(OFF, CHECKPOINTING), gib=40, held_out=True),
    "1.2b padded": Case(LLAMA_12B, 4, words=(OFF, PADDED), gib=45),
    "qwen3 0.6b, held out": Case(QWEN3_06B, 4, held_out=True),
    "2b, held out": Case(LLAMA_2B, 4, gib=50, held_out=True),
    "8b/2 bf16 states": Case(
        LLAMA_8B_16, 2, 4096, words=("optimizer={kind: adamw_bf16, master_weights: none}", "training.precision=bf16"),
        stage=0, gib=75,
    ),
    "0.5b accumulation 4, held out": Case(QWEN_DEFAULT, 2, words=("training.grad_accumulation=4",), gib=20,
                                          held_out=True),
    "0.5b budget 0.5": Case(QWEN_DEFAULT, words=("model.activation_memory_budget=0.5",)),
    "1.2b stage 3 off": Case(LLAMA_12B, 2, stage=3, words=(OFF,), gib=40),
    "0.5b off batch 1, held out": Case(QWEN_DEFAULT, 1, words=(OFF,), gib=15, held_out=True),
    "0.5b heads": Case(QWEN_05B, 4, 4096),
    "0.5b padded checkpointing, held out": Case(QWEN_DEFAULT, 8, words=(OFF, PADDED, CHECKPOINTING), held_out=True),
}  # fmt: skip
SEVERAL = {
    name: replace(case, ranks=2)
    for name, case in {
        "0.5b, several": Case(QWEN_DEFAULT),
        "1.2b stage 2, several": Case(LLAMA_12B, stage=2, gib=50),
        "1.2b stage 3, several": Case(LLAMA_12B, 4, stage=3),
        "0.5b batch 1 stage 2, several": Case(QWEN_DEFAULT, 1, stage=2, gib=20),
        "1.2b, several, held out": Case(LLAMA_12B, 4, held_out=True),
        "1.2b stage 3 off checkpointing, several, held out": Case(
            LLAMA_12B, 8, stage=3, words=(OFF, CHECKPOINTING), gib=40, held_out=True
        ),
        "0.5b stage 3 batch 2, several, held out": Case(QWEN_DEFAULT, 2, stage=3, gib=20, held_out=True),
        "1.2b stage 2 bf16, several": Case(
            LLAMA_12B, 4, stage=2, words=("zero.communication_dtype=bf16", "zero.grad_accum_dtype=bf16")
        ),
        "1.2b LoRA, several": Case(LLAMA_12B, 4, stage=2, words=(LORA,)),
        "1.2b stage 2 accumulation 4, several, held out": Case(
            LLAMA_12B, 2, stage=2, words=("training.grad_accumulation=4",), held_out=True
        ),
    }.items()
}
CASES = {**ALONE, **SEVERAL}


def row(length: int) -> list[int]:
    """Return the documents of a packed row."""
    found: list[int] = []
    for tokens in cycle(DOCUMENTS):
        if length <= 0:
            break
        found.append(min(tokens, length))
        length -= found[-1]
    return found


def words_of(case: Case, data: str, tiny: bool) -> list[str]:
    """Return the trainer's configuration as overrides."""
    shape = {name: value for name, value in case.model.items() if not (tiny and name == "head_dim")}
    shape |= TINY if tiny else {}
    length = 128 if tiny else case.length
    given = [
        f"model.config={json.dumps(shape)}",
        f"data.path={data}",
        "data.packing=true",
        f"model.compile={'off' if tiny else 'layers'}",
        f"zero.stage={case.stage}",
        f"training={{max_steps: 100, micro_batch: {case.micro_batch}, sequence_length: {length}, seed: 7}}",
        "optimizer.lr=1e-4",
        f"run={{ranks: {case.ranks}, device: {'cpu' if tiny else 'cuda'}}}",
    ]
    return given + [word for word in case.words if not (tiny and word == "training.precision=bf16")]


def data_file() -> str:
    """Write the data file that a configuration must name; nothing reads its row."""
    path = Path(tempfile.gettempdir()) / f"step_times-{os.getpid()}.jsonl"
    path.write_text(json.dumps({"text": "a row"}) + "\n")
    return str(path)


# A process that takes the steps of one configuration. It prints "ready" after its imports and "warm" after its first
# steps; a line on standard input lets it go on; its last line is the result.


def rank(case: Case, tiny: bool) -> None:
    """Run one rank of a case, of as many as the environment says."""
    case = replace(case, ranks=int(os.environ["WORLD_SIZE"]))
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    from ftmon.trainer.predict.recipe import DryStep, tokens_of
    from ftmon.trainer.recipe import start as command
    from ftmon.trainer.recipe.config.load import load
    from ftmon.trainer.recipe.distributed import World
    from ftmon.trainer.recipe.engine import forget_module_order
    from ftmon.trainer.recipe.model import activations
    from ftmon.trainer.recipe.preflight import resolve

    resolved = resolve.resolve(load(None, words_of(case, data_file(), tiny)))
    os.environ |= command.launch_environment(resolved)
    config = resolved.config
    cuda = resolved.device == "cuda"
    importing(cuda)
    print("ready", file=said)
    sys.stdin.readline()
    world = World()
    marks: list[tuple[str, Any]] = []

    def mark(name: str) -> None:
        event: Any = torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter()
        if cuda:
            event.record()
        marks.append((name, event))

    tokens, _ = tokens_of(config)
    step = DryStep(config, world, tokens, mark, lambda name: mark(f"/{name}"), lambda *_: None)
    made = step.engine.basic_optimizer
    if getattr(made, "compiled_update", None) is not None:  # a dry run's does nothing
        made.compiled_update = torch.compile(made._update, dynamic=True)
    length = config.training.sequence_length
    batch = step.batch(row(length) if config.data.packing else [length])
    vocabulary = int(step.model.config.get_text_config().vocab_size)
    ids = torch.randint(0, vocabulary, batch["input_ids"].shape)
    batch["labels"] = torch.where(batch["labels"] < 0, batch["labels"], ids)
    batch["input_ids"] = ids
    batch = {name: one.to(world.device) for name, one in batch.items()}
    if config.model.compile != "off":
        activations.compile_ahead(step.model, step._stepper.prepare(dict(batch)), world, required=True)
        forget_module_order(step.engine)
    for _ in range(WARM):
        step.train_step(batch)
    wait(cuda)
    print("warm", file=said)
    sys.stdin.readline()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    marks.clear()
    issued: list[float] = []
    began = time.perf_counter()
    for _ in range(STEPS):
        mark("step")
        before = time.perf_counter()
        step.train_step(batch)
        issued.append(time.perf_counter() - before)
    mark("step")
    wait(cuda)
    seconds = (time.perf_counter() - began) / STEPS
    result: dict[str, Any] = {"step_ms": round(seconds * 1e3, 2), **phases(marks)}
    result["issue_ms"] = round(statistics.median(issued) * 1e3, 2)
    if cuda:
        stats = torch.cuda.memory_stats()
        result["allocated"] = stats["allocated_bytes.all.peak"]
        result["reserved"] = stats["reserved_bytes.all.peak"]
        result["host_us"] = host_us(torch)
        # All ranks profile; the first one's kernels count.
        result["kernels"] = profiled(lambda: step.train_step(batch))
        result["device"] = torch.cuda.get_device_name()
        result["torch"] = torch.__version__
    print(json.dumps(result), file=said)
    said.flush()
    os._exit(0)


def importing(cuda: bool) -> None:
    """Import what compiling and stepping need, before the first of them."""
    import deepspeed
    import torch._dynamo
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    if cuda:
        import torch._inductor.compile_fx  # noqa: F401
    del deepspeed


def wait(cuda: bool) -> None:
    """Wait for the device."""
    import torch

    if cuda:
        torch.cuda.synchronize()


def phases(marks: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the median time of steps, and of each phase in a step, in ms on the device's clock."""
    steps: list[float] = []
    inside: list[dict[str, float]] = []
    opened: dict[str, Any] = {}
    for name, event in marks:
        if name == "step":
            if name in opened:
                steps.append(between(opened[name], event))
            opened[name] = event
            inside.append({})
        elif name.startswith("/"):
            inside[-1][name[1:]] = inside[-1].get(name[1:], 0.0) + between(opened[name[1:]], event)
        else:
            opened[name] = event
    names = ("forward", "backward", "optimizer")
    return {
        "median_ms": round(statistics.median(steps), 2),
        "steps_ms": [round(one, 1) for one in steps],
        "phases_ms": {name: round(statistics.median(one[name] for one in inside[:-1]), 2) for name in names},
    }


def between(first: Any, second: Any) -> float:
    """Return the milliseconds between two marks."""
    return (second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second)


def host_us(torch: Any) -> float:
    """Return the host's time to launch a small kernel, in microseconds."""
    one = torch.zeros(64, device="cuda")
    best = 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(500):
            one.add_(1)
        best = min(best, (time.perf_counter() - began) / 500)
    return round(best * 1e6, 2)


KINDS = (
    ("nccl", ("nccl",)),
    ("attention", ("flash", "fmha", "pytorch_flash")),
    ("product", ("gemm", "nvjet", "cutlass", "splitkreduce", "gemv", "cublas")),
    ("compiled", ("triton",)),
    ("optimizer", ("multi_tensor_apply", "fusedadam")),
    ("copy", ("memcpy", "memset")),
)


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    low = kernel.lower()
    return next((kind for kind, parts in KINDS if any(part in low for part in parts)), "other")


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Return microseconds and number of kernels a step, by kind, and the kernels that took most of it."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kinds: dict[str, list[float]] = {}
    names: dict[str, list[float]] = {}
    spans: list[tuple[float, float]] = []
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA:
            continue
        spans.append((event.time_range.start, event.time_range.end))
        for table, key in ((kinds, kind_of(event.name)), (names, event.name[:90])):
            entry = table.setdefault(key, [0, 0])
            entry[0] += event.time_range.elapsed_us() / PROFILED
            entry[1] += 1 / PROFILED
    most = sorted(names.items(), key=lambda one: -one[1][0])[:40]
    return {
        "busy_us": round(covered(spans) / PROFILED),
        "kinds": {kind: [round(us), count] for kind, (us, count) in kinds.items()},
        "most": [[name, round(us), count] for name, (us, count) in most],
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


# Kernels alone.


def kernels(limit: float) -> None:
    """Time matrix products, attention and copies of several sizes; print a JSON object."""
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import torch
    from torch.nn.attention.varlen import varlen_attn

    print("ready", file=said)
    sys.stdin.readline()
    began = time.perf_counter()
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}

    def timed(call: Callable[[], Any]) -> float:
        for _ in range(2):
            call()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(8):
            call()
        last.record()
        torch.cuda.synchronize()
        return round(first.elapsed_time(last) / 8 * 1e3, 1)

    found: dict[str, list[list[float]]] = {"product": [], "attention": [], "copy": [], "cast": [], "adamw": []}
    shapes = [(896, 896), (128, 896), (4864, 896), (896, 4864), (1024, 1024), (2816, 1024), (2048, 2048), (512, 2048)]
    shapes += [(8192, 2048), (2048, 8192), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (6912, 2560)]
    shapes += [(151936, 896), (128256, 2048), (32000, 2560), (16, 2048), (8192, 16)]
    for out, into in shapes:
        for rows in (1024, 2048, 4096, 8192, 16384, 32768):
            if rows * out * 2 > 2 << 30 or time.perf_counter() - began > limit * 0.6:
                continue
            left, weight, grad = (torch.randn(*size, **bf16) for size in ((rows, into), (out, into), (rows, out)))
            times = [timed(lambda a=left, w=weight: a @ w.t()), timed(lambda g=grad, w=weight: g @ w)]
            times.append(timed(lambda g=grad, a=left: g.t() @ a))
            found["product"].append([rows, out, into, *times])
    for heads, groups, width in ((14, 2, 64), (16, 16, 64), (32, 8, 64), (16, 8, 128), (32, 8, 128)):
        for total, documents in (
            (16384, row(2048)),
            (16384, [2048]),
            (4096, row(2048)),
            (16384, [8192]),
            (2048, [256]),
        ):
            if time.perf_counter() - began > limit * 0.85:
                continue
            query = torch.randn(total, heads, width, requires_grad=True, **bf16)
            key, value = (torch.randn(total, groups, width, requires_grad=True, **bf16) for _ in range(2))
            ends = torch.tensor(documents * (total // sum(documents)), dtype=torch.int32).cumsum(0).to(torch.int32)
            ends = torch.cat([torch.zeros(1, dtype=torch.int32), ends]).cuda()

            def attend(q: Any = query, k: Any = key, v: Any = value, e: Any = ends) -> Any:
                return varlen_attn(q, k, v, e, e, 2048, 2048, window_size=(-1, 0))

            forward = timed(attend)
            out = attend()
            grad = torch.randn_like(out)
            inputs = (query, key, value)
            backward = timed(lambda o=out, g=grad, i=inputs: torch.autograd.grad(o, i, g, retain_graph=True))
            found["attention"].append([total, heads, groups, width, len(documents), sum(documents), forward, backward])
    for size in (1 << 20, 8 << 20, 32 << 20, 128 << 20, 1 << 30):
        source = torch.empty(size, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        found["copy"].append([size, timed(lambda a=source, b=target: b.copy_(a))])
        half = source.view(torch.bfloat16)
        found["cast"].append([size, timed(lambda a=half: a.float())])
    for count in (1 << 20, 1 << 24, 1 << 28):
        weight = torch.nn.Parameter(torch.zeros(count, device="cuda"))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        found["adamw"].append([count, timed(optimizer.step)])
        del weight, optimizer
    print(json.dumps({"device": torch.cuda.get_device_name(), "host_us": host_us(torch), **found}), file=said)
    said.flush()
    os._exit(0)


# The process that starts them.


class Measuring:
    """Runs all cases on the GPUs of this machine."""

    def __init__(self, out: Path, budget: float, tiny: bool) -> None:
        self._out = out
        self._tiny = tiny
        self._until = time.monotonic() + budget
        self._began = time.monotonic()
        self._room = 1000 if tiny else GPU_GIB
        self._together = 0
        self._changed = threading.Condition()
        self._timing = threading.Lock()
        self._warming = 0
        """Cases that are compiling or taking their first steps: nothing is timed beside them."""
        self._quiet = 0
        """Cases that wait to be timed: no other begins to compile."""
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, cases: dict[str, Case], with_kernels: bool) -> None:
        """Measure the cases in order, and write each result as a line."""
        self._out.write_text("")
        threads: list[threading.Thread] = []
        if with_kernels:
            only = self._start(["--kernels"], {})
            threads.append(threading.Thread(target=self._kernels, args=(only,), daemon=True))
        turn = self._turns(len(cases))
        for number, (name, case) in enumerate(cases.items()):
            port = str(29600 + number)
            started = [
                self._start(
                    ["--case", name, *(["--tiny"] if self._tiny else [])],
                    {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case.ranks), "MASTER_PORT": port},
                )
                for rank in range(case.ranks)
            ]
            threads.append(threading.Thread(target=self._one, args=(name, case, started, turn[number]), daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self._until - time.monotonic()))
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    @staticmethod
    def _turns(count: int) -> list[tuple[threading.Event, threading.Event]]:
        events = [threading.Event() for _ in range(count + 1)]
        events[0].set()
        return [(events[number], events[number + 1]) for number in range(count)]

    def _start(self, words: list[str], environment: dict[str, str]) -> "subprocess.Popen[str]":
        log = self._out.with_suffix(".log").open("a")
        common = {"MASTER_ADDR": "127.0.0.1", "TORCHINDUCTOR_COMPILE_THREADS": "4", "OMP_NUM_THREADS": "4"}
        common["DS_ACCELERATOR"] = "cpu" if self._tiny else "cuda"
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            env=os.environ | common | environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        self._processes.append(process)
        return process

    def _kernels(self, process: "subprocess.Popen[str]") -> None:
        with self._timing:
            if _line(process) == "ready":
                _tell([process])
                self._note("kernels", json.loads(_line(process) or "{}"))
        with self._changed:
            self._changed.notify_all()

    def _one(
        self, name: str, case: Case, ranks: "list[subprocess.Popen[str]]", turn: tuple[threading.Event, threading.Event]
    ) -> None:
        imported = all(_line(process) == "ready" for process in ranks)
        turn[0].wait()
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(case) and not self._quiet and not self._timing.locked())
            self._together += 1
            self._warming += 1
            self._room -= case.gib
        turn[1].set()
        try:
            is_warm = imported and time.monotonic() < self._until - 20
            if is_warm:
                _tell(ranks)
                is_warm = all(_line(process) == "warm" for process in ranks)
            self._end_warming()
            with self._timing:
                if is_warm:
                    _tell(ranks)
                results = [_line(process) for process in ranks] if is_warm else [""]
                self._note(name, json.loads(results[0]) if results[0] else {"failed": True})
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            with self._changed:
                self._together -= 1
                self._quiet -= 1
                self._room += case.gib
                self._changed.notify_all()

    def _has_room(self, case: Case) -> bool:
        return self._together < TOGETHER and self._room >= case.gib

    def _end_warming(self) -> None:
        """Wait until nothing else compiles."""
        with self._changed:
            self._warming -= 1
            self._quiet += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._warming)

    def _note(self, name: str, result: dict[str, Any]) -> None:
        at = round(time.monotonic() - self._began)
        with self._changed, self._out.open("a") as file:
            file.write(json.dumps({"case": name, **result, "at_s": at}) + "\n")
        short = {key: result.get(key) for key in ("median_ms", "phases_ms", "issue_ms", "host_us", "failed")}
        print(f"{at} s  {name}: {json.dumps(short)}", flush=True)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _tell(processes: "list[subprocess.Popen[str]]") -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


# Predictions.


def predicted(case: Case, gpu_name: str) -> tuple[Any, int]:
    """Return the predicted time of a case's step, and its allocated peak in bytes, of rank 0."""
    from ftmon.protocol.analysis.allocator.settings import Settings
    from ftmon.protocol.analysis.estimates.time import step_time
    from ftmon.protocol.host.machine import find_gpu
    from ftmon.trainer.predict import ranks
    from ftmon.trainer.predict.recipe import RecipeRun, of_rows, read

    gpu = find_gpu(gpu_name)
    assert gpu is not None
    words = words_of(case, data_file(), tiny=False)
    config = read(words[0], words[1:], None, [])
    documents = of_rows([row(case.length)]) if config.data.packing else None
    found = ranks.run(partial(RecipeRun, config, Settings(), gpu, documents), [0], [case.length])
    outcome = found[0].outcomes[0]
    return step_time(outcome.work, gpu), outcome.rank.allocated_peak_bytes


def table(path: Path, only: list[str], held_out: bool | None) -> None:
    """Print predicted beside measured."""
    from ftmon.trainer.predict import ranks

    ranks.warm(("ftmon.trainer.recipe.engine",))
    print("| configuration | ms | predicted | error | bound by | allocated, GiB | predicted | error |")
    print("| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |")
    errors: list[float] = []
    for line in lines(path):
        case = CASES.get(line["case"])
        wanted = not only or line["case"] in only
        if case is None or "median_ms" not in line or not wanted or held_out not in (None, case.held_out):
            continue
        found, allocated = predicted(case, line["device"])
        ms = found.total.value * 1e3
        error, memory = ms / line["median_ms"] - 1, allocated / line["allocated"] - 1
        errors.append(error)
        print(
            f"| {line['case']} | {line['median_ms']:.1f} | {ms:.1f} +- {found.total.error:.0%} | {error:+.1%} | "
            f"{found.bound_by} | {line['allocated'] / 2**30:.2f} | {allocated / 2**30:.2f} | {memory:+.2%} |",
            flush=True,
        )
    within = sum(abs(error) <= 0.1 for error in errors)
    print(f"\nwithin 10 %: {within} of {len(errors)}")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of a file."""
    for line in path.read_text().splitlines():
        yield json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--budget", type=float, default=270, help="seconds after which what is not done is left out")
    parser.add_argument("--only", default="", help="names of configurations, separated by semicolons")
    parser.add_argument("--tiny", action="store_true", help="shrunken models on the CPU")
    parser.add_argument("--case", choices=CASES, metavar="NAME", help="one rank of a configuration")
    parser.add_argument("--kernels", action="store_true", help="kernels alone")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--fit", action="store_const", const=False, dest="held_out")
    parser.add_argument("--held-out", action="store_const", const=True, dest="held_out")
    given = parser.parse_args()
    only = [name for name in given.only.split(";") if name]
    if given.case:
        rank(CASES[given.case], given.tiny)
    elif given.kernels:
        kernels(60)
    elif given.table:
        table(given.table, only, given.held_out)
    else:
        every = ALONE if given.gpus == 1 else SEVERAL
        cases = {name: replace(case, ranks=given.gpus) for name, case in every.items() if not only or name in only}
        Measuring(given.out, given.budget, given.tiny).run(cases, given.gpus == 1 and not given.tiny and not only)


if __name__ == "__main__":
    main()
