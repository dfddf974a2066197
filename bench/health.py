"""False alarms and delays of the health detectors, on synthetic series of losses, norms, scales, data waits and disks.

    python -m bench.health [--runs 200] [--planted 100] [--seed 1] [--kinds NAME ...] [--recordings DIR]

Clean runs of many kinds go through the detectors as a hub would feed them; any finding that is more than information
counts as a false alarm. Planted faults give the share that is found, and the delay. ``--recordings`` feeds
recorded runs (``*.sqlite``) instead, and prints what is found in each.
"""

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.machine import Disks
from ftmon.protocol.analysis.health.monitor import HealthMonitor
from ftmon.protocol.messages.telemetry import (
    Compilation,
    Compiles,
    DataLoaderInfo,
    DeviceInfo,
    DiskSpace,
    Hello,
    PhaseRecord,
    Span,
    Step,
    Update,
    Volume,
)

from .health_curves import CLEAN, FAULTS, Row, goes_flat

GIB = 2**30
ZERO = Span(0, 0, 0)


def step_of(number: int, row: Row, rank: int = 0) -> Step:
    data_ms = row.get("data_ms", 1.0)
    phases = [
        PhaseRecord("data", 0, int(data_ms * 1000), ZERO, ZERO),
        PhaseRecord("forward", 0, 30_000, ZERO, ZERO),
        PhaseRecord("backward", 0, 60_000, ZERO, ZERO),
        PhaseRecord("optimizer", 0, 9_000, ZERO, ZERO),
    ]
    if row.get("rollout"):
        phases.insert(1, PhaseRecord("generate", 0, 50_000, ZERO, ZERO))
    return Step(
        rank,
        number,
        1e9 + number * 0.1,
        int(data_ms * 1000) + 99_000,
        phases,
        loss=row.get("loss"),
        lr=row.get("lr"),
        grad_norm=row.get("grad_norm"),
        loss_scale=row.get("loss_scale"),
        overflow=bool(row.get("overflow", 0)),
        updates=[Update(f"engine {at}", loss=row.get("loss")) for at in range(int(row.get("engines", 0)))],
    )


def hello(rank: int = 0, ranks: int = 1) -> Hello:
    device = DeviceInfo("cpu", 0, "host", 64 * GIB)
    return Hello(rank, rank, ranks, "host", 100 + rank, 7, device, "glibc", 1e9, loader=DataLoaderInfo(0))


def findings(rows: Iterator[Row]) -> Iterator[tuple[int, Finding]]:
    monitor = HealthMonitor()
    monitor.hello(hello())
    for number, row in enumerate(rows, 1):
        for found in monitor.step(step_of(number, row)):
            yield number, found


# Disks.


def clean_disk(r: random.Random) -> Iterator[tuple[float, int]]:
    """A disk of some size: checkpoints are written and old ones removed, logs and caches grow slowly."""
    total = r.choice((50, 200, 2000)) * GIB
    free = int(total * r.uniform(0.2, 0.9))
    every, size, speed = r.uniform(120, 900), int(free * r.uniform(0.01, 0.15)), r.uniform(0.2, 2) * GIB
    keep, kept, written = r.randint(1, 3), 0, 0.0
    log, t, due = r.uniform(0, 2e5), 0.0, every
    while t < 3600:
        t += 2.0
        free -= int(log * 2)
        if t >= due and not written:
            written = float(size)
        if written:
            part = min(written, speed * 2)
            written -= part
            free -= int(part)
            if written <= 0:
                written, due, kept = 0.0, t + every, kept + 1
                if kept > keep:
                    free, kept = free + size, kept - 1
        yield t, free


def filling_disk(r: random.Random, at: float) -> Iterator[tuple[float, int]]:
    rate, t, free = r.uniform(5, 400) * 2**20, 0.0, r.uniform(20, 60) * GIB
    while free > 0:
        t += 2.0
        free -= rate * 2 if t >= at else 2e4
        yield t, max(0, int(free))


def disk_findings(samples: Iterator[tuple[float, int]], total: int) -> Iterator[tuple[float, int, Finding]]:
    disks = Disks()
    for t, free in samples:
        for found in disks.space(DiskSpace("host", 1e9 + t, [Volume("/scratch", "output", free, total)])):
            yield t, free, found


# Printing.


