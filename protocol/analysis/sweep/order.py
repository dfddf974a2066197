"""In which order configurations are run."""

from collections.abc import Sequence

from ...sweep.rows import Planned


def order(runs: Sequence[Planned], *, fail_fast: bool = False) -> list[Planned]:
    """Return configurations with the risky ones last, or first with ``fail_fast``.

    By prediction: those that fit, those without one, those that do not fit; among equal ones by predicted peak. Without
    predictions the order stays as it is.

    Args:
        runs: in the order of the sweep file.
        fail_fast: a failure ends the sweep, so what is likeliest to fail comes first.
    """
    ordered = sorted(runs, key=_risk)
    return ordered[::-1] if fail_fast and any(run.predicted for run in runs) else ordered


def _risk(run: Planned) -> tuple[int, int]:
    if run.predicted is None:
        return 1, 0
    rank = {True: 0, None: 1, False: 2}[run.predicted.fits]
    return rank, run.predicted.nvml_bytes
