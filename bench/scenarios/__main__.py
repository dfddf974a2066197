"""Play stalls and deaths with real ranks, and tell what ftmon said of each.

    python -m bench.scenarios [--kinds a,b] [--runs 20] [--parallel 4] [--seed 1] [--json FILE] [--cuda --gpus 2]

Each scene is two to four ranks of a small training (steps of 0.1 s), started by ``ftmon run --detach -- torchrun ...``
(or ``deepspeed``) in a home of its own. The rank at fault and the step are drawn from the seed. Every result is a line
of the JSON file, written as it comes; scenes that are in it already are not played again, so a stopped bench goes on
where it was. ``--table FILE`` prints the table of a file and plays nothing.
"""

import argparse
import json
import queue
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from . import gpus, limits
from .kinds import BY_NAME, KINDS, Kind
from .scene import Scene

LONGEST_SECONDS = 75.0
"""A scene is not begun when less than this is left of ``--budget``."""


def main() -> int:
    args = arguments()
    path = Path(args.table or args.json)
    known = read(path)
    if args.table:
        print(table(known))
        return 0
    kinds = chosen(args)
    waiting: queue.Queue[tuple[Kind, int, float]] = queue.Queue()
    world = args.gpus if args.cuda else 0
    # A set of GPUs plays one scene at a time: their memory is compared before and after.
    sets = [tuple(range(n, n + world)) for n in range(0, gpus.count() - world + 1, world)] if world else []
    sets *= args.share
    parallel = min(args.parallel, len(sets)) if world else args.parallel
    steps_ms = [float(ms) for ms in args.step_ms.split(",")]
    have = {_key(row) for row in known if row["verdict"] != "not played"}
    scenes = [
        (kind, number, step_ms)
        for kind in kinds
        for number in range(args.runs)
        for step_ms in (steps_ms if kind.engine in ("zero2", "zero3") and kind.expect != "honest" else steps_ms[:1])
    ]
    random.Random(args.seed).shuffle(scenes)
    scenes.sort(key=lambda scene: -scene[0].limit_s)  # the longest first: none is left running alone
    for scene in scenes:
        if (scene[0].name, world, scene[1], scene[2]) not in have:
            waiting.put(scene)
    before = gpus.used(range(world)) if world and args.share > 1 else None
    print(f"{waiting.qsize()} scenes of {len(kinds)} kinds, {parallel} at a time", flush=True)
    deadline = time.monotonic() + args.budget
    lock = threading.Lock()

    def work(devices: tuple[int, ...]) -> None:
        while time.monotonic() + LONGEST_SECONDS < deadline:
            try:
                kind, number, step_ms = waiting.get_nowait()
            except queue.Empty:
                return
            alone = args.share == 1
            scene = Scene(kind, number, args.seed, devices=devices, step_ms=step_ms, alone=alone, keep=args.keep)
            row = {**scene.play(), "step_ms": step_ms}
            if world:
                row["gpus"] = world
            with lock:
                known.append(row)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(line(row), flush=True)

    places = sets[:parallel] if world else [()] * parallel
    workers = [threading.Thread(target=work, args=(place,), daemon=True) for place in places]
    for worker in workers:
        worker.start()
        time.sleep(0.3)
    for worker in workers:
        worker.join()
    print(f"\n{table(known)}")
    if before is not None:
        print(f"\nGPU memory that is not back: {gpus.left(before) or 'none'}")
    if waiting.qsize():
        print(f"\n{waiting.qsize()} scenes did not start within the time limit; the same command runs them")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="", help="these only, separated by commas")
    parser.add_argument("--list", action="store_true", help="name the kinds and end")
    parser.add_argument("--runs", type=int, default=1, help="runs of each kind")
    parser.add_argument("--parallel", type=int, default=1, help="scenes at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="scenarios.jsonl", help="where results go, one a line")
    parser.add_argument("--table", default="", help="only print the table of this file")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds this command may take")
    parser.add_argument("--keep", action="store_true", help="keep each scene's folder under the temporary directory")
    parser.add_argument("--cuda", action="store_true", help="NCCL on GPUs instead of gloo")
    parser.add_argument("--gpus", type=int, default=2, help="with --cuda: ranks, one a GPU")
    parser.add_argument("--share", type=int, default=1, help="with --cuda: scenes that share GPUs")
    parser.add_argument("--step-ms", default="0", help="time added to each step of DeepSpeed's scenes, several: 0,300")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{kind.name:22} {kind.title}" for kind in KINDS))
        sys.exit(0)
    return args


def chosen(args: argparse.Namespace) -> list[Kind]:
    names = [name for name in args.kinds.split(",") if name]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise SystemExit(f"no kind is called {unknown[0]}; --list names them")
    kinds = [BY_NAME[name] for name in names] if names else [kind for kind in KINDS if kind.cuda or not args.cuda]
    found: list[Kind] = []
    for kind in kinds:
        reason = limits.why_not(kind.needs)
        if reason:
            print(f"skipped: {kind.name}: {reason}", flush=True)
        else:
            found.append(kind)
    return found


def _key(row: dict[str, Any]) -> tuple[str, int, int, float]:
    return row["kind"], row.get("gpus", 0), row["run"], row.get("step_ms", 0.0)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines() if text.strip()] if path.exists() else []


def line(row: dict[str, Any]) -> str:
    seconds = f"{row['seconds']:.1f} s" if "seconds" in row else "-"
    if "ended_s" in row:
        seconds += f", ended {row['ended_s']:.1f} s"
    left = f"  LEFT: {row['left']}" if row.get("left") else ""
    return f"{row['kind']:22} {row['run']:2} {row['verdict']:12} {seconds:>7}  {row.get('said', '')}{left}"


def table(rows: list[dict[str, Any]]) -> str:
    """Sum the results up, a row a kind (and number of GPUs)."""
    lines = [
        "| what happens | runs | right | cannot tell | wrong | nothing said | median s | left over |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = sorted({row.get("gpus", 0) for row in rows})
    totals = dict.fromkeys(("runs", "right", "cannot tell", "wrong", "none", "left"), 0)
    for kind in KINDS:
        for world in groups:
            played = [r for r in rows if r["kind"] == kind.name and r.get("gpus", 0) == world]
            played = [r for r in played if r["verdict"] != "not played"]
            if not played:
                continue
            counts = {name: sum(r["verdict"] == name for r in played) for name in ("right", "cannot tell", "none")}
            counts["wrong"] = sum(r["verdict"] in ("wrong", "false alarm") for r in played)
            seconds = [r["seconds"] for r in played if "seconds" in r and r["verdict"] in ("right", "cannot tell")]
            median = f"{statistics.median(seconds):.1f}" if seconds else "-"
            left = sum(bool(r.get("left")) for r in played)
            name = f"{kind.title} ({world} GPUs)" if world else kind.title
            lines.append(
                f"| {name} | {len(played)} | {counts['right']} | {counts['cannot tell']} | {counts['wrong']} "
                f"| {counts['none']} | {median} | {left} |"
            )
            for key, value in (*counts.items(), ("runs", len(played)), ("left", left)):
                totals[key] += value
    lines.append(
        f"| **all** | {totals['runs']} | {totals['right']} | {totals['cannot tell']} | {totals['wrong']} "
        f"| {totals['none']} | | {totals['left']} |"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
