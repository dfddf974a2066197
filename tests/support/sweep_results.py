"""Results of sweeps over the length of rows, as ``ftmon sweep`` keeps them: for tests of what is made of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.sweep.rows import (
    FORMAT,
    Entry,
    Header,
    PhaseFigures,
    Plan,
    Planned,
    Predicted,
    RankRow,
    Row,
    Writer,
)

NOBODY = ProcessId(1, 1)


def planned(seq: int, peak_bytes: int, *, fits: bool = True) -> Planned:
    """Make a run of the plan with what was predicted of it, in its backward pass."""
    return Planned({"seq": seq}, Predicted(peak_bytes, "backward", peak_bytes, peak_bytes, fits))


def done(run: Planned, ended: float, seconds: float, phases: Iterable[Mapping[str, int]], ms: float = 100.0) -> Row:
    """Make the row of a run that was measured: of each rank, each phase's peak in bytes."""
    ranks = [
        RankRow(rank, 3, ms, ms * 0.99, ms * 1.01, 5e3, {name: PhaseFigures(peak) for name, peak in peaks.items()})
        for rank, peaks in enumerate(phases)
    ]
    return Row(run.settings, "done", ended, seconds, ranks=ranks, predicted=run.predicted)


def out_of_memory(seq: int, ended: float, asked_bytes: int) -> Row:
    """Make the row of a run whose rank 1 ran out of memory in its backward pass."""
    return Row({"seq": seq}, "out-of-memory", ended, 30.0, phase="backward", rank=1, asked_bytes=asked_bytes)


def write_results(
    path: Path,
    name: str,
    runs: list[Planned],
    entries: Iterable[Entry],
    begun: float = 0.0,
    process: ProcessId = NOBODY,
    **plan: Any,
) -> Path:
    """Write a sweep's results: its plan, and what came of it."""
    writer = Writer(path, Header(FORMAT, name, f"{name}.yaml", "a", ["seq"], 3, 2, begun))
    writer.append(Plan(begun, process, runs, **plan))
    for entry in entries:
        writer.append(entry)
    writer.close()
    return writer.path
