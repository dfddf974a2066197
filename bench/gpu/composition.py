"""What the peaks consist of, on a GPU: the parts add up, and with NVML's figures nothing is left over.

    python bench/gpu/composition.py --out composition.json            all of it, in under three minutes on one H200
    python bench/gpu/composition.py --only qwen-0.5b-z3

Each configuration runs the loop of ``loop.py`` under ``ftmon run`` for a few steps; everything is read from the run's
recording. A verdict line follows each; the last line says how many did not hold.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from ftmon.protocol.analysis.memory.leak import Footprint, footprint
from ftmon.protocol.messages.memory import PARTS, Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, DeviceSample, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir

LOOP = Path(__file__).with_name("loop.py")
MIB = 2**20
PORT = 29650


class Case(NamedTuple):
    """One configuration."""

    model: str
    stage: int
    more: tuple[str, ...] = ()
    steps: int = 24

    @property
    def name(self) -> str:
        """Name it, as ``--only`` takes it."""
        return "-".join((self.model, f"z{self.stage}", *(word.strip("-") for word in self.more)))


CASES = [
    Case("qwen-0.5b", 0),
    Case("qwen-0.5b", 2),
    Case("qwen-0.5b", 3),
    Case("qwen-0.5b", 2, ("--checkpointing",)),
    Case("qwen-0.5b", 3, ("--offload",), 8),
    Case("llama-1b", 0),
    Case("llama-1b", 2, ("--offload",), 6),
    Case("llama-1b", 3, ("--checkpointing",)),
]


def run(case: Case, number: int) -> dict[str, Any]:
    """Run one configuration and judge it."""
    launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(PORT + number), str(LOOP)]
    options = ["--model", case.model, "--stage", str(case.stage), "--seq", "1024", "--micro-batch", "2", "--torch-adam"]
    options += ["--steps", str(case.steps), "--block", "1", *case.more]
    out = Path(tempfile.mkdtemp()) / "result"
    command = [sys.executable, "-m", "ftmon.tui.cli", "run", "--plain", "--name", f"composition-{case.name}", "--"]
    command += [sys.executable, *launcher, *options, "--out", str(out)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        print((done.stdout + done.stderr)[-2000:])
        return {"name": case.name, "failures": [f"exit status {done.returncode}"]}
    found = rundir.find(f"composition-{case.name}")
    with Reader(found.recording) as reader:
        messages = [frame.message for frame in reader.frames(0, 10_000_000)]
    log = found.logs / "probe.log"
    failures = [f"probe.log: {log.read_text()[-500:]}"] if log.exists() and log.read_text() else []
    result = judge(case.name, messages, failures)
    result["seconds"] = round(time.monotonic() - begun, 1)
    result["step_ms"] = json.loads(out.with_name("result.rank0").read_text())["step_ms"]
    print(f"   {result['seconds']} s; steps {' '.join(f'{ms:.0f}' for ms in result['step_ms'])} ms", flush=True)
    return result


def judge(name: str, messages: list[Any], failures: list[str]) -> dict[str, Any]:
    """Print what the compositions of one run say and check it against the steps' own figures and NVML's."""
    steps = {message.step: message for message in messages if isinstance(message, Step)}
    compositions = [message for message in messages if isinstance(message, Composition)]
    samples = [message for message in messages if isinstance(message, DeviceSample) and message.kind == "gpu"]
    events = {message.step: message for message in messages if isinstance(message, AllocatorEvents)}
    print(f"\n## {name}: {len(compositions)} compositions of {len(steps)} steps", flush=True)
    if not compositions:
        failures.append("no composition")
    kept: list[dict[str, Any]] = []
    for composition in compositions:
        print(
            f"step {composition.step} ({composition.reason}): {composition.entries} entries, walk "
            f"{composition.walk_us} us, read {composition.read_us} us {composition.note}"
        )
        failures += check(composition, steps.get(composition.step))
        kept.append(plain(composition))
    if compositions:
        table(compositions[-1])
        count = events.get(compositions[-1].step)
        if count is None:
            failures.append("no allocator events of the composed step")
        else:
            print(
                f"events: {sum(phase.allocations for phase in count.phases)} allocations in {count.host_us} us, "
                f"free {count.free_bytes / MIB:.0f} MiB, largest {count.largest_free_block_bytes / MIB:.0f} MiB, "
                f"rounding {count.rounding_bytes / MIB:.1f} MiB, segments {count.segments}, retries {count.retries}"
            )
    closure = close(compositions, samples)
    if closure is None:
        failures.append("no sample of NVML that lists the rank")
    else:
        last, used, outside = closure
        share = abs(outside.unexplained) / used
        print(
            f"NVML used {used / MIB:.0f} MiB = allocated {last.allocated_bytes / MIB:.0f} + unused "
            f"{(last.reserved_bytes - last.allocated_bytes) / MIB:.0f} + context and NCCL {outside.context / MIB:.0f} "
            f"+ others {outside.others / MIB:.0f} + unexplained {outside.unexplained / MIB:.0f} ({share:.2%})"
        )
        if share > 0.01:
            failures.append(f"{share:.2%} of NVML's used memory are unexplained")
        if not 0 < outside.context < 4 * 2**30:
            failures.append(f"context and NCCL of {outside.context / MIB:.0f} MiB")
    print("VERDICT", name, "holds" if not failures else "FAILS: " + "; ".join(failures), flush=True)
    return {"name": name, "failures": failures, "compositions": kept}


def check(composition: Composition, step: Step | None) -> list[str]:
    """Hold one composition against its step."""
    found: list[str] = []
    for phase in composition.phases:
        where = f"step {composition.step} {phase.name}"
        record = step.phase(phase.name) if step is not None else None
        if sum(phase.parts.values()) != phase.peak_bytes:
            found.append(f"{where}: parts of {sum(phase.parts.values())} for a peak of {phase.peak_bytes}")
        if record is None or record.allocated.peak != phase.peak_bytes:
            found.append(f"{where}: peak {phase.peak_bytes}, the step says {record and record.allocated.peak}")
        lost = phase.parts.get("unattributed", 0)
        if lost > 0.001 * phase.peak_bytes:
            found.append(f"{where}: {lost / phase.peak_bytes:.2%} unattributed")
    return found


def table(composition: Composition) -> None:
    """Print the parts of each phase in MiB."""
    shown = [part for part in PARTS if any(part in phase.parts for phase in composition.phases)]
    print("| phase | peak | " + " | ".join(shown) + " |\n" + "| --- " * (len(shown) + 2) + "|")
    for phase in composition.phases:
        cells = [f"{phase.parts.get(part, 0) / MIB:.1f}" for part in shown]
        print(f"| {phase.name} | {phase.peak_bytes / MIB:.1f} | " + " | ".join(cells) + " |")
    print("known: " + ", ".join(f"{part} {size / MIB:.1f}" for part, size in composition.known.items()))


def close(compositions: list[Composition], samples: list[DeviceSample]) -> tuple[Composition, int, Footprint] | None:
    """Join the last composition with the nearest sample of NVML that lists the rank: used bytes, and their parts."""
    for composition in reversed(compositions):
        for sample in sorted(samples, key=lambda sample: abs(sample.time - composition.time)):
            found = footprint(composition.reserved_bytes, sample, composition.rank)
            if found is not None and abs(sample.time - composition.time) < 2:
                return composition, sample.used_bytes, found
    return None


def plain(composition: Composition) -> dict[str, Any]:
    """Make one composition fit for JSON."""
    return {
        "step": composition.step,
        "reason": composition.reason,
        "entries": composition.entries,
        "walk_us": composition.walk_us,
        "read_us": composition.read_us,
        "note": composition.note,
        "known": composition.known,
        "phases": {phase.name: {"peak": phase.peak_bytes, **phase.parts} for phase in composition.phases},
    }


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    for number, case in enumerate(CASES):
        if arguments.only in ("", case.name):
            results.append(run(case, number))
            if arguments.out:
                arguments.out.write_text(json.dumps(results, indent=1))
    bad = [result["name"] for result in results if result["failures"]]
    print(f"\nVERDICT {len(results) - len(bad)} of {len(results)} configurations hold; not: {', '.join(bad) or 'none'}")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
