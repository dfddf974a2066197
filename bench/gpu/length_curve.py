"""The memory curve of a 0.5B over sequence length, measured in one process, and beside processes of their own.

    python bench/gpu/length_curve.py --out curve.json [--count 200] [--step 16] [--own 5]

``ftmon sweep`` with ``one_process`` measures ``count`` lengths, then some of them again with a process for each. The
table compares each phase's allocated and reserved peak, and says how long both took. With ``--tiny`` a small model on
the CPU tries the script itself.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import train_rows
import train_speed
from ftmon.protocol.sweep.rows import Row, read

MIB = 1 << 20
PHASES = ("forward", "backward", "optimizer")


def sweep(folder: Path, name: str, lengths: list[int], one_process: bool) -> tuple[dict[int, Row], float]:
    """Run a sweep over lengths; return its rows by length, and the seconds it took."""
    path = folder / f"{name}.yaml"
    axes = {"training.sequence_length": lengths}
    keys = {"config": "train.yaml", "axes": axes, "one_process": one_process, "predict": False, "steps": 3}
    path.write_text(json.dumps(keys))
    began = time.monotonic()
    subprocess.run([*train_speed.FTMON, "sweep", str(path), "--plain"], check=True)
    seconds = time.monotonic() - began
    rows = read(folder / f"{name}.results.jsonl").rows
    return {int(str(row.settings["training.sequence_length"])): row for row in rows}, seconds


def figures(row: Row) -> dict[str, Any]:
    """Return a row's peaks in bytes."""
    if row.verdict != "done":
        return {"verdict": row.verdict, "text": row.text}
    (rank,) = row.ranks
    phases = {name: rank.phases[name] for name in PHASES}
    return {
        "verdict": row.verdict,
        "step_ms": rank.step_ms,
        "allocated": {name: one.peak_bytes for name, one in phases.items()},
        "reserved": {name: one.reserved_peak_bytes for name, one in phases.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--step", type=int, default=16)
    parser.add_argument("--own", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    lengths = [given.step * number for number in range(1, given.count + 1)]
    model = {**train_rows.QWEN_05B, **(train_rows.TINY if given.tiny else {})}
    train_rows.documents(folder / "data.jsonl", 20 * lengths[-1])
    config = {
        "model": {"config": {**model, "max_position_embeddings": max(512, lengths[-1])}, "compile": "off"},
        "data": {"path": str(folder / "data.jsonl"), "packing": True},
        "training": {"seed": train_rows.SEED},
        "run": {"ranks": 1, "device": "cpu" if given.tiny else "cuda"},
    }
    (folder / "train.yaml").write_text(json.dumps(config))
    together, seconds = sweep(folder, "together", lengths, one_process=True)
    chosen = sorted({lengths[round(n * (len(lengths) - 1) / max(1, given.own - 1))] for n in range(given.own)})
    alone, alone_seconds = sweep(folder, "alone", chosen, one_process=False)
    found = {
        "device": train_speed.device_name(),
        "seconds": round(seconds, 1),
        "seconds_alone": round(alone_seconds, 1),
        "together": {length: figures(row) for length, row in together.items()},
        "alone": {length: figures(row) for length, row in alone.items()},
    }
    print(f"{len(together)} lengths in one process: {seconds:.0f} s; {len(alone)} alone: {alone_seconds:.0f} s")
    print("| tokens | phase | allocated, MiB | alone | reserved, MiB | alone |")
    print("| ---: | --- | ---: | ---: | ---: | ---: |")
    for length, row in alone.items():
        ours, own = figures(together[length]), figures(row)
        for phase in PHASES if ours["verdict"] == own["verdict"] == "done" else ():
            cells = [found[kind][phase] / MIB for kind in ("allocated", "reserved") for found in (ours, own)]
            print(f"| {length} | {phase} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    if given.out:
        given.out.write_text(json.dumps(found, indent=1))
    return int(any(row.verdict != "done" for row in [*together.values(), *alone.values()]))


if __name__ == "__main__":
    sys.exit(main())
