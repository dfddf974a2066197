"""What it costs the terminal to apply the stream and read a picture: ``bench/run_model.py [--ranks N] [--steps N]``.

No terminal is involved: this is the plain state under the app. Times are of one core of the machine it runs on.
"""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from ftmon.protocol.messages.telemetry import Heartbeat, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from streams import Stream

CARD_COLUMNS = 38


def cost_us(frames: list[Frame], kind: type) -> dict[str, float]:
    """Fold everything; give microseconds a frame, of all frames and of one kind."""
    model = RunModel()
    of_kind, count = 0.0, 0
    begun = time.perf_counter()
    for frame in frames:
        model.apply(frame)
    whole = time.perf_counter() - begun
    model = RunModel()
    clock = time.perf_counter
    for frame in frames:
        before = clock()
        model.apply(frame)
        if type(frame.message) is kind:
            of_kind += clock() - before
            count += 1
    return {"a_frame_us": whole / len(frames) * 1e6, "of_kind_us": of_kind / max(count, 1) * 1e6, "count": count}


def picture_ms(model: RunModel, times: int = 50) -> float:
    """Read what an overview draws, once."""
    begun = time.perf_counter()
    for _ in range(times):
        for rank in model.ranks.values():
            rank.timeline.window(CARD_COLUMNS, model.now)
            _ = rank.shares, rank.peak, model.device_of(rank)
        _ = model.rates, model.fit, model.seconds_left, model.loss, model.losses_of(0), model.alerts.unresolved()
    return (time.perf_counter() - begun) / times * 1e3


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    stream = Stream(ranks=arguments.ranks, steps=arguments.steps, heartbeats=True, finished=False)
    frames = list(stream.frames())
    steps, beats = cost_us(frames, Step), cost_us(frames, Heartbeat)
    model = RunModel()
    for frame in frames:
        model.apply(frame)
    result = {
        "ranks": arguments.ranks,
        "frames": len(frames),
        "a_frame_us": round(steps["a_frame_us"], 2),
        "a_step_frame_us": round(steps["of_kind_us"], 2),
        "a_heartbeat_us": round(beats["of_kind_us"], 2),
        "a_picture_ms": round(picture_ms(model), 3),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
