"""Each phase's peaks of ftmon's trainer, predicted and measured: ZeRO-3's keys, offload, adapters and 4-bit weights.

    python bench/gpu/predicted_phases.py --out phases.jsonl [--work FOLDER] [--only zero3] [--parallel 3] [--budget 500]
    python bench/gpu/predicted_phases.py --table phases.jsonl                      the table again

For each row `ftmon predict` and `ftmon train` get the same configuration; the prediction uses no GPU and runs beside
the training. Rows run side by side where the GPUs have room: nothing here is timed. Measured are the highest allocated
and reserved bytes of a phase over all steps after the first, over all ranks. What the output file holds already is not
done again. ``--tiny`` tries the script on a CPU.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import train_rows
import train_speed
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir

PHASES = ("forward", "backward", "optimizer")
ZERO3 = "deepspeed.zero_optimization."
LORA = "lora={rank: 16, merge: false}"


class Row(NamedTuple):
    """One configuration; 1.2B parameters, 2 rows of 2,048 tokens, unless its words say otherwise."""

    gpus: int
    words: list[str]
    weights: dict[str, Any] | None = None
    """The shape of a model that is read from a folder; None: a bare configuration."""
    gib: int = 40
    """That it may take of each GPU."""


def zero3(*words: str, gib: int = 32) -> Row:
    """Return a row of two ranks."""
    return Row(2, ["zero.stage=3", *words], gib=gib)


ROWS = {
    "zero3": zero3(),
    "zero3, nothing kept gathered": zero3(
        ZERO3 + "stage3_max_live_parameters=0",
        ZERO3 + "stage3_max_reuse_distance=0",
        ZERO3 + "stage3_prefetch_bucket_size=0",
    ),
    "zero3, max_live_parameters 1e8": zero3(ZERO3 + "stage3_max_live_parameters=100000000"),
    "zero3, max_reuse_distance 0": zero3(ZERO3 + "stage3_max_reuse_distance=0"),
    "zero3, prefetch_bucket_size 0": zero3(ZERO3 + "stage3_prefetch_bucket_size=0"),
    "zero3, prefetch_bucket_size 5e8": zero3(ZERO3 + "stage3_prefetch_bucket_size=500000000"),
    "zero3, param_persistence_threshold 0": zero3(ZERO3 + "stage3_param_persistence_threshold=0"),
    "zero3, param_persistence_threshold 5e6": zero3(ZERO3 + "stage3_param_persistence_threshold=5000000"),
    "zero3, sub_group_size 1e8": zero3(ZERO3 + "sub_group_size=100000000"),
    "zero3, no overlap": zero3(ZERO3 + "overlap_comm=false"),
    "zero3, reduce_bucket_size 5e7": zero3(ZERO3 + "reduce_bucket_size=50000000"),
    "zero3, checkpointing": zero3("model.gradient_checkpointing=layers"),
    "zero3, optimizer offload": zero3("zero.offload_optimizer=true"),
    "zero3, parameter and optimizer offload": zero3("zero.offload_parameters=true", "zero.offload_optimizer=true"),
    "zero3, LoRA": zero3(LORA),
    "zero2, two ranks": Row(2, ["zero.stage=2"], gib=36),
    "QLoRA 1.2B": Row(1, [LORA, "model.quantization=nf4"], train_rows.LLAMA_12B, gib=25),
    "QLoRA 1.2B, checkpointing": Row(
        1, [LORA, "model.quantization=nf4", "model.gradient_checkpointing=layers"], train_rows.LLAMA_12B, gib=10
    ),
    "QLoRA 8B, checkpointing, 1 row of 4,096": Row(
        1,
        [
            *(LORA, "model.quantization=nf4", "model.gradient_checkpointing=layers"),
            *("training.micro_batch=1", "training.sequence_length=4096"),
        ],
        train_rows.LLAMA_8B,
        gib=24,
    ),
    "LoRA 1.2B": Row(1, [LORA], gib=25),
    "AdamW in 8 bit": Row(1, ["optimizer.kind=adamw_8bit", "zero.stage=0"], gib=32),
}


def shrunk(row: Row) -> Row:
    """Return a row that a CPU can run."""
    weights = row.weights and {**row.weights, **train_rows.TINY}
    return row._replace(weights=weights, words=[word for word in row.words if "quantization" not in word])


def words_of(row: Row, work: Path, tiny: bool) -> list[str]:
    """Return the configuration as overrides."""
    shape = {**train_rows.LLAMA_12B, **(train_rows.TINY if tiny else {})}
    model = f"model.config={json.dumps(shape)}" if row.weights is None else f"model.name={folder_of(row, work)}"
    length = 128 if tiny else 2048
    device = "cpu" if tiny else "cuda"
    common = [model, f"data.path={work / 'data.jsonl'}", "data.packing=true", "model.compile=off"]
    common += [f"training={{max_steps: 5, micro_batch: 2, sequence_length: {length}, seed: 7}}"]
    common += ["training.grad_accumulation=1", "evaluation=off", "optimizer.lr=1e-4"]
    common += ["output={save_model: false, log_every: 1}", "checkpoint.rehearse=false"]
    return [*common, f"run={{ranks: {row.gpus}, device: {device}}}", *row.words]


def folder_of(row: Row, work: Path) -> Path:
    """Return where a row's weights are: those of `train_speed.py` are taken where they exist."""
    assert row.weights is not None
    return train_rows.folder_of(work, train_rows.Row(row.weights))


