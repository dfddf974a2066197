"""Splits a rank's step into own work and waiting for others, the figures by which stragglers are found.

Collectives make the wall time of a step equal on all ranks; a slow rank works while the others wait.

On the CPU a phase's own work is its host time without the time inside collectives. Time between phases (``idle``:
logging, Python code of the loop, a batch read without a DataLoader) is work too.

On a GPU, waiting happens on the device, and the host waits for the device wherever the script reads a value. Therefore
device time is used: the time between CUDA events at a phase's ends, including gaps without kernels, minus the time for
which the stream waited for other ranks. If that wait was measured (DDP's reducer: ``PhaseRecord.waited_us``), all
phases count. Otherwise (DeepSpeed, FSDP, a script's own collectives) only the phases before the first collective of the
step count, because they include no waiting; the duration of phases with collectives is an upper bound of the waiting.
"""

import msgspec

from ...messages.telemetry import Step

NOT_WORK = ("init",)
"""Phases outside steps."""
NOT_COMPARED = ("eval", "checkpoint")
"""Steps with one of these phases on any rank are not compared: often one rank runs them and the others wait."""
_SPECIAL = frozenset((*NOT_WORK, *NOT_COMPARED))
BATCH = "batch"
"""Own work in the phase ``data`` outside the dataloader: on a batch, before its forward."""
FRONT = ("idle", "data", "forward")
"""The phases between an update and the backward after it."""


class Work(msgspec.Struct, frozen=True):
    """One step of one rank. Times are microseconds."""

    own: dict[str, int] = {}
    """Its own work, by phase; that of ``data`` is the time in the dataloader, the rest is ``BATCH``."""
    waited: int = 0
    """Time for which it waited for others."""
    measured: bool = True
    """False: ``own`` covers only the phases before the first collective, and ``waited`` is the duration of the phases
    with collectives."""
    wall: int = 0
    """Duration of the whole step, on the same clock as ``own``."""
    micro_steps: int = 1
    tokens: int = 0
    """Tokens of the step, including padding."""
    cpu: int = 0
    """CPU time of the training thread; 0: not measured."""
    comparable: bool = True
    """False: the step has an evaluation or a checkpoint, or work and waiting cannot be separated."""


def work_of(step: Step, device: bool) -> Work:
    """Split a step into own work and waiting."""
    if device:
        return _on_device(step)
    own: dict[str, int] = {}
    within = waited = 0
    comparable = True
    for record in step.phases:
        name = record.name
        if name in _SPECIAL:
            if name in NOT_WORK:
                continue
            comparable = False
        host, inside = record.host_us, record.collective_us
        if inside > host:
            inside = host
        within += host
        waited += inside
        own[name] = own.get(name, 0) + host - inside
    if step.host_us > within:
        own["idle"] = own.get("idle", 0) + step.host_us - within
    _split_data(own, step)
    return Work(own, waited, True, step.host_us, step.micro_steps, step.padded_tokens, step.cpu_us, comparable)


def _on_device(step: Step) -> Work:
    total = step.device_us
    if total is None:
        return Work(comparable=False)
    own: dict[str, int] = {}
    data = idle = None
    front = bound = 0
    comparable, measured, early = True, False, False
    for record in step.phases:  # this runs for every step of every rank
        name, us = record.name, record.device_us or 0
        if name in _SPECIAL:
            if name in NOT_WORK:
                continue
            comparable = False
        if record.waited_us is not None:
            measured = True
        # The beginning of ``data`` has no event of its own: its device time is included in that of ``idle``.
        if name == "data":
            data = record
            front += us
        elif name == "idle":
            idle = record
            front += us
            continue
        else:
            own[name] = us
        if record.collectives:
            if name in FRONT:
                early = True
            else:
                bound += us
    front = max(front, total - sum(own.values()))
    in_data = min(front, data.host_us) if data is not None else 0
    if measured:
        own["data"], own["idle"] = in_data, front - in_data
        _split_data(own, step)
        waited = _subtract_waiting(step, own)
        return Work(own, waited, True, total, step.micro_steps, step.padded_tokens, 0, comparable)
    before = {"data": in_data}
    _split_data(before, step)
    if idle is not None and idle.collectives:
        bound += front - in_data
    else:
        before["idle"] = front - in_data
    if "forward" in own:
        before["forward"] = own["forward"]
    comparable = comparable and not early and bound > 0
    return Work(before, bound, False, total, step.micro_steps, step.padded_tokens, 0, comparable)


def _split_data(own: dict[str, int], step: Step) -> None:
    """Separate the time in the dataloader from the script's own work on the batch."""
    fetch, data = step.fetch_us, own.get("data", 0)
    if fetch is not None and fetch < data:
        own["data"], own[BATCH] = fetch, data - fetch


def _subtract_waiting(step: Step, own: dict[str, int]) -> int:
    """Return how long the device waited for other ranks, us, and subtract that from ``own``."""
    waited = 0
    for record in step.phases:
        if record.waited_us and record.name not in NOT_WORK:
            waited += record.waited_us
            own[record.name] = max(0, own[record.name] - record.waited_us)
    return waited
