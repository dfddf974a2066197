"""How long a large memory snapshot takes to open, what memory that needs, and how long the cursor takes.

``python bench/snapshot.py [--entries N] [--file SNAPSHOT]`` repeats a real snapshot's trace until it has N entries
(each with a list of frames of its own), opens it in a fresh process and prints one JSON object.
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


def measure(path: Path) -> dict[str, object]:
    """Open a snapshot, and move the cursor about in each view."""
    begun = time.perf_counter()
    from ftmon.protocol.snapshot.reader import open_snapshot
    from ftmon.protocol.snapshot.replay import Replay
    from ftmon.tui.model.snapshot_explorer import Explorer
    from ftmon.tui.model.snapshot_rows import rows_of

    snapshot = open_snapshot(path)
    read = time.perf_counter()
    replay = Replay(snapshot, snapshot.devices()[0])
    done = time.perf_counter()
    own, child = (resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    explorer = Explorer([replay])
    chosen = random.Random(1)
    moves: dict[str, dict[str, float]] = {}
    for view in explorer.views:
        explorer.show(view)
        if view == "between":
            explorer.set_mark()
        times: list[float] = []
        for _ in range(MOVES):
            at = time.perf_counter()
            explorer.move(chosen.randrange(replay.entries))
            rows_of(explorer, 80)
            explorer.annotation_words()
            times.append((time.perf_counter() - at) * 1e3)
        moves[view] = {"median_ms": round(statistics.median(times), 1), "worst_ms": round(max(times), 1)}
    return {
        "entries": replay.entries,
        "file_bytes": path.stat().st_size,
        "read_s": round(read - begun, 2),
        "open_s": round(done - begun, 2),
        "most_resident_bytes": own,
        "reading_process_most_resident_bytes": child,
        "cursor": moves,
    }


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
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
            make(path, arguments.entries, REAL)
        # A process that never held the made data: its memory is the reader's alone.
        subprocess.run([sys.executable, __file__, "--measure", str(path)], check=True)


if __name__ == "__main__":
    main()