def run(name: str, row: Row, work: Path, gpus: list[str], tiny: bool) -> dict[str, Any]:
    """Predict and train one configuration."""
    began = time.monotonic()
    words = words_of(row, work, tiny)
    run_name = "".join(letter if letter.isalnum() else "-" for letter in name)
    here = {} if tiny else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    train = subprocess.Popen(
        [*train_speed.FTMON, "train", "--plain", "--name", run_name, *words],
        env=os.environ | here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    predict = subprocess.run(
        [*train_speed.FTMON, "predict", "--json", *words, "run.device=cuda"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said, _ = train.communicate()
    result: dict[str, Any] = {"row": name, "status": train.returncode, "predict_status": predict.returncode}
    if train.returncode:
        result["output"] = said.splitlines()[-15:]
    else:
        result["measured"] = measured(run_name)
    if predict.returncode:
        result["predict_output"] = (predict.stdout + predict.stderr).splitlines()[-8:]
    else:
        (point,) = json.loads(predict.stdout)["points"]
        result["predicted"] = {
            phase: {
                figure: max(rank["phases"][phase][f"{figure}_peak_bytes"] for rank in point["ranks"])
                for figure in ("allocated", "reserved")
            }
            for phase in PHASES
        }
    return result | {"seconds": round(time.monotonic() - began, 1)}


def measured(name: str) -> dict[str, dict[str, int]]:
    """Return the highest figures of each phase in a run's recording."""
    with Reader(rundir.find(name).recording) as reader:
        frames = reader.frames(0, 1_000_000)
    found = {phase: {"allocated": 0, "reserved": 0} for phase in PHASES}
    for frame in frames:
        step = frame.message
        if isinstance(step, Step) and step.step > 1:
            for record in step.phases:
                if record.name in found:
                    highest = found[record.name]
                    highest["allocated"] = max(highest["allocated"], record.allocated.peak)
                    highest["reserved"] = max(highest["reserved"], record.reserved.peak)
    return found


def free(keep: int) -> list[int]:
    """Return each GPU's free bytes, less what is kept."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    text = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return [(int(line) << 20) - keep for line in text.splitlines()]


def table(rows: list[dict[str, Any]]) -> None:
    """Print predicted beside measured."""
    print("| configuration | phase | allocated, MiB | predicted | error | reserved, MiB | predicted | error |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        if "measured" not in row or "predicted" not in row:
            print(f"| {row['row']}: {row.get('output', [''])[-1:]} {row.get('predict_output', [''])[-1:]} |")
            continue
        for phase in PHASES:
            cells = [row["row"], phase]
            for figure in ("allocated", "reserved"):
                is_, was = row["measured"][phase][figure], row["predicted"][phase][figure]
                cells += [f"{is_ / 2**20:,.1f}", f"{was / 2**20:,.1f}", f"{was / is_ - 1:+.2%}" if is_ else ""]
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/predicted_phases"))
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--budget", type=float, default=500, help="seconds after which no row is begun")
    parser.add_argument("--keep", type=int, default=0, help="GiB of each GPU that are left to other processes")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", type=Path)
    given = parser.parse_args()
    if given.table:
        table([json.loads(line) for line in given.table.read_text().splitlines()])
        return
    began, done, lock = time.monotonic(), [], threading.Condition()
    given.work.mkdir(parents=True, exist_ok=True)
    data = given.work / "data.jsonl"
    if not data.exists():
        train_rows.documents(data, 20_000 if given.tiny else 200_000)
    if given.out and given.out.exists():
        done += [json.loads(line) for line in given.out.read_text().splitlines()]
    wanted = [name for name in ROWS if given.only in name and name not in {row["row"] for row in done}]
    rows = {name: shrunk(ROWS[name]) if given.tiny else ROWS[name] for name in wanted}
    room = [40 << 30] * 2 if given.tiny else free(given.keep << 30)

    def one(item: tuple[str, Row]) -> None:
        name, row = item
        if row.gpus > len(room) or time.monotonic() - began > given.budget:
            print(f"{name}: left out", flush=True)
            return
        if row.weights is not None and not folder_of(row, given.work).exists():
            with lock:
                prepare = multiprocessing.get_context("spawn").Process(
                    target=train_rows.prepare, args=(train_rows.Row(row.weights), folder_of(row, given.work), data)
                )
                prepare.start()  # a process of its own, so that nothing of it stays on a GPU
                prepare.join()
        with lock:
            lock.wait_for(lambda: sorted(room)[-row.gpus] >= row.gib << 30)
            chosen = sorted(range(len(room)), key=lambda gpu: -room[gpu])[: row.gpus]
            for gpu in chosen:
                room[gpu] -= row.gib << 30
        try:
            result = run(name, row, given.work, [str(gpu) for gpu in sorted(chosen)], given.tiny)
        finally:
            with lock:
                for gpu in chosen:
                    room[gpu] += row.gib << 30
                lock.notify_all()
        with lock:
            done.append(result)
            print(json.dumps(result), flush=True)
            if given.out:
                given.out.write_text("".join(json.dumps(row) + "\n" for row in done))

    with ThreadPoolExecutor(given.parallel) as pool:
        list(pool.map(one, rows.items()))
    table(done)


if __name__ == "__main__":
    sys.exit(main())
