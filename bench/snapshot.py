"""How long a large memory snapshot takes to open, what memory that needs, and how long the cursor takes.

``python bench/snapshot.py [--entries N] [--extreme] [--file SNAPSHOT]`` repeats a real snapshot's trace until it has N
entries (each with a list of frames of its own), opens it in a fresh process and prints one JSON object. ``--extreme``
makes one up instead: hundreds of thousands of blocks live at once, deep stacks, thousands of segments.
"""

import argparse
import gzip
import json
import pickle
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT / "tests" / "data" / "step_zero3.pickle.gz"
MOVES = 50
LIVE, DEPTH = 200_000, 22
"""Of the made-up snapshot: blocks that live at once at the most, and frames of a stack."""


def make(path: Path, entries: int, real: Path) -> None:
    """Write a snapshot whose trace is the real one over and over; the step it holds ends as it begins."""
    with gzip.open(real) as file:
        # The file is this repository's own.
        snapshot: dict[str, Any] = pickle.load(file)
    once = snapshot["device_traces"][0]
    turns = -(-entries // len(once))
    span = once[-1]["time_us"] - once[0]["time_us"] + 1000
    snapshot["device_traces"] = [
        [
            {**entry, "frames": list(entry["frames"]), "time_us": entry["time_us"] + turn * span}
            for turn in range(turns)
            for entry in once
        ]
    ]
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


def make_extreme(path: Path, entries: int) -> None:
    """Write a snapshot in which ``LIVE`` blocks live at once, each entry with ``DEPTH`` frames in a list of its own."""
    draw = random.Random(7)
    frames = [{"name": f"call_{i}", "filename": f"/home/user/model/part_{i % 97}.py", "line": i} for i in range(4000)]
    stacks = [[draw.choice(frames) for _ in range(DEPTH)] for _ in range(5000)]
    base, slot = 0x7F0000000000, 2**16
    free, live, sizes = list(range(LIVE + 1)), [0] * LIVE, [0] * (LIVE + 1)
    trace: list[dict[str, Any]] = []

    def note(action: str, at: int, stack: list[Any]) -> None:
        trace.append({
            "action": action, "addr": base + at * slot, "size": sizes[at], "stream": 0, "frames": list(stack),
            "time_us": 1_780_000_000_000_000 + 3 * len(trace),
        })  # fmt: skip

    held = 0
    while len(trace) < entries:
        if held < LIVE and (held < LIVE // 2 or draw.random() < 0.6):
            at = free.pop(draw.randrange(len(free))) if len(free) < 64 else free.pop()
            sizes[at] = draw.randrange(1, slot - 512)
            note("alloc", at, draw.choice(stacks))
            live[held], held = at, held + 1
        else:
            place = draw.randrange(held)
            held -= 1
            at, live[place] = live[place], live[held]
            for action in ("free_requested", "free_completed"):
                note(action, at, draw.choice(stacks))
            free.append(at)
    of_segment = 32
    taken = set(live[:held])
    segments = [
        _segment(base, slot, range(first, first + of_segment), taken, sizes) for first in range(0, LIVE + 1, of_segment)
    ]
    with path.open("wb") as file:
        pickle.dump({"segments": segments, "device_traces": [trace], "allocator_settings": {}}, file)


def _segment(base: int, slot: int, slots: range, taken: set[int], sizes: list[int]) -> dict[str, Any]:
    """Make a segment of small blocks, each at the beginning of its slot."""
    blocks: list[dict[str, Any]] = []
    for at in slots:
        size = -(-sizes[at] // 512) * 512 if at in taken else 0
        if size:
            blocks.append({"size": size, "requested_size": sizes[at], "state": "active_allocated"})
        blocks.append({"size": slot - size, "requested_size": 0, "state": "inactive"})
        address = base + at * slot
        for block in blocks[-2 if size else -1 :]:
            block |= {"address": address, "frames": []}
            address += block["size"]
    return {
        "device": 0, "address": base + slots[0] * slot, "total_size": slot * len(slots), "stream": 0,
        "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip


def measure(path: Path) -> dict[str, object]:
    """Open a snapshot, and move the cursor about in each view."""
    begun = time.perf_counter()
    from ftmon.tui.model.snapshot import Explorer, freeze_garbage_collector, rows_of
    from ftmon.tui.source.load import open_replays

    replay = open_replays(path)[0]
    done = time.perf_counter()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, child = (each.ru_maxrss * 1024 for each in used)
    freeze_garbage_collector()
    explorer = Explorer([replay])
    chosen = random.Random(1)
    moves: dict[str, dict[str, float]] = {}
    for view in explorer.views:
        explorer.show(view)
        if view == "between":
            explorer.set_mark()
        times: list[float] = []
        cpu = time.process_time()
        for _ in range(MOVES):
            at = time.perf_counter()
            explorer.move(chosen.randrange(replay.entries))
            rows_of(explorer, 80)[:60]
            explorer.annotation_words()
            times.append((time.perf_counter() - at) * 1e3)
        moves[view] = {
            "median_ms": round(statistics.median(times), 1),
            "worst_ms": round(max(times), 1),
            "mean_cpu_ms": round((time.process_time() - cpu) * 1e3 / MOVES, 1),
        }
    return {
        "entries": replay.entries,
        "file_bytes": path.stat().st_size,
        "open_s": round(done - begun, 2),
        "open_cpu_s": [round(each.ru_utime + each.ru_stime, 2) for each in used],
        "most_resident_bytes": own,
        "reading_process_most_resident_bytes": child,
        "cursor": moves,
    }


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--extreme", action="store_true", help="very many live blocks, deep stacks")
    parser.add_argument("--file", type=Path, help="measure this snapshot as it is")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure), indent=1))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file
        if path is None:
            path = Path(folder) / "large.pickle"
            if arguments.extreme:
                make_extreme(path, arguments.entries)
            else:
                make(path, arguments.entries, REAL)
        # A process that never held the made data: its memory is the reader's alone.
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
