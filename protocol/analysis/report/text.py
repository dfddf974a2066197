"""A comparison as lines."""

from collections.abc import Sequence

from ...text import gib
from ..sweep.text import aligned
from .compare import Comparison, Difference, Measure, StepRange

_JUDGED = {"same": "", "worse": "worse", "better": "better", "cannot tell": "cannot tell: too noisy"}


def measure_text(measure: Measure) -> str:
    """Return a figure with its unit: ``13.40 GiB``, ``398.2 ms``."""
    if measure.unit == "bytes":
        return gib(measure.value)
    if measure.unit == "loss":
        return f"{measure.value:.4f}"
    return f"{measure.value:,.1f} {measure.unit}"


def comparison_lines(found: Comparison, gate: float | None) -> list[str]:
    """Return a comparison: figures, configuration, alerts, and the gate's result."""
    lines = [f"{found.before} -> {found.after}"]
    if found.steps is not None:
        lines.append(f"  {range_text(found.steps)}")
    if found.differences:
        table = [["", "before", "after", "change", "noise", ""], *(_row(one) for one in found.differences)]
        lines += [f"  {line}" for line in aligned(table)]
    if found.missing:
        lines.append(f"  only one has: {', '.join(found.missing)}")
    if found.settings:
        lines.append("  configuration:")
        lines += [f"    {key}: {before} -> {after}" for key, before, after in found.settings]
    if found.alerts:
        lines.append("  alerts:")
        lines += [f"    {kind}: {before} -> {after}" for kind, before, after in found.alerts]
    if gate is not None:
        lines.append(f"  {gate_text(found, gate)}")
    return lines


def range_text(steps: StepRange) -> str:
    """Return the compared steps: ``steps 6 to 120 of both (the first has 400 steps, the second 120)``."""
    words = f"steps {steps.first:,} to {steps.last:,} of both"
    if steps.before_last != steps.after_last:
        words += f" (the first run has {steps.before_last:,} steps, the second {steps.after_last:,})"
    return words + (f"; evaluation after step {steps.evaluation:,}" if steps.evaluation is not None else "")


def gate_text(found: Comparison, gate: float) -> str:
    """Return the gate's result: ``regression: step time +3.4% (gate 3%)``."""
    undecided = f"; cannot tell of {', '.join(found.undecided)}: too noisy" if found.undecided else ""
    limit = f"{gate * 100:g}%"
    if found.regressions:
        return f"regression: {', '.join(found.regressions)} (gate {limit}){undecided}"
    return (
        f"no regression of {limit} found{undecided}" if found.differences else "nothing to compare: no figure in common"
    )


def summary_line(found: Sequence[Comparison], gate: float | None) -> str:
    """Return the result of several comparisons."""
    worse = sum(bool(one.regressions) for one in found)
    unsure = sum(bool(one.undecided) for one in found)
    if gate is None:
        return f"{len(found)} configurations compared"
    words = f"{worse} of {len(found)} regressed" if worse else f"none of {len(found)} regressed"
    return words + (f", {unsure} too noisy to tell" if unsure else "")


def _row(one: Difference) -> list[str]:
    noise = f"±{one.error:.1%}" if one.error else ""
    words = _JUDGED[one.judgement]
    return [one.name, measure_text(one.before), measure_text(one.after), f"{one.change:+.1%}", noise, words]
