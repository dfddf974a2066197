"""What exporters cost a training and its hub: one CPU demo, in alternating blocks with all exporters and with none.

    python bench/exporters.py [--blocks 32] [--seconds 15] [--targets metrics,otel,...] [key.sub=value ...]

The exporters run as with ``--metrics`` and ``--report-to``: a scraper reads the metrics every 5 s, a receiver in this
process takes OTLP, trackers write to a temporary folder without network. They are started once; in a block "off" they
are stopped (SIGSTOP). What waited meanwhile is passed on before and in the next block "on", so their cost is not less
than in a run. Order: on off off on. Of each block: the median host time of a step, the training thread's CPU time in
it (both of steps without evaluation or checkpoint), and the CPU time of hub and exporters. Ratios are those of
neighbouring blocks: their geometric mean, and a 95 % interval by bootstrap. Other load on the machine disturbs host
times most: there the training thread's CPU time shows what exporters cost it in caches, and ``share``, the exporters'
part of the host's CPU time, what they can take from ranks that use all of it. An interval that holds 1 shows nothing
but its width.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import msgspec
import psutil
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import RunDir
from ftmon.protocol.run.start import spawn_exporter
from ftmon.protocol.run.targets import REPORT_TARGETS, TRACKERS, is_installed

START_SECONDS = 900.0
"""For the exporters' imports, at most: nothing is measured while one of them imports."""
SETTLE_SECONDS = 4.0
"""Between blocks."""
SCRAPE_SECONDS = 5.0


class Block(NamedTuple):
    on: bool
    begin: float
    end: float
    hub_s: float
    exporters_s: dict[str, float]
    """CPU time by target."""


