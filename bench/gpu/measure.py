"""The figures that need GPUs: what the probe costs, whether its peaks are true, NVML beside nvidia-smi, a hang ended.

    python bench/gpu/measure.py cost peaks nvml         on one GPU
    python bench/gpu/measure.py train hang              on two or more

Every part runs the loop of ``loop.py`` under DeepSpeed's launcher, with and without ``ftmon run``, and prints a
Markdown table; ``--out FILE`` keeps the tables and the raw figures.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftmon.protocol.messages import telemetry
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir

LOOP = Path(__file__).with_name("loop.py")
FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
MIB = 2**20
lines: list[str] = []
raw: dict[str, Any] = {}


def say(text: str) -> None:
    lines.append(text)
    print(text, flush=True)


def launcher(gpus: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        *("-m", "deepspeed.launcher.runner", "--num_gpus", str(gpus), str(LOOP)),
        *arguments,
    ]


def gpu_count() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len([line for line in listed.splitlines() if line.startswith("GPU")])


def smi_used_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()]


def run(gpus: int, watched: bool, name: str, *arguments: str) -> dict[int, dict[str, Any]]:
    """Run the loop, return its own result of every rank."""
    out = Path(tempfile.mkdtemp()) / "result"
    command = launcher(gpus, *arguments, "--out", str(out))
    if watched:
        command = [*FTMON, "run", "--plain", "--name", name, "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        say(f"```\n{(done.stdout + done.stderr)[-3000:]}\n```")
        raise SystemExit(f"{name}: exit status {done.returncode}")
    return {rank: json.loads(out.with_name(f"result.rank{rank}").read_text()) for rank in range(gpus)}


def steps_of(name: str) -> list[telemetry.Step]:
    with Reader(rundir.find(name).recording) as reader:
        frames = reader.frames(0, 10_000_000)
    return [frame.message for frame in frames if isinstance(frame.message, telemetry.Step)]


def cost(pairs: int) -> None:
    """Pairs of runs, without and with ftmon, in turn; the first blocks of each are warm-up and dropped."""
    say("| probe cost, Llama-shaped 0.7B, 2 x 2048 tokens, one GPU | ZeRO-0 | ZeRO-2 |\n| --- | --- | --- |")
    columns = [cost_of(stage, pairs) for stage in (0, 2)]
    for label in columns[0]:
        say(f"| {label} | {' | '.join(column[label] for column in columns)} |")


def cost_of(stage: int, pairs: int) -> dict[str, str]:
    """Measure one ZeRO stage; returns its column of the table."""
    arguments = ["--model", "llama-0.7b", "--stage", str(stage), "--seq", "2048", "--micro-batch", "2"]
    arguments += ["--steps", "140", "--block", "10"]
    ratios: list[float] = []
    times: dict[bool, list[float]] = {False: [], True: []}
    probe_us: list[int] = []
    for pair in range(pairs):
        medians = {}
        for watched in (False, True) if pair % 2 == 0 else (True, False):
            name = f"cost-z{stage}-{pair}"
            result = run(1, watched, name, *arguments)[0]
            medians[watched] = statistics.median(result["step_ms"][2:])
            times[watched].extend(result["step_ms"][2:])
            if watched:
                probe_us += [step.probe_us for step in steps_of(name)[10:]]
        ratios.append(medians[True] / medians[False])
        print(f"ZeRO-{stage}, pair {pair}: {medians[False]:.3f} ms without, {medians[True]:.3f} ms with", flush=True)
    raw[f"cost-z{stage}"] = {
        "ratios": ratios, "without_ms": times[False], "with_ms": times[True], "probe_us": probe_us
    }  # fmt: skip
    ordered = sorted(probe_us)
    return {
        f"step without ftmon, median of {len(times[False])} blocks": f"{statistics.median(times[False]):.2f} ms",
        "step with ftmon, allocator events on": f"{statistics.median(times[True]):.2f} ms",
        "ratio with/without by pair": ", ".join(f"{ratio:.4f}" for ratio in ratios),
        "median ratio": f"{statistics.median(ratios):.4f}",
        "hook time on the training thread, a step (probe_us)": (
            f"median {statistics.median(ordered):.0f} us, 95 % {ordered[int(len(ordered) * 0.95)]} us"
        ),
    }


def peaks(gpus: int) -> None:
    """The phases' peaks by hand, without ftmon, beside the recorded ones."""
    say("| model, ZeRO, seq | phase | by hand MiB | ftmon MiB | script's own view equal |")
    say("| --- | --- | --- | --- | --- |")
    raw["peaks"] = []
    for model, stage in (("qwen-0.5b", "2"), ("llama-1b", "3")):
        arguments = ("--model", model, "--stage", stage, "--seq", "1024", "--steps", "8", "--block", "8")
        name = f"peaks-{model}-{stage}"
        by_hand = run(gpus, False, name, *arguments, "--by-hand")
        plain = run(gpus, False, name, *arguments)
        watched = run(gpus, True, name, *arguments)
        own, seen = plain[0]["max_memory_allocated"], watched[0]["max_memory_allocated"]
        recorded = {step.step: step for step in steps_of(name) if step.rank == 0}
        for phase in ("forward", "backward", "optimizer"):
            hand = by_hand[0]["peaks"][phase]
            ours = [record.allocated.peak for number in range(1, 9) if (record := recorded[number].phase(phase))]
            say(
                f"| {model}, {stage}, 1024 | {phase} | {hand[-1] / MIB:.2f} | {ours[-1] / MIB:.2f} | "
                f"{'yes' if own == seen else f'no: {own} without, {seen} with'} |"
            )
            raw["peaks"].append({"model": model, "stage": stage, "phase": phase, "hand": hand, "ftmon": ours})


