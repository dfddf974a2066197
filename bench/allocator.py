"""How fast the allocator's model is (processor time), and how it agrees with the recorded traces of the repository.

``python bench/allocator.py`` prints one JSON object: events a second (an allocation or a free each) on a recorded
training step that is repeated and on a random program with many blocks alive, each with both allocator settings; and
the comparison with each recorded trace.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import msgspec
from allocator_compare import compare
from ftmon.protocol.analysis.allocator.model import CachingAllocator
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.snapshot.columns import ALLOC, FREE_REQUESTED
from ftmon.protocol.snapshot.reader import open_snapshot

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
RECORDED = (("oom_backward", 20 * 2**30), ("step_zero3", None))
Program = list[tuple[int, int]]
"""Allocations as (number, size) and frees as (number, -1)."""


def step_program(path: Path, turns: int) -> Program:
    """Repeat a recorded step's requests; what it frees of before is left out."""
    trace = next(trace for trace in open_snapshot(path).traces if len(trace))
    addresses, sizes = memoryview(trace.addresses).cast("Q"), memoryview(trace.sizes).cast("q")
    program: Program = []
    live: dict[int, int] = {}
    for _ in range(turns):
        for index, action in enumerate(trace.actions):
            if action == ALLOC:
                live[addresses[index]] = len(program)
                program.append((len(program), sizes[index]))
            elif action == FREE_REQUESTED and addresses[index] in live:
                program.append((live.pop(addresses[index]), -1))
        program.extend((number, -1) for number in live.values())
        live.clear()
    return program


def random_program(events: int, most: int) -> Program:
    """Allocate and free at random, up to ``most`` blocks at once."""
    draw = random.Random(3)
    program: Program = []
    live: list[int] = []
    while len(program) < events:
        if live and (len(live) >= most or draw.random() < 0.45):
            at = draw.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            program.append((live.pop(), -1))
        else:
            live.append(len(program))
            program.append((len(program), int(2 ** draw.uniform(4, 27))))
    return program


def events_per_second(program: Program, settings: Settings) -> dict[str, float]:
    """Run a program through a fresh model."""
    model = CachingAllocator(settings)
    handles: dict[int, int] = {}
    begun = time.process_time()
    for number, size in program:
        if size < 0:
            model.free(handles.pop(number))
        else:
            handles[number] = model.allocate(size)
    seconds = time.process_time() - begun
    return {"events": len(program), "events_per_second": round(len(program) / seconds)}


def main() -> None:
    """Measure, compare, print; exit status 1 where a trace is not met."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    programs = {
        "step": step_program(DATA / "step_zero3.pickle.gz", 20),
        "random, 5000 live": random_program(200_000, 5000),
    }
    kinds = {"native": Settings(), "expandable": Settings(expandable_segments=True)}
    speed = {
        f"{name}, {kind}": events_per_second(program, settings)
        for name, program in programs.items()
        for kind, settings in kinds.items()
    }
    found = {
        name: compare(open_snapshot(DATA / f"{name}.pickle.gz"), 0, Settings(), allowed) for name, allowed in RECORDED
    }
    print(json.dumps({"speed": speed, "recorded": msgspec.to_builtins(found)}, indent=1))
    sys.exit(0 if all(one.same_segments and one.same_blocks for one in found.values()) else 1)


if __name__ == "__main__":
    main()
