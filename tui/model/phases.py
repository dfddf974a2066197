"""The shares of a step's phases in its time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ...protocol.messages.telemetry import PHASES, STEP_PHASES, Step

_OWN_SHARE = (*STEP_PHASES, "generate")
SHARE_NAMES: tuple[str, ...] = (*(name for name in PHASES if name in _OWN_SHARE), "wait", "other")
"""The parts of a step, in the order they are drawn; ``wait`` is time inside collective calls."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of a step's time; fractions that add up to 1 (all 0 if unknown)."""

    clock: Literal["device", "host"]
    """The device's clock if every step has device times, else the host's."""
    step_ms: float
    """Mean duration of these steps, milliseconds."""
    parts: dict[str, float]
    """Fraction of the step for each name of ``SHARE_NAMES``. On the device's clock collectives run inside the phases'
    kernels and cannot be separated from them, so ``wait`` is 0 there.
    """


def shares(steps: Iterable[Step]) -> Shares:
    """Return the shares of these steps' phases, in device time if all steps have it, else in host time.

    In host time, time inside collective calls is subtracted from its phase and counted as ``wait``. The record of
    ``init`` in the first step is excluded, because it lies before that step.
    """
    chosen = list(steps)
    clock: Literal["device", "host"] = "device" if chosen and all(_on_device(step) for step in chosen) else "host"
    parts = dict.fromkeys(SHARE_NAMES, 0.0)
    total = 0.0
    for step in chosen:
        known = 0
        for record in step.phases:
            if record.name == "init":
                continue
            wait = 0 if clock == "device" else min(record.collective_us, record.host_us)
            time = record.device_us if clock == "device" and record.device_us is not None else record.host_us
            parts[record.name if record.name in _OWN_SHARE else "other"] += time - wait
            parts["wait"] += wait
            known += time
        whole = max(known, (step.device_us if clock == "device" else step.host_us) or 0)
        parts["other"] += whole - known
        total += whole
    if total:
        parts = {name: time / total for name, time in parts.items()}
    return Shares(clock, total / len(chosen) / 1000 if chosen else 0.0, parts)


def _on_device(step: Step) -> bool:
    within = [record for record in step.phases if record.name != "init"]
    return bool(within) and all(record.device_us is not None for record in within)
