"""Figures of one rank over the steps of a run, after its warm-up."""

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from ...messages.telemetry import Hello, PhaseRecord, Step
from ...sweep.rows import PhaseFigures, RankRow
from ..health.recent import MAD_TO_SIGMA

_BLOCKS = 16
"""Number of blocks for the error, because consecutive steps are correlated (clocks, data)."""
RESIDENT_ERROR = 0.01
"""Relative error of the resident set of CPU ranks: the kernel counts in batches, and glibc releases irregularly."""


def figures(
    rank: int, steps: Sequence[Step], warm_up: int, most: int | None = None, hello: Hello | None = None, nvml: int = 0
) -> RankRow:
    """Return a rank's figures.

    Args:
        warm_up: number of first steps to omit.
        most: maximum number of steps that count; None: all that follow.
        nvml: highest NVML memory of its process, bytes; 0: unknown.
    """
    measured = steps[warm_up:] if most is None else steps[warm_up : warm_up + most]
    device = hello.device.name if hello is not None else ""
    if not measured:
        return RankRow(rank, nvml_bytes=nvml, device=device)
    times = [step.training_us / 1e3 for step in measured]
    seconds = sum(times) / 1e3
    names = dict.fromkeys(record.name for step in measured for record in step.phases)
    return RankRow(
        rank,
        steps=len(measured),
        step_ms=statistics.median(times),
        step_ms_low=min(times),
        step_ms_high=max(times),
        step_ms_error=standard_error(times),
        tokens_per_second=sum(step.tokens for step in measured) / seconds if seconds > 0 else 0.0,
        phases={name: _phase([r for step in measured for r in step.phases if r.name == name]) for name in names},
        reserved_peak_bytes=max((record.reserved.peak for step in steps for record in step.phases), default=0),
        nvml_bytes=nvml,
        device=device,
        loss=measured[-1].loss,
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median of a correlated series; 0 for fewer than 3 values.

    The series is divided into up to 16 blocks; the robust scatter of their medians is the error of one block.
    """
    if len(values) < 3:
        return 0.0
    count = min(_BLOCKS, len(values))
    cuts = [round(len(values) * number / count) for number in range(count + 1)]
    blocks = [statistics.median(values[begin:end]) for begin, end in pairwise(cuts)]
    middle = statistics.median(blocks)
    deviation = MAD_TO_SIGMA * statistics.median(abs(block - middle) for block in blocks)
    return deviation * math.sqrt(math.pi / 2) / math.sqrt(len(blocks))


def _phase(records: Sequence[PhaseRecord]) -> PhaseFigures:
    device = [record.device_us / 1e3 for record in records if record.device_us is not None]
    host = [record.host_us / 1e3 for record in records]
    return PhaseFigures(
        allocated_peak_bytes=max(record.allocated.peak for record in records),
        reserved_peak_bytes=max(record.reserved.peak for record in records),
        resident_peak_bytes=max((record.resident.peak for record in records if record.resident), default=0),
        host_ms=statistics.median(host),
        device_ms=statistics.median(device) if device else None,
        ms_error=standard_error(device or host),
    )
