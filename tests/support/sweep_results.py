"""Results of sweeps over the length of rows, as ``ftmon sweep`` keeps them: for tests of what is made of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.sweep import rows

NOBODY = ProcessId(1, 1)


def planned(seq: int, peak_bytes: int, *, fits: bool = True) -> rows.Planned:
    """Make a run of the plan with what was predicted of it, in its backward pass."""
    return rows.Planned({"seq": seq}, rows.Predicted(peak_bytes, "backward", peak_bytes, peak_bytes, fits))


def done(
    run: rows.Planned, ended: float, seconds: float, phases: Iterable[Mapping[str, int]], ms: float = 100.0
) -> rows.Row:
    """Make the row of a run that was measured: of each rank, each phase's peak in bytes."""
    ranks = [
        rows.RankRow(
            rank, 3, ms, ms * 0.99, ms * 1.01, 5e3, {name: rows.PhaseFigures(peak) for name, peak in peaks.items()}
        )
        for rank, peaks in enumerate(phases)
    ]
    return rows.Row(run.settings, "done", ended, seconds, ranks=ranks, predicted=run.predicted)


def out_of_memory(seq: int, ended: float, asked_bytes: int) -> rows.Row:
    """Make the row of a run whose rank 1 ran out of memory in its backward pass."""
    return rows.Row({"seq": seq}, "out-of-memory", ended, 30.0, phase="backward", rank=1, asked_bytes=asked_bytes)


def write_results(
    path: Path,
    name: str,
    runs: list[rows.Planned],
    entries: Iterable[rows.Entry],
    begun: float = 0.0,
    process: ProcessId = NOBODY,
    **plan: Any,
) -> Path:
    """Write a sweep's results: its plan, and what came of it."""
    writer = rows.Writer(path, rows.Header(rows.FORMAT, name, f"{name}.yaml", "a", ["seq"], 3, 2, begun))
    writer.append(rows.Plan(begun, process, runs, **plan))
    for entry in entries:
        writer.append(entry)
    writer.close()
    return writer.path
