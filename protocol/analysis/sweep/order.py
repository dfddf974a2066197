"""The order in which configurations are run."""

from collections.abc import Sequence

from ...sweep.rows import Planned


def order(runs: Sequence[Planned], *, fail_fast: bool = False) -> list[Planned]:
    """Return configurations with the risky ones last, or first with ``fail_fast``.

    First those predicted to fit, then those without a prediction, then those predicted not to fit; within each by
    predicted peak. Without predictions the order is kept.

    Args:
        fail_fast: whether a failure ends the sweep; then the configurations likeliest to fail come first.
    """
    ordered = sorted(runs, key=_risk)
    return ordered[::-1] if fail_fast and any(run.predicted for run in runs) else ordered


def _risk(run: Planned) -> tuple[int, int]:
    if run.predicted is None:
        return 1, 0
    rank = {True: 0, None: 1, False: 2}[run.predicted.fits]
    return rank, run.predicted.nvml_bytes