class _Collector(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU time of processes and of all that they have started, exact to a microsecond."""
    total = 0.0
    for one in family(processes):
        with suppress(OSError):
            total += time.clock_gettime((~one.pid << 3) | 2)  # the process's CPU clock: clock_getcpuclockid(3)
    return total


def family(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return processes and all that they have started."""
    found: list[psutil.Process] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found += [process, *process.children(recursive=True)]
    return found


@contextmanager
def exporting(run: RunDir, targets: Sequence[str], port: int) -> Iterator[dict[str, psutil.Process]]:
    """Run exporters of a run that was started without any."""
    started: list[subprocess.Popen[bytes]] = []
    for name in targets:
        with (run.logs / f"{name}-exporter.log").open("ab") as log:
            started.append(spawn_exporter(name, run, log))
    over = threading.Event()

    def scrape() -> None:
        while not over.wait(SCRAPE_SECONDS):
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        waiting = [run.logs / f"{name}-exporter.log" for name in targets if name in TRACKERS]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not all("the run is there" in log.read_text() for log in waiting):
            time.sleep(1.0)
        late = [log.name for log in waiting if "the run is there" not in log.read_text()]
        if late:
            sys.exit(f"not ready after {START_SECONDS:g} s: {', '.join(late)} in {run.logs}")
        yield {name: psutil.Process(process.pid) for name, process in zip(targets, started, strict=True)}
        failed = [name for name, process in zip(targets, started, strict=True) if process.poll() is not None]
        if failed:
            sys.exit(f"{', '.join(failed)} ended: see {run.logs}")
    finally:
        over.set()
        for process in started:
            process.kill()  # the recording is not theirs, and nobody reads the rest
            process.wait()
        scraper.join()


def measure(run: RunDir, on: bool, seconds: float, exporters: dict[str, psutil.Process]) -> Block:
    hub = run.living_hub()
    assert hub is not None
    processes = {"hub": psutil.Process(hub.process.pid), **exporters}
    begin, before = time.time(), {name: cpu_seconds([process]) for name, process in processes.items()}
    time.sleep(seconds)
    spent = {name: cpu_seconds([process]) - before[name] for name, process in processes.items()}
    return Block(on, begin, time.time(), spent.pop("hub"), spent)


def steps_of(run: RunDir) -> list[Step]:
    with Reader(run.recording) as reader:
        found: list[Step] = []
        last = 0
        while frames := reader.frames(last, 5_000):
            found += [frame.message for frame in frames if isinstance(frame.message, Step)]
            last = frames[-1].seq
    return found


def figures(block: Block, steps: Sequence[Step]) -> dict[str, float]:
    """Return a block's figures in ms a step, and of the hub in ms a second: most of it goes by time. NaN: no step."""
    mine = [step for step in steps if block.begin <= step.started and step.started + step.host_us / 1e6 <= block.end]
    plain = [step for step in mine if step.training_us == step.host_us]
    numbers = {step.step for step in mine}
    return {
        "steps": len(numbers),
        "step": statistics.median([step.host_us for step in plain] or [math.nan]) / 1e3,
        "training_cpu": statistics.median([step.cpu_us for step in plain] or [math.nan]) / 1e3,
        "hub_cpu": block.hub_s * 1e3 / (block.end - block.begin),
        "share": sum(block.exporters_s.values()) / (block.end - block.begin) / (os.cpu_count() or 1),
    }


def ratio(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the geometric mean of on / off, and its 95 % interval."""
    mean, low, high = (math.exp(value) for value in interval([math.log(on / off) for on, off in pairs]))
    return f"{mean:.4f} ({low:.4f} to {high:.4f})"


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean, and its 95 % interval by bootstrap."""
    drawn = random.Random(0)
    means = sorted(statistics.fmean(drawn.choices(values, k=len(values))) for _ in range(10_000))
    return statistics.fmean(values), means[249], means[9749]


def start(overrides: Sequence[str]) -> RunDir:
    words = [sys.executable, "-m", "ftmon.tui.cli", "demo", "--detach", "--steps", "1000000", *overrides]
    before = {run.id for run in rundir.all_runs()}
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (run,) = [run for run in rundir.all_runs() if run.id not in before]
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0)
    installed = ["metrics", *(name for name, target in REPORT_TARGETS.items() if is_installed(target.package))]
    parser.add_argument("--targets", default=",".join(installed))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ |= {
            "FTMON_HOME": f"{folder}/home", "HF_HOME": f"{folder}/hf", "WANDB_MODE": "offline", "WANDB_DIR": folder,
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "TENSORBOARD_LOGGING_DIR": f"{folder}/tensorboard",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        }  # fmt: skip
        run = start(arguments.overrides)
        port = 19_411
        try:
            while not run.recording.exists() or len(steps_of(run)) < 20:
                time.sleep(1.0)
            file = run.read_run()
            run.write_run(
                msgspec.structs.replace(file, options=msgspec.structs.replace(file.options, metrics=str(port)))
            )
            blocks = list(alternate(run, targets, port, arguments))
        finally:
            subprocess.run([sys.executable, "-m", "ftmon.tui.cli", "kill", "--yes", run.id], stdout=subprocess.DEVNULL)
        report(blocks, steps_of(run), targets)


def alternate(run: RunDir, targets: list[str], port: int, arguments: argparse.Namespace) -> Iterator[Block]:
    with exporting(run, targets, port) as exporters:
        for index in range(arguments.blocks):
            on = index % 4 in (0, 3)
            for process in family(list(exporters.values())):
                process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            time.sleep(SETTLE_SECONDS)
            yield measure(run, on, arguments.seconds, exporters)


def report(blocks: list[Block], steps: list[Step], targets: list[str]) -> None:
    found = [(block.on, figures(block, steps)) for block in blocks]
    for on, row in found:
        print("on " if on else "off", json.dumps({name: round(value, 5) for name, value in row.items()}))
    pairs = [
        (one, other) if on else (other, one)
        for (on, one), (_, other) in zip(found[::2], found[1::2], strict=False)
        if not math.isnan(one["step"] + other["step"])
    ]
    print(f"targets: {', '.join(targets)}; load {os.getloadavg()[0]:.1f}; {len(pairs)} pairs of blocks; on / off:")
    for name in ("step", "training_cpu", "hub_cpu"):
        print(f"  {name}: {ratio([(on[name], off[name]) for on, off in pairs])}")
    mean, low, high = interval([on["share"] for on, _ in pairs])
    print(f"  share: {mean:.2%} ({low:.2%} to {high:.2%}) of the CPU time of {os.cpu_count()} cores")
    working = [block for block in blocks if block.on]
    seconds = sum(block.end - block.begin for block in working)
    for name in targets:
        print(f"  {name}: {sum(block.exporters_s[name] for block in working) * 1e3 / seconds:.2f} ms of CPU a second")


if __name__ == "__main__":
    main()
