"""Text of memory findings (spikes, transients of every step, growth, leaks) and of their causes."""

from typing import Any

import msgspec

from ...messages.memory import Cause
from ...text import duration, gib
from ..findings.finding import HIDDEN, Finding, Kind, Shown, from_evidence
from ..words import Words
from . import leak, spike
from .causes import (
    WORDS,
    GrowthFacts,
    LeakFacts,
    Named,
    NumbersCause,
    SpikeFacts,
    StackCause,
    SteadyFacts,
    pattern_of,
    place_of,
)
from .spike import GROWTH_FLOOR

STACKS = 3
FRAMES = 8
OPTIMIZER_STATES = "Adam's moments, or the states of another optimizer"


def _spike(facts: SpikeFacts, finding: Finding) -> Words:
    name, seconds = finding.phase, facts.phase_ms / 1e3
    who = f"rank {finding.rank}" if finding.rank is not None else f"further ranks, such as rank {facts.latest_rank},"
    title = f"{who} {name} +{gib(facts.transient_bytes, 1)} for {duration(seconds)}"
    share = facts.transient_bytes / facts.capacity_bytes if facts.capacity_bytes else 0.0
    peak = "no peak"
    if facts.sets_run_peak:
        peak = "the highest peak of the run so far"
    elif facts.sets_step_peak:
        peak = "the peak of the step"
    of_device = f" ({share:.1%} of the device)" if share else ""
    shape = f" Batch shape {facts.batch_shape}." if facts.batch_shape and name in ("forward", "backward") else ""
    times = len(facts.steps)
    often = f" Seen {times} times or more, last in step {finding.step}." if times > 1 else " Not seen before."
    usual = gib(facts.usual_bytes) if facts.usual_bytes else "nothing"
    cause = _causes(facts.causes) or _common_causes(name, None, facts.measure)
    largest = ", ".join(gib(size) for size in facts.largest_bytes[:3])
    return Words(
        _with_cause(title, facts.causes),
        f"The {_phase(name)} of step {finding.step} took {gib(facts.transient_bytes)}{of_device} more than it kept, "
        f"within {duration(seconds)}; usually it is {usual}. It set {peak}.{shape}{often} {cause}"
        + (f" Its largest single allocations: {largest}." if largest else ""),
    )


def _steady(facts: SteadyFacts, finding: Finding) -> Words:
    name, seconds = finding.phase, facts.phase_ms / 1e3
    share = facts.transient_bytes / facts.capacity_bytes
    peak = ": it makes the peak of the step" if facts.sets_step_peak else ", below the peak of the step"
    cause = _causes(facts.causes) or _common_causes(name, facts.zero_stage, facts.measure)
    return Words(
        _with_cause(f"{name} +{gib(facts.transient_bytes, 1)} for {duration(seconds)} in every step", facts.causes),
        f"Every {_phase(name)} takes {gib(facts.transient_bytes)} ({share:.1%} of the device) more than it keeps, for "
        f"{duration(seconds)}, and gives it back{peak}. {cause}",
    )


def _growth(facts: GrowthFacts, _: Finding) -> Words:
    share = f" ({facts.growth_bytes / facts.capacity_bytes:.1%} of the device)" if facts.capacity_bytes else ""
    freed = f" Gradients of {gib(facts.freed_bytes)} were freed in the same update." if facts.freed_bytes else ""
    return Words(
        f"first optimizer step +{gib(facts.growth_bytes, 1)} that stays: the optimizer's state",
        f"The first optimizer step created {gib(facts.growth_bytes)} a rank{share} that it keeps: {OPTIMIZER_STATES}. "
        "It is not a leak and does not repeat. Later steps need it too: a run whose first step fits, with room for "
        f"transients, keeps fitting.{freed}",
    )


