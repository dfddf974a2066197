"""Prints a sweep as plain lines: the plan, each run as it ends, the remaining budget."""

from collections.abc import Callable

from ...protocol.analysis.sweep.budget import left
from ...protocol.analysis.sweep.summary import pool
from ...protocol.analysis.sweep.text import (
    aligned,
    budget_text,
    counts_text,
    goal_text,
    left_text,
    predicted_text,
    result_lines,
    row_text,
    settings_text,
    table,
)
from ...protocol.sweep.rows import Ended, Plan, Predicted, Row, Settings
from ...protocol.sweep.store import verdicts
from ...protocol.text import duration, sanitize
from .spec import Spec

ENDS = {
    "finished": "the sweep is done",
    "budget": "the budget ends the sweep",
    "failure": "the sweep ends",
    "interrupted": "interrupted",
    "gpus": "the sweep ends, as its GPUs are not empty",
}


class Lines:
    """Prints a sweep.

    Args:
        spec: the sweep.
        say: prints a line.
    """

    def __init__(self, spec: Spec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._print_raw = say
        self._total = 0
        self._number = 0

    def plan(self, plan: Plan, answered: int, used: float) -> None:
        """Print the planned runs and the budget."""
        spec = self._spec
        self._total = 0 if plan.search is not None and plan.search.goal != "fastest" else len(plan.runs) * plan.repeats
        self._number = answered
        what = f"{len(plan.runs)} configurations" if len(plan.runs) != 1 else "1 configuration"
        if plan.search is not None:
            what = goal_text(plan.search.goal, plan.search.axis) + (f", of {what}" if spec.axes else "")
        repeats = f" x {plan.repeats} repeats" if plan.repeats > 1 else ""
        steps = f"{spec.steps} steps after {spec.warm_up} of warm-up"
        self._print(f"{what}{repeats}, {steps}")
        known = f", {duration(used)} used" if used >= 1 else ""
        self._print(f"budget: {budget_text(plan.budget)}{known}; a run is ended after {duration(plan.timeout)}")
        if answered:
            self._print(f"{answered} runs have their rows already" if answered > 1 else "1 run has its row already")
        for note in plan.notes:
            self._print(note)
        predicts = any(run.predicted for run in plan.runs)
        for run in plan.runs:
            words = f": predicted {predicted_text(run.predicted) or 'nothing'}" if predicts else ""
            self._print(f"  {settings_text(run.settings)}{words}")

    def begins(self, settings: Settings, repeat: int, predicted: Predicted | None) -> None:
        """Print the start of a run."""
        self._number += 1
        again = f" (repeat {repeat + 1})" if repeat else ""
        expected = f"; predicted {predicted_text(predicted)}" if predicted else ""
        self._print(f"{self._counter()} {settings_text(settings)}{again} ...{expected}")

    def row(self, row: Row) -> None:
        """Print the outcome of a run."""
        self._print(f"{self._counter()} {settings_text(row.settings)}: {row_text(row)} ({duration(row.seconds)})")

    def progress(self, plan: Plan, used: float, rows: list[Row]) -> None:
        """Print the remaining runs, time and cost, with a budget or a price."""
        if plan.budget.seconds is not None or plan.budget.price_per_hour is not None:
            self._print(left_text(left(plan.budget, used, rows, max(0, self._total - self._number))))

    def end(self, ended: Ended, rows: list[Row], plan: Plan, found: list[str]) -> None:
        """Print the table and the conclusions."""
        if rows:
            for line in aligned(table(pool(rows), plan.columns)):
                self._print(line)
        for line in [*found, *result_lines(rows, plan)]:
            self._print(line)
        missing = f"; {ended.not_run} runs are missing, the same command resumes it" if ended.not_run else ""
        why = f": {ended.text}" if ended.text else ""
        self._print(f"{ENDS[ended.reason]}{why}: {counts_text(verdicts(rows))}{missing}")

    def note(self, text: str) -> None:
        """Print a line of progress."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._print_raw(sanitize(text, 600))

    def _counter(self) -> str:
        return f"[{self._number}/{self._total}]" if self._total else f"[{self._number}]"
