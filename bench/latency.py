"""From a phase's end in a rank to the screen: ``python bench/latency.py [--seconds 30] [--ranks 2]``.

Starts a real ``ftmon demo``, opens the real app on it (headless: 80x24, four paints a second), and takes, for every
heartbeat and step, the time from the phase's end on the rank's clock to the end of the paint that first drew a state
with it. Rank and app share a host, so a clock.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIRST_STEP_SECONDS = 180.0
WARM_UP_STEP = 3


def percentile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of all values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


async def measure(run: Any, seconds: float) -> dict[str, list[float]]:
    """Watch a run in the app; return latencies in seconds, by kind of message."""
    from ftmon.protocol.messages.telemetry import Heartbeat, Step
    from ftmon.tui.app import FtmonApp
    from ftmon.tui.model.run import RunModel
    from ftmon.tui.source.live import LiveSource

    pending: list[tuple[str, float]] = []
    found: dict[str, list[float]] = {"phase_end_to_paint": [], "step_end_to_paint": [], "phase_end_to_model": []}
    known: dict[int, float] = {}
    measuring = False
    fold = RunModel.apply

    def apply(model: RunModel, frame: Any) -> bool:
        message = frame.message
        if isinstance(message, Heartbeat):
            # A heartbeat that only fills silence repeats what was told before.
            fresh = known.get(message.rank) != message.phase_started
            known[message.rank] = message.phase_started
            if not (measuring and fresh):
                return fold(model, frame)
            pending.append(("phase_end_to_paint", message.phase_started))
            found["phase_end_to_model"].append(time.time() - message.phase_started)
        elif measuring and isinstance(message, Step):
            pending.append(("step_end_to_paint", message.started + message.host_us * 1e-6))
        return fold(model, frame)

    class MeasuredApp(FtmonApp):
        CSS_PATH = ROOT / "tui" / "ftmon.tcss"

        def pump(self) -> None:
            super().pump()
            drawn, pending[:] = list(pending), []
            # The screen is written after the event at hand: that is when a person sees it.
            self.call_after_refresh(lambda: [found[kind].append(time.time() - ended) for kind, ended in drawn])

    RunModel.apply = apply  # type: ignore[method-assign]
    source = LiveSource(run)
    app = MeasuredApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        deadline = time.monotonic() + FIRST_STEP_SECONDS
        while source.model.step < WARM_UP_STEP and time.monotonic() < deadline:
            await pilot.pause(0.2)
        measuring = True
        await asyncio.sleep(seconds)
        measuring = False
        await pilot.pause(0.5)
    source.close()
    return found


def main() -> None:
    """Measure and print one JSON object; times in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    program = shutil.which("ftmon")
    if program is None:
        sys.exit("bench/latency.py: no ftmon on PATH: activate the environment it is installed in")
    from ftmon.protocol.run import rundir

    with tempfile.TemporaryDirectory() as folder:
        os.environ["FTMON_HOME"] = folder
        words = ["demo", "--steps", "100000", "--ranks", str(arguments.ranks), "--detach"]
        subprocess.run([program, *words], check=True, stdout=subprocess.DEVNULL)
        run = rundir.find(None)
        try:
            found = asyncio.run(measure(run, arguments.seconds))
        finally:
            subprocess.run([program, "kill", run.id, "--yes"], check=False, stdout=subprocess.DEVNULL)
            deadline = time.monotonic() + 30
            while run.living_hub() and time.monotonic() < deadline:
                time.sleep(0.1)
    result = {
        kind: {
            "samples": len(values),
            "median_ms": round(statistics.median(values) * 1e3, 1),
            "p95_ms": round(percentile(values, 0.95) * 1e3, 1),
            "worst_ms": round(max(values) * 1e3, 1),
        }
        for kind, values in found.items()
        if values
    }
    print(json.dumps({"ranks": arguments.ranks, "seconds": arguments.seconds, **result}, indent=2))


if __name__ == "__main__":
    main()