def _leak(facts: LeakFacts, _: Finding) -> Words:
    rate, full = gib(facts.bytes_per_step), facts.full_at_step
    resident = facts.measure == "resident"
    holder = "the host's memory" if resident else "the device"
    end = f"{holder} is full around step {full:,}" if full else "it is unknown when memory is full (no capacity known)"
    plan = f"; the run ends before, at step {facts.ends_at_step:,}" if facts.ends_at_step else ""
    found = f" {_left_behind(facts.cause)}" if facts.cause is not None else ""
    title = f"memory grows {rate} a step"
    if full:
        title = f"memory grows by {gib(facts.bytes_per_step, 1)} a step, full around step {full:,}"
    return Words(
        f"{title}: {facts.place}" if facts.place else title,
        f"At the same point of each step {'the resident set' if resident else 'allocated memory'} of rank "
        f"{facts.latest_rank} is higher: by {rate} a step, {gib(facts.rise_bytes)} in the last {facts.window_steps} "
        f"steps. At this rate {end}{plan}. Usual causes: a loss or an output that is kept with its graph (keep "
        f"loss.item() or loss.detach()), a list or a cache that grows.{found}",
    )


def _spike_evidence(finding: Finding) -> dict[str, Any]:
    facts: SpikeFacts | SteadyFacts = finding.facts
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(facts, causes=()))
    # A cause from the step itself comes before one from another step's stacks.
    for cause in reversed(facts.causes):
        found |= _numbers_evidence(cause) if isinstance(cause, NumbersCause) else _stack_evidence(cause)
    return found


def _leak_evidence(finding: Finding) -> dict[str, Any]:
    facts: LeakFacts = finding.facts
    found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(facts, cause=None))
    cause: Cause | None = facts.cause
    if cause is not None:
        found |= {"leak_bytes": cause.transient_bytes, "cause_step": cause.step, "stacks": _stacks(cause)} | _costs(
            cause
        )
    return found


def size_words(size: int, cause: Cause) -> str:
    """Return a size relative to the model's, such as ``one parameter-size``; empty if it is not a simple multiple."""
    for whole, words in (
        (cause.parameter_bytes, "parameter-size"),
        (cause.trainable * 4, "fp32 copy of what is updated"),
    ):
        for count, number in ((1, "one"), (2, "two"), (3, "three")):
            if whole and abs(size - count * whole) <= 0.05 * count * whole:
                return f"{number} {words}{'s' if count > 1 and words == 'parameter-size' else ''}"
    return ""


def _phase(name: str) -> str:
    return "optimizer step" if name == "optimizer" else f"{name} phase"


def _with_cause(title: str, causes: tuple[NumbersCause | StackCause, ...]) -> str:
    ending = next((WORDS[cause.pattern] for cause in causes if cause.pattern), "")
    return f"{title}: {ending}" if ending else title


def _common_causes(name: str, zero_stage: int | None, measure: str) -> str:
    common = ""
    if name == "optimizer":
        zero = "the copy of the gradients that ZeRO makes for the update, or " if zero_stage else ""
        common = f"Common causes: {zero}foreach temporaries of torch.optim (a fused AdamW takes none). "
    elif name in ("forward", "backward"):
        common = "Common causes: a longer batch, logits in fp32, or a gather of parameters. "
    if measure == "resident":
        return f"{common}Cannot tell which here: allocations on the CPU are not traced."
    return f"{common}The stacks of such a step show which."


def _causes(causes: tuple[NumbersCause | StackCause, ...]) -> str:
    return " ".join(_by_numbers(cause) if isinstance(cause, NumbersCause) else _by_stacks(cause) for cause in causes)


def _by_numbers(cause: NumbersCause) -> str:
    what = {
        "loss_scale_overflow": "the loss scaler skipped this update",
        "checkpoint_saving": "a checkpoint was being saved",
        "longer_batch": f"a batch of {cause.batch_shape} was longer than any before "
        f"({cause.longest_shape} at the most)",
    }[cause.pattern]
    return f"Cause: {what}. Try: {cause.remedy.text}{_saving(cause.saves_bytes)}."


def _by_stacks(found: StackCause) -> str:
    cause, cost = found.cause, _recording_cost(found.cause)
    if found.named is None:
        return (
            f"Cannot tell the cause: step {cause.step}, whose stacks were recorded, took "
            f"{gib(cause.transient_bytes)} only. {cost}"
        )
    if not found.pattern:
        elsewhere = found.named.elsewhere
        where = ": its allocations came from native code" if cause.groups else f": they show none ({cause.note})"
        if elsewhere.where:
            where = f"; most of it, {gib(elsewhere.bytes)}, in {elsewhere.where}"
        return f"Cannot tell the cause by the stacks of step {cause.step}{where}. {cost}"
    remedy = found.remedy
    return (
        f"Cause, by the stacks of step {cause.step}: {_parts(found.named, cause)}. Try: {remedy.text}"
        f"{_saving(remedy.frees_bytes)}. {cost}"
    )