def nvml(gpus: int) -> None:
    """What the hub recorded for the devices, beside nvidia-smi asked at the same moment."""
    seen: list[tuple[float, list[int]]] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(0.5):
            seen.append((time.time(), smi_used_mib()))

    thread = threading.Thread(target=poll)
    thread.start()
    run(gpus, True, "nvml", "--steps", "300", "--seq", "2048")
    stop.set()
    thread.join()
    with Reader(rundir.find("nvml").recording) as reader:
        frames = reader.frames(0, 10_000_000)
    samples = [f.message for f in frames if isinstance(f.message, telemetry.DeviceSample) and f.message.kind == "gpu"]
    say("| GPU | samples | nvidia-smi MiB, highest | ftmon MiB, nearest in time | power W | temp C | util % |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for gpu in range(gpus):
        highest = max(seen, key=lambda pair: (pair[1][gpu], pair[0]))
        nearest = min((s for s in samples if s.index == gpu), key=lambda s: abs(s.time - highest[0]))
        say(
            f"| {gpu} | {len(samples)} | {highest[1][gpu]} | {nearest.used_bytes / MIB:.0f} | {nearest.power_w} | "
            f"{nearest.temperature_c} | {nearest.utilization_percent} |"
        )


def train(gpus: int) -> None:
    """ftmon's own trainer on random-weight models of 0.5B and 1B parameters."""
    from loop import MODELS

    folder = Path(tempfile.mkdtemp())
    data = folder / "data.jsonl"
    row = {"prompt": "Count from one to one hundred.", "response": " ".join(str(number) for number in range(1, 101))}
    data.write_text("".join(json.dumps(row) + "\n" for _ in range(512)))
    say("| model | ZeRO | GPUs | steps | s/step | tokens/s | highest peak GiB | in | exit |\n" + "| --- " * 9 + "|")
    for model in ("qwen-0.5b", "llama-1b"):
        for stage in (2, 3):
            config = folder / f"{model}-{stage}.yaml"
            config.write_text(
                TRAIN_YAML.format(
                    data=data, out=folder / "out", stage=stage, gpus=gpus, model=json.dumps(MODELS[model])
                )
            )
            name = f"train-{model}-z{stage}"
            command = [*FTMON, "train", str(config), "--plain", "--name", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
            if done.returncode:
                say(f"```\n{(done.stdout + done.stderr)[-3000:]}\n```")
                continue
            steps = [step for step in steps_of(name) if step.step > 3]
            seconds = statistics.median(step.host_us for step in steps) / 1e6
            tokens = sum(step.tokens for step in steps) / len(steps) * gpus / seconds
            top = max(steps, key=lambda s: s.peak_phase.peak_span.peak if s.peak_phase else 0).peak_phase
            assert top is not None
            say(
                f"| {model} | {stage} | {gpus} | {max(s.step for s in steps)} | {seconds:.3f} | {tokens:.0f} | "
                f"{top.peak_span.peak / 2**30:.2f} | {top.name} | {done.returncode} |"
            )


TRAIN_YAML = """
model: {{config: {model}}}
data: {{path: {data}}}
zero: {{stage: {stage}}}
training: {{max_steps: 30, micro_batch: 2, grad_accumulation: 1, sequence_length: 1024}}
evaluation: off
output: {{dir: {out}, overwrite: true, save_model: false}}
run: {{ranks: {gpus}}}
"""


def hang(gpus: int) -> None:
    """One rank stops entering collectives under NCCL: seen, named, killed; its GPU memory is back."""
    before = smi_used_mib()
    arguments = ("--steps", "5000", "--hang-rank", str(gpus - 1), "--hang-step", "60", "--stage", "2")
    run_command = [*FTMON, "run", "--plain", "--name", "hang", "--", *launcher(gpus, *arguments)]
    job = subprocess.Popen(run_command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def status() -> dict[str, Any]:
        asked = subprocess.run([*FTMON, "status", "hang", "--json"], capture_output=True, text=True, check=False)
        return json.loads(asked.stdout) if asked.returncode == 0 else {}

    seen = wait(lambda: "hung" in json.dumps(status().get("ranks", "")), 120)
    say(f"hang seen: {seen is not None}, {seen or 0:.1f} s after the start of the run (launch and 60 steps included)")
    raw["hang"] = status()
    during = smi_used_mib()
    began = time.time()
    killed = subprocess.run([*FTMON, "kill", "hang", "--yes"], capture_output=True, text=True, timeout=120, check=False)
    say(f"`ftmon kill`: exit status {killed.returncode} after {time.time() - began:.1f} s")
    say(f"```\n{(killed.stdout + killed.stderr)[-1500:]}\n```")
    after = smi_used_mib()
    say("| GPU | used before MiB | hung MiB | after the kill MiB |\n| --- | --- | --- | --- |")
    for gpu in range(gpus):
        say(f"| {gpu} | {before[gpu]} | {during[gpu]} | {after[gpu]} |")
    output, _ = job.communicate(timeout=60)
    say(f"`ftmon run` ended with {job.returncode}; its last lines:\n```\n{output[-1500:]}\n```")


def wait(condition: Callable[[], bool], seconds: float) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.5)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["cost", "peaks", "nvml", "train", "hang"])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    os.environ.setdefault("FTMON_HOME", tempfile.mkdtemp())
    gpus = gpu_count()
    parts: dict[str, Callable[[], None]] = {
        "cost": lambda: cost(args.pairs),
        "peaks": lambda: peaks(gpus),
        "nvml": lambda: nvml(gpus),
        "train": lambda: train(gpus),
        "hang": lambda: hang(gpus),
    }
    for part in args.parts:
        say(f"\n### {part}: {gpus} GPU{'s' if gpus > 1 else ''}\n")
        began = time.monotonic()
        try:
            parts[part]()
        except (SystemExit, Exception) as error:
            say(f"{part} failed: {type(error).__name__}: {error}")
        say(f"\n({time.monotonic() - began:.0f} s)")
        if args.out:
            args.out.write_text("\n".join(lines) + "\n")
            args.out.with_suffix(".json").write_text(json.dumps(raw))


if __name__ == "__main__":
    main()
