"""State of a sweep for its screen, rebuilt from the results file whenever the file has grown."""

from pathlib import Path
from typing import NamedTuple

from ...protocol.analysis.sweep import summary
from ...protocol.analysis.sweep.search import Remaining, left
from ...protocol.analysis.sweep.summary import (
    VERDICTS,
    Pooled,
    curve_axis,
    deviation_text,
    failure_text,
    pool,
    settings_text,
    short_names,
    spread_text,
    value_text,
)
from ...protocol.host.process import is_alive
from ...protocol.sweep.rows import Plan, Planned, Predicted, Results, Row, Settings, Started, key_of, read, verdicts
from ...protocol.text import duration, gib

STATES = {
    "finished": "done",
    "budget": "budget used",
    "failure": "failed",
    "interrupted": "interrupted",
    "gpus": "failed",
}


class TableRow(NamedTuple):
    """One configuration as a line of the table."""

    cells: list[str]
    verdict: str  # the row's verdict, `running`, or `planned`
    text: str  # text instead of the figures, for failed and planned configurations


class Dots(NamedTuple):
    """Data of the curve: peaks in bytes by the axis's value."""

    axis: str
    measured: list[tuple[int, float]]
    predicted: list[list[tuple[int, float]]]  # a curve for each combination of the other axes
    failed: list[int]