def _parts(named: Named, cause: Cause) -> str:
    """Return ``0.89 of 0.93 GiB in adamw.py:531 _multi_tensor_adamw: foreach temporaries ..., one parameter-size``."""
    found: list[str] = []
    for part in named.parts:
        where = f" in {part.where}" if part.where else ""
        size = size_words(part.bytes, cause)
        of = f" of {gib(named.total)}" if not found else ""
        found.append(f"{gib(part.bytes)}{of}{where}: {WORDS[part.pattern]}{f', {size}' if size else ''}")
    return "; ".join(found)


def _left_behind(cause: Cause) -> str:
    cost = _recording_cost(cause)
    if not cause.groups:
        return f"The steps up to {cause.step}, whose stacks were recorded, left nothing behind. {cost}"
    found = [
        f"{gib(group.bytes)} in {group.count} block{'s' if group.count > 1 else ''} of "
        f"{place_of(group.frames) or 'native code'}"
        for group in cause.groups[:3]
    ]
    return f"Allocated in the steps before step {cause.step} and still held a step later: {'; '.join(found)}. {cost}"


def _recording_cost(cause: Cause) -> str:
    what = f"the {cause.phase} phase" if cause.phase else "the step"
    usual = f" in place of {duration(cause.usual_us * 1e-6)}" if cause.usual_us else ""
    return (
        f"Recording the stacks cost rank {cause.rank} once: {what} took {duration(cause.armed_us * 1e-6)}{usual}, and "
        f"reading them {duration(cause.read_us * 1e-6)} in the background."
    )


def _saving(size: int) -> str:
    return f", which would save {gib(size)}" if size > 0 else ""


def _numbers_evidence(cause: NumbersCause) -> dict[str, Any]:
    saves = cause.saves_bytes or cause.remedy.frees_bytes
    return {"cause_pattern": cause.pattern, "remedy": cause.remedy.text, "saves_bytes": saves}


def _stack_evidence(found: StackCause) -> dict[str, Any]:
    cause, named = found.cause, found.named
    plain: dict[str, Any] = {
        "cause_step": cause.step,
        "cause_rank": cause.rank,
        "cause_transient_bytes": cause.transient_bytes,
        **_costs(cause),
        "stacks": _stacks(cause),
    }
    if named is not None and named.pattern:
        plain |= {
            "cause_pattern": named.pattern,
            "cause_where": named.parts[0].where,
            "cause_bytes": named.parts[0].bytes,
            "cause_total_bytes": named.total,
            "cause_parts": {part.pattern: part.bytes for part in named.parts},
            "remedy": found.remedy.text,
            "saves_bytes": found.remedy.frees_bytes,
        }
    return plain


def _costs(cause: Cause) -> dict[str, int]:
    return {"armed_us": cause.armed_us, "usual_us": cause.usual_us, "read_us": cause.read_us}


def _stacks(cause: Cause) -> list[dict[str, Any]]:
    return [
        {
            "bytes": group.bytes,
            "count": group.count,
            "frames": group.frames[-FRAMES:],
            "pattern": pattern_of(group.frames)[0],
        }
        for group in cause.groups[:STACKS]
    ]


def _above(limit: tuple[float, float]) -> str:
    return f"{limit[0]:g} times the spread, or {limit[1]:.0%} if that is more"


def _floor(least: tuple[int, float]) -> str:
    return f"{least[0] // 2**20} MiB, or {least[1]:.2%} of the memory if that is more"


