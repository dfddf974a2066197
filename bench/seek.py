"""How long a seek takes in a long recording: ``python bench/seek.py RECORDING [--seeks N]``.

``bench/make_recording.py`` makes the recording. A seek is timed from the key to the state in the screen's hands:
through the transport, the playback's thread and the fold, polled every millisecond; drawing comes on top. "First" is
from nothing to the first state, file opened and all.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ftmon.protocol.recording.reader import Reader
from ftmon.tui.source.replay import ReplaySource


def wait(source: ReplaySource, done: Callable[[], bool]) -> float:
    """Pump until ``done``; give the milliseconds it took."""
    begun = time.perf_counter()
    while not done():
        if not source.pump():
            time.sleep(0.001)
    return (time.perf_counter() - begun) * 1e3


def summary(times: list[float]) -> dict[str, float]:
    """Percentiles, milliseconds."""
    times = sorted(times)
    return {
        "median_ms": round(statistics.median(times), 1),
        "p95_ms": round(times[int(len(times) * 0.95) - 1], 1),
        "worst_ms": round(times[-1], 1),
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--seeks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed)
    begun = time.perf_counter()
    source = ReplaySource(arguments.recording)
    source.start()
    wait(source, lambda: source.model.last_seq > 0)
    first = (time.perf_counter() - begun) * 1e3
    transport = source.transport
    with Reader(arguments.recording) as reader:
        steps = reader.info().last_step
    result: dict[str, object] = {"recording_bytes": arguments.recording.stat().st_size, "first_ms": round(first, 1)}
    actions: dict[str, Callable[[], None]] = {
        "seek_while_opening": lambda: transport.goto(f"{chosen.uniform(0, 100):.4f}%"),
        "seek": lambda: transport.goto(f"{chosen.uniform(0, 100):.4f}%"),
        "to_a_step": lambda: transport.goto(str(chosen.randrange(1, steps + 1))),
        "a_step_back": lambda: transport.step(-1),
        "ten_seconds_on": lambda: transport.skip(10),
        "next_alert": transport.next_alert,
    }
    for name, act in actions.items():
        times: list[float] = []
        for _ in range(arguments.seeks // 10 if name == "seek_while_opening" else arguments.seeks):
            act()
            times.append(wait(source, lambda: not transport.seeking))
        result[name] = summary(times)
        if name == "seek_while_opening":
            begun = time.perf_counter()
            while len(source.model.training.course) < 300:
                source.pump()
                time.sleep(0.01)
                transport.goto("100%")
                wait(source, lambda: not transport.seeking)
            result["whole_history_after_ms"] = round((time.perf_counter() - begun) * 1e3, 1)
    source.close()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