class SweepModel:
    """One sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: Results | None = None
        self._size = -1

    def refresh(self) -> bool:
        """Read the file again if it has grown; return whether it had, or raise ``ResultsError`` if it is none."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return False
        if size in (0, self._size):  # empty: its sweep has just begun
            return False
        self.results, self._size = read(self.path), size
        return True

    @property
    def rows(self) -> list[Row]:
        """The newest row of each configuration and repeat."""
        return list(self.results.answered().values()) if self.results else []

    @property
    def plan(self) -> Plan | None:
        """The latest session's plan; None before it."""
        return self.results.plan if self.results else None

    @property
    def alive(self) -> bool:
        """Whether the process of the latest session lives."""
        plan, results = self.plan, self.results
        return plan is not None and results is not None and results.end is None and is_alive(plan.process)

    @property
    def state(self) -> str:
        """``predicting``, ``running``, ``killed``, or how the latest session ended."""
        if self.results is None or self.results.plan is None:
            return "predicting"
        if self.results.end is not None:
            return STATES[self.results.end.reason]
        return "running" if self.alive else "killed"

    @property
    def total(self) -> int:
        """Number of planned runs; 0 for a search, whose number of runs is not known in advance."""
        plan = self.plan
        if plan is None or (plan.search is not None and plan.search.goal != "fastest"):
            return 0
        return len(plan.runs) * plan.repeats

    def used_seconds(self, now: float) -> float:
        """Return the wall-clock time of all sessions, including the running one, seconds."""
        if self.results is None:
            return 0.0
        return self.results.seconds_used() + (max(0.0, now - self.results.last_time) if self.alive else 0.0)

    def left(self, now: float) -> Remaining | None:
        """Return the remaining budget; None before the plan."""
        plan = self.plan
        if plan is None:
            return None
        return left(plan.budget, self.used_seconds(now), self.rows, max(0, self.total - len(self.rows)))

    def counts(self) -> str:
        """Return the number of runs by verdict: ``2 out of memory, 1 hung``."""
        found = verdicts(self.rows)
        return ", ".join(f"{count} {VERDICTS[verdict]}" for verdict, count in found.items() if verdict != "done")

    @property
    def axes(self) -> list[str]:
        return self.results.header.axes if self.results else []

    @property
    def _running(self) -> list[Started]:
        """The runs without a row; several if an engine runs them."""
        return self.results.unanswered if self.results is not None and self.alive else []

    @property
    def _wanted(self) -> list[str]:
        return self.plan.columns if self.plan is not None else []

    def heads(self) -> list[str]:
        """Return the table's column heads."""
        names = short_names(self.axes)
        return [*(names[axis] for axis in self.axes), *(self._wanted or ("peak", "predicted", "ms/step", "phase"))]

    def table(self, now: float) -> list[TableRow]:
        """Return a line for each configuration: measured, running, planned."""
        if self.results is None:
            return []
        pooled = {key_of(one.settings): one for one in pool(self.rows)}
        planned = list(self.results.plan.runs) if self.results.plan and self.total else []
        keys = {key_of(run.settings) for run in planned}
        lines = [self._measured(one) for key, one in pooled.items() if key not in keys]
        running = {key_of(one.settings): one for one in self._running}
        planned += [Planned(one.settings) for key, one in running.items() if key not in keys | set(pooled)]
        for run in planned:
            key = key_of(run.settings)
            if key in running:
                since = duration(now - running[key].time)
                words = f"submitted {since} ago" if running[key].job else f"running, {since}"
                lines.append(self._coming(run, "running", words))
            elif key in pooled:
                lines.append(self._measured(pooled[key]))
            else:
                lines.append(self._coming(run, "planned", ""))
        return lines

    def dots(self) -> Dots | None:
        """Return the data to draw over the integer axis; None without one."""
        settings = [row.settings for row in self.rows]
        plan = self.plan
        planned = list(plan.runs) if plan else []
        axis = plan.search.axis if plan and plan.search else ""
        axis = axis or curve_axis([*settings, *(run.settings for run in planned)])
        if not axis:
            return None
        done = [row for row in self.rows if row.verdict == "done"]
        measured = [(x, float(row.peak_bytes)) for row in done if (x := _at(row.settings, axis))]
        expected = {key_of(run.settings): run for run in planned if run.predicted is not None}
        expected |= {key_of(row.settings): Planned(row.settings, row.predicted) for row in self.rows if row.predicted}
        predicted: dict[str, list[tuple[int, float]]] = {}
        for run in () if any(row.on_cpu for row in done) else expected.values():
            others = key_of({name: value for name, value in run.settings.items() if name != axis})
            if run.predicted is not None and (x := _at(run.settings, axis)):
                predicted.setdefault(others, []).append((x, float(run.predicted.peak_bytes)))
        failed = [x for row in self.rows if row.verdict == "out-of-memory" and (x := _at(row.settings, axis))]
        return Dots(axis, sorted(measured), [sorted(curve) for curve in predicted.values()], sorted(failed))

    def _measured(self, one: Pooled) -> TableRow:
        cells = self._cells(one.settings)
        if one.verdict != "done":
            failed = next(row for row in one.rows if row.verdict != "done")
            return TableRow(cells, one.verdict, failure_text(failed))
        if self._wanted:
            return TableRow([*cells, *(summary.pooled_text(one.rows, name) for name in self._wanted)], "done", "")
        peak = one.peak_bytes.median if one.peak_bytes else 0.0
        off = deviation_text(one.predicted, peak, one.on_cpu)
        return TableRow([*cells, gib(peak), off, spread_text(one.step_ms), one.peak_phase], "done", "")

    def _coming(self, run: Planned, verdict: str, text: str) -> TableRow:
        cells = self._cells(run.settings)
        if self._wanted:
            return TableRow([*cells, *("" for _ in self._wanted)], verdict, text)
        return TableRow([*cells, "", _expected(run.predicted), "", ""], verdict, text)

    def _cells(self, settings: Settings) -> list[str]:
        return [value_text(settings.get(axis)) for axis in self.axes]

    def title(self) -> str:
        """Return the sweep's name and the current run."""
        if self.results is None:
            return self.path.name
        running = self._running
        if len(running) > 1:
            return f"{self.results.header.name}: {len(running)} jobs"
        return self.results.header.name + (f": {settings_text(running[0].settings)}" if running else "")


def _at(settings: Settings, axis: str) -> int:
    value = settings.get(axis)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _expected(predicted: Predicted | None) -> str:
    return "" if predicted is None else gib(predicted.peak_bytes) + ("" if predicted.fits is not False else " too much")