_SHOWN: dict[str, Shown] = {
    "transient_bytes": Shown("allocated and freed", "bytes"),
    "limit_bytes": Shown("a spike is above", "bytes"),
    "share_of_capacity": Shown("share of capacity", "share"),
    "phase_ms": Shown("duration of the phase", "ms"),
    "sets_step_peak": Shown("sets the step's peak"),
    "sets_run_peak": Shown("sets the run's peak"),
    "measure": Shown("kind of memory"),
    "repeats": Shown("repeats in other steps"),
    "batch_shape": Shown("batch", "shape"),
    "largest_shape": Shown("largest batch before", "shape"),
    "largest_bytes": Shown("largest allocations", "bytes"),
    "latest_rank": Shown("latest on", "rank"),
    "first_steps": Shown("steps checked"),
    "zero_stage": Shown("ZeRO stage"),
    "net_bytes": Shown("net growth of that step", "bytes"),
    "freed_bytes": Shown("gradients freed meanwhile", "bytes"),
    "bytes_by_rank": Shown("growth by rank", "bytes", "rank"),
    "bytes_per_step": Shown("growth per step", "bytes"),
    "bytes_per_step_by_rank": Shown("growth per step by rank", "bytes", "rank"),
    "ends_at_step": Shown("the run ends at step"),
    "window_steps": Shown("measured over", "steps"),
    "block_steps": Shown("compared in blocks of", "steps"),
    "rise_bytes": Shown("rise over that window", "bytes"),
    "level_bytes": Shown("present level", "bytes"),
    "leak_bytes": Shown("left allocated", "bytes"),
    "place": Shown("at"),
    "remedy": Shown("try"),
    "saves_bytes": Shown("would save", "bytes"),
    "armed_us": Shown("phase with stacks recorded", "us"),
    "usual_us": Shown("phase usually", "us"),
    "read_us": Shown("reading the stacks", "us"),
    "cause_pattern": Shown("cause"),
    "cause_where": Shown("in"),
    "cause_rank": Shown("found on", "rank"),
    "cause_step": Shown("found in step"),
    "cause_bytes": Shown("of that cause", "bytes"),
    "cause_total_bytes": Shown("with stacks", "bytes"),
    "cause_transient_bytes": Shown("that step's transient", "bytes"),
    "cause_parts": Shown("causes", "bytes"),
    "bytes": Shown("size", "bytes"),
    "pattern": Shown("cause"),
    "causes": HIDDEN,
}

KINDS = (
    Kind(
        "spike",
        SpikeFacts,
        _spike,
        "spike",
        "recent",
        evidence=_spike_evidence,
        shown=_SHOWN,
        resolved={"calm": "Not seen again in {0} steps."},
        limits={
            "above the usual, optimizer": _above(spike.OPTIMIZER),
            "above the usual, other phases": _above(spike.OTHER_PHASES),
            "and at least, on a GPU": _floor(spike.FLOORS),
            "and at least, on the CPU": _floor(spike.CPU_FLOORS),
            "steps without a spike until it is resolved": str(spike.CALM_STEPS),
        },
        restore=from_evidence(SpikeFacts),
        counted=True,
    ),
    Kind(
        "steady_transient",
        SteadyFacts,
        _steady,
        "spike",
        "steady",
        evidence=_spike_evidence,
        limits={
            "of the device, optimizer": f"{spike.STEADY_SHARE:.1%}, on the CPU {spike.STEADY_SHARE_CPU:.0%}",
            "and at least": gib(spike.STEADY_BYTES),
            "of the device, a phase with the step's peak": f"{spike.STEADY_SHARE_OTHERS:.0%}",
            "steps": str(spike.STEADY_STEPS),
        },
        restore=from_evidence(SteadyFacts),
    ),
    Kind(
        "state_growth",
        GrowthFacts,
        _growth,
        "growth",
        "first-step",
        limits={"growth of the first optimizer step": gib(GROWTH_FLOOR)},
        restore=from_evidence(GrowthFacts),
    ),
    Kind(
        "leak",
        LeakFacts,
        _leak,
        "leak",
        "trend",
        evidence=_leak_evidence,
        resolved={"calm": "It stopped growing by step {0}.", "rank_ended": "The rank has ended."},
        limits={
            "windows": ", ".join(f"{size * leak.LENGTH:,}" for size in leak.SIZES) + " steps",
            "Mann-Kendall's S": f"{leak.SURE} of {leak.LENGTH * (leak.LENGTH - 1) // 2}",
            "rise, on a GPU": _floor(leak.FLOORS),
            "rise, on the CPU": _floor(leak.CPU_FLOORS),
        },
        restore=from_evidence(LeakFacts),
    ),
)