def clean(runs: int, seed: int, wanted: list[str]) -> int:
    print(f"clean runs, {runs} of each kind, 300 to 3,000 steps each")
    print(f"{'kind':24} {'steps':>9} {'false alarms':>12}  of which")
    alarms = 0
    for make in CLEAN:
        if wanted and make.__name__ not in wanted:
            continue
        counted: Counter[str] = Counter()
        told: Counter[str] = Counter()
        steps = 0
        for run in range(runs):
            r = random.Random(f"{seed} {make.__name__} {run}")
            total = r.randint(300, 3000)
            steps += total
            found = [one for _, one in findings(make(r, total))]
            alarming = {one.kind for one in found if one.severity != "info"}
            counted.update(alarming)
            told.update({one.kind for one in found} - alarming)
        alarms += counted.total()
        note = _listed(counted) + (f" (info: {_listed(told)})" if told else "")
        print(f"{make.__name__:24} {steps:9,} {counted.total():12}  {note}", flush=True)
    if not wanted or "compiled" in wanted:
        storms = sum(any(compiled(random.Random(f"{seed} compiled {run}"), 1000, None)) for run in range(runs))
        alarms += storms
        print(f"{'compiled':24} {runs * 1000:9,} {storms:12}", flush=True)
    if wanted and "disk" not in wanted:
        return alarms
    false_disks = sum(
        any(True for _ in disk_findings(clean_disk(random.Random(f"{seed} disk {run}")), 2000 * GIB))
        for run in range(max(1, runs // 4))
    )
    print(f"{'disk':24} {max(1, runs // 4):7} h {false_disks:12}")
    return alarms + false_disks


def _listed(counted: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counted.items())


def compiled(r: random.Random, total: int, at: int | None) -> Iterator[tuple[int, Finding]]:
    """Play what ``torch.compile`` compiled: a few shapes of some functions, and from ``at`` on ever new ones of one."""
    monitor = HealthMonitor()
    monitor.hello(hello())
    few = {r.randint(2, total): f"function {r.randint(1, 20)}" for _ in range(r.randint(0, 12))}
    counted: Counter[str] = Counter()
    every = r.choice((1, 1, 2, 5, 10, 30))
    for number in range(1, total):
        name = few.get(number, "")
        if name and counted[name] >= 3:  # a dynamic shape, an evaluation, an epoch's last batch
            name = ""
        if at is not None and number >= at and (number - at) % every == 0:
            name = "forward"
        if name:
            counted[name] += 1
            one = Compilation(name, number, 0.5, "size mismatch at index 0")
            for found in monitor.handlers()[Compiles](Compiles(0, 1e9 + number, counted.total(), [one])) or []:
                yield number, found
        for found in monitor.step(step_of(number, {})):
            yield number, found


def planted(runs: int, seed: int, kinds: list[str]) -> None:
    print(f"\nplanted faults, {runs} of each kind")
    print(f"{'fault':24} {'found':>7} {'of it info':>10} {'median delay':>13} {'90 %':>6} {'before':>7}")
    for make, wanted in FAULTS:
        if kinds and make.__name__ not in kinds:
            continue
        delays: list[int] = []
        early = told = 0
        for run in range(runs):
            r = random.Random(f"{seed} {make.__name__} {run}")
            at = r.randint(120, 800)
            total = at + (3000 if make is goes_flat else 500)
            found = [(n, f) for n, f in findings(make(r, total, at)) if f.kind in wanted]
            raised = [(n, f) for n, f in found if f.state == "raised"]
            told += bool(found) and all(f.severity == "info" for _, f in found)
            early += any(number < at for number, _ in raised)
            after = [number - at for number, _ in raised if number >= at]
            delays += after[:1]
        print(_found(make.__name__, delays, told, early, runs), flush=True)
    if not kinds or "recompiles" in kinds:
        delays = []
        for run in range(runs):
            r = random.Random(f"{seed} recompiles {run}")
            at = r.randint(120, 800)
            raised = [n for n, f in compiled(r, at + 500, at) if f.state == "raised" and n >= at]
            delays += [raised[0] - at] if raised else []
        print(_found("recompiles", delays, 0, 0, runs), flush=True)
    if kinds and "disk" not in kinds:
        return
    left: list[float] = []
    late = 0
    for run in range(runs):
        r = random.Random(f"{seed} filling {run}")
        first = next(((t, free) for t, free, _ in disk_findings(filling_disk(r, 300.0), 500 * GIB)), None)
        if first is None:
            late += 1
        else:
            left.append(first[1] / GIB)
    print(f"{'disk fills':24} {1 - late / runs:7.1%}  with {statistics.median(left):.1f} GiB left in the median")


def _found(kind: str, delays: list[int], told: int, early: int, runs: int) -> str:
    tenth = sorted(delays)[int(len(delays) * 0.9)] if delays else 0
    middle = statistics.median(delays) if delays else math.nan
    shares = f"{len(delays) / runs:7.1%} {told / runs:10.1%}"
    return f"{kind:24} {shares} {middle:7.0f} steps {tenth:6} {early:7}"


def recorded(folder: Path) -> None:
    from ftmon.protocol.recording.reader import Reader

    for path in sorted(folder.rglob("*.sqlite")):
        reader, monitor, found, seq = Reader(path), HealthMonitor(), Counter[str](), 0
        steps = 0
        while frames := reader.frames(seq, 5_000):
            seq = frames[-1].seq
            for frame in frames:
                if isinstance(frame.message, Hello):
                    monitor.hello(frame.message)
                elif isinstance(frame.message, Step):
                    steps += 1
                    found.update(one.kind for one in monitor.step(frame.message) if one.state == "raised")
        reader.close()
        print(f"{path}: {steps} steps, {dict(found) or 'nothing'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--planted", type=int, help="runs of each fault; half of --runs")
    parser.add_argument("--kinds", nargs="*", default=[], help="only these, clean or planted")
    parser.add_argument("--recordings", type=Path)
    arguments = parser.parse_args()
    if arguments.recordings is not None:
        recorded(arguments.recordings)
        return
    alarms = clean(arguments.runs, arguments.seed, arguments.kinds)
    faults = max(1, arguments.runs // 2) if arguments.planted is None else arguments.planted
    planted(faults, arguments.seed, arguments.kinds)
    print(f"\nfalse alarms in all: {alarms}")


if __name__ == "__main__":
    main()
