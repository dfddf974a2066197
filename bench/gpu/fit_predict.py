"""The largest length that fits of each case at caps of 24, 40 and 80 GB, predicted; no GPU is needed.

    python bench/gpu/fit_predict.py --out bench/data/fit_predictions.json

The length is found as ``ftmon predict --model --deepspeed --capacity --largest`` does; then 0.95, 0.99, 1.01 and
1.05 of it are predicted. ``fit_verdicts.py`` measures them. What the file holds already is not done again.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fit_cases import CASES, GB, POSITIONS, SHARES, Case, around, environment, files_of
from ftmon.protocol.analysis.estimates.ranking import Need, largest_that_fit, round_numbers


def predict(out: Path, only: str, parallel: int) -> None:
    """Predict the cases that the file lacks, each in a process of its own."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    lock = threading.Lock()

    def one(case: Case) -> None:
        command = [sys.executable, __file__, "--case", case.name]
        done = subprocess.run(
            command, env=environment(case, CUDA_VISIBLE_DEVICES=""), stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            print(f"{case.name}: exit status {done.returncode}", flush=True)
            return
        with lock:
            found[case.name] = result = json.loads(done.stdout)
            ordered = {case.name: found[case.name] for case in CASES if case.name in found}
            out.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{case.name}: {result['largest']} tokens, {result['seconds']:.0f} s", flush=True)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, [case for case in CASES if only in case.name and case.name not in found]))


def predict_one(case: Case) -> dict[str, Any]:
    """Find the largest length that fits, and predict the lengths around it."""
    from ftmon.trainer.predict import __main__ as command
    from ftmon.trainer.predict import answer, jobs, ranks
    from ftmon.trainer.predict.what_if import CONFIRMED

    begun = time.monotonic()
    capacity = case.cap_gb * GB
    with files_of(case) as (model, settings):
        words = [
            "--model",
            model,
            "--deepspeed",
            settings,
            "--ranks",
            str(case.ranks),
            "--micro-batch",
            str(case.micro_batch),
        ]
        words += ["--accumulation", "1", "--capacity", str(capacity)]
        words += ["--checkpointing"] * case.gradient_checkpointing
        words += ["--lora-rank", str(case.lora_r)] if case.lora_r else []
        job = jobs.prepare(command.arguments_of(words), command.allocator_settings())
    ranks.warm(["peft", *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen2"))])

    def points(lengths: Sequence[int]) -> list[Any]:
        return answer.predict(job._replace(lengths=list(lengths)), capacity).points

    tried: dict[int, bool] = {}

    def run(lengths: list[int]) -> list[Need]:
        found = points(lengths)
        tried.update({point.sequence_length: bool(point.fits) for point in found})
        return [Need(point.needed_bytes, [bool(point.fits)]) for point in found]

    (found,) = largest_that_fit(round_numbers(POSITIONS), [capacity], run, CONFIRMED)
    largest = found.value
    result: dict[str, Any] = {"settings": case._asdict(), "capacity_bytes": capacity, "largest": largest}
    result["tried"] = {str(length): tried[length] for length in sorted(tried)}
    if largest is not None:
        result["points"] = [plain(point) for point in points(around(largest, sorted(SHARES)))]
    result["seconds"] = time.monotonic() - begun
    return result


def plain(point: Any) -> dict[str, Any]:
    """Return a prediction's figures, of several ranks the highest."""

    def highest(figure: str) -> dict[str, int]:
        names = point.ranks[0].phases
        return {name: max(getattr(rank.phases[name], figure) for rank in point.ranks) for name in names}

    return {
        "length": point.sequence_length,
        "fits": point.fits,
        "tight": point.tight,
        "fails_in": point.fails_in,
        "needed_bytes": point.needed_bytes,
        "allocated": highest("allocated_peak_bytes"),
        "reserved": highest("reserved_peak_bytes"),
        "step_seconds": point.step_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--case", help="print the prediction of this case")
    args = parser.parse_args()
    if not args.case:
        if not args.out:
            parser.error("--out is needed")
        predict(args.out, args.only, args.parallel)
        return
    from ftmon.trainer.predict.__main__ import quietly

    (case,) = (case for case in CASES if case.name == args.case)
    with quietly():
        found = predict_one(case)
    print(json.dumps(found), flush=True)
    os._exit(0)  # as ftmon.trainer.predict does


if __name__ == "__main__":
    main()
