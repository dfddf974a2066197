"""The real snapshot of a step with its phases beside it, as the probe writes them, for tests and pictures."""

import gzip
import pickle
from pathlib import Path
from typing import Any

from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from snapshot_files import compact

STEP = Path(__file__).parents[1] / "data" / "step_zero3.pickle.gz"


def step_with_phases() -> Replay:
    """Give the real step as the probe would have written it, with its phases, and with a span of the script's."""
    with gzip.open(STEP) as file:
        snapshot: dict[str, Any] = pickle.load(file)
    times = [entry["time_us"] for entry in snapshot["device_traces"][0]]
    shares = {"step 12": (0, 1), "forward": (0, 0.28), "backward": (0.28, 0.75), "optimizer": (0.75, 0.97)}
    spans = {"ftmon " + name: share for name, share in shares.items()} | {"evaluate": (0.1, 0.4)}
    snapshot["external_annotations"] = [
        {"name": name, "stage": stage, "device": 0, "time_us": times[0] + round(share * (times[-1] - times[0]))}
        for name, ends in spans.items()
        for stage, share in zip(("START", "END"), ends, strict=True)
    ]
    return Replay(compact(snapshot, "rank-0-step-12.pickle"), 0)
