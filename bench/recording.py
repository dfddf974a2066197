"""Measure the recording: room and time a rank-step, and seeks in a large file.

    python bench/recording.py --rank-steps 1000000 --seeks 300

Prints one JSON object. A seek is what the app asks to show another moment: the state, the memory graph of all ranks
over some window, and one rank's series over the same window; windows from a minute to the whole run, each in a random
place. ``write_us_per_step`` is append and commit together, at full speed, one transaction for 5,000 messages, all other
messages of the stream included; ``write_cpu_us_per_step`` is the same in the thread's own CPU time.
"""

import argparse
import json
import platform
import random
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from make_recording import make
from streams import RUN, Stream


def full_speed(folder: Path, cuda: bool) -> dict[str, float]:
    """Write 20,000 rank-steps as fast as the Writer takes them."""
    frames = list(Stream(ranks=8, steps=2500, cuda=cuda).frames())
    writer = Writer(folder / f"speed-{cuda}.sqlite", RUN)
    began, cpu = time.perf_counter(), time.thread_time()
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if count % 5000 == 0:
            writer.commit()
    writer.commit()
    spent, cpu = time.perf_counter() - began, time.thread_time() - cpu
    writer.close()
    return {
        "write_us_per_step": spent / 20_000 * 1e6,
        "write_cpu_us_per_step": cpu / 20_000 * 1e6,
        "steps_per_s": 20_000 / spent,
    }


def seeks(path: Path, count: int, columns: int) -> dict[str, float]:
    """Seek at random; the first of all, with nothing in the reader's cache, is told apart."""
    draw = random.Random(2)
    began = time.perf_counter()
    reader = Reader(path)
    info = reader.info()
    opened = time.perf_counter() - began
    spent: list[float] = []
    parts = {"state_ms": 0.0, "memory_ms": 0.0, "series_ms": 0.0}
    length = info.last_t - info.first_t
    for _ in range(count):
        t = draw.uniform(info.first_t, info.last_t)
        window = draw.choice((60.0, 600.0, 3600.0, length / 4, length))
        first = max(info.first_t, t - window)
        times = [time.perf_counter()]
        reader.state_at(t)
        times.append(time.perf_counter())
        reader.memory(first, t, columns)
        times.append(time.perf_counter())
        reader.series(draw.choice(info.ranks), first, t, 500)
        times.append(time.perf_counter())
        spent.append(times[-1] - times[0])
        for name, a, b in zip(parts, times, times[1:], strict=False):
            parts[name] += (b - a) * 1e3 / count
    began = time.perf_counter()
    reader.step_time(info.last_step // 3)
    step_ms = (time.perf_counter() - began) * 1e3
    reader.close()
    first_ms = spent[0] * 1e3
    spent.sort()
    return {
        "open_and_info_ms": opened * 1e3,
        "first_seek_ms": first_ms,
        "seek_p50_ms": spent[count // 2] * 1e3,
        "seek_p95_ms": spent[int(count * 0.95)] * 1e3,
        "seek_max_ms": spent[-1] * 1e3,
        **parts,
        "step_time_ms": step_ms,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--seeks", type=int, default=300)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--file", type=Path, help="use this recording, or make it if it is not there, and keep it")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="ftmon-bench-") as folder:
        path = options.file or Path(folder) / "recording.sqlite"
        figures: dict[str, object] = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
        figures["cuda"] = full_speed(Path(folder), cuda=True)
        figures["cpu"] = full_speed(Path(folder), cuda=False)
        if not path.exists():
            stream = Stream(ranks=options.ranks, steps=options.rank_steps // options.ranks, step_s=options.step_s)
            figures["made"] = make(path, stream)
        figures["read"] = seeks(path, options.seeks, options.columns)
        figures["bytes"] = path.stat().st_size
    print(json.dumps(figures, indent=2, default=lambda value: round(value, 2)))


if __name__ == "__main__":
    main()
