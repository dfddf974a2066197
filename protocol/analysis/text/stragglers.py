"""Text of stragglers."""

from typing import Any

from ...messages.control import Alert
from ...text import duration
from ..findings import Finding
from ..stalls.slow_devices import DeviceFacts
from ..stalls.straggler_detector import SlowRankFacts
from ..stalls.stragglers import EVERYWHERE, StragglerFacts
from ..stalls.work import BATCH
from .words import Words

_AT = {"idle": "between phases", BATCH: "between a batch and its forward", EVERYWHERE: "everywhere"}
_CAUSES = {
    "data": "Its data loading is slow: check its disk, its dataloader workers, and the size of its samples.",
    BATCH: "That is the loop's own work on a batch that the dataloader has delivered: collating, tokenizing, or moving "
    "it to the device.",
    "forward": "Its forward is slow: check clocks and throttle reasons, other processes on its device or cores, and "
    "whether its batches are longer than the others'.",
    "backward": "Its backward is slow: check clocks and throttle reasons, and other processes on its device or cores.",
    "optimizer": "Its optimizer step is slow: check offload (memory bandwidth, cores) and other processes there.",
    "idle": "That is code of the loop outside data, forward, backward and optimizer: logging, Python work, or batches "
    "that are read without a DataLoader.",
    EVERYWHERE: "All its phases are slow alike: check what else runs on its cores or device, a CPU quota, and clocks.",
}
_LONGER_BATCHES = 1.15
_MOST = 0.7


def words(finding: Finding) -> Words:
    """Return the text for a rank that works longer than the others, so that they wait for it."""
    facts: SlowRankFacts = finding.facts
    why = _hindrance(facts.device)
    parts = [title(facts.straggler), why, f"in {facts.line}" if facts.line else ""]
    line = f" It was seen most at {facts.line}." if facts.line else ""
    return Words("; ".join(filter(None, parts)), text(facts.straggler, why) + line)


def evidence(finding: Finding) -> dict[str, Any]:
    """Return the figures as plain values."""
    facts: SlowRankFacts = finding.facts
    device = {"device": _device(facts.device)} if facts.device is not None else {}
    line = {"at": facts.line, "samples": facts.samples} if facts.line else {}
    return {**figures(facts.straggler), **device, **line}


def _hindrance(device: DeviceFacts | None) -> str:
    """Return the reason why a device is slow, as a clause; empty: none found."""
    if device is None or not device.is_slow:
        return ""
    reasons: list[str] = []
    if device.own_reasons:
        reasons.append(f"throttled: {', '.join(device.own_reasons)}")
    if device.is_clocked_lower:
        reasons.append(f"clocked at {device.sm_clock_mhz} MHz, others {device.others_sm_clock_mhz}")
    if device.strangers:
        count = len(device.strangers)
        reasons.append(f"shared with {count} process{'es' if count > 1 else ''} of others")
    return f"its GPU is {'; '.join(reasons)}"


def _device(device: DeviceFacts) -> dict[str, Any]:
    """Return the figures of a device as plain values."""
    found: dict[str, Any] = {
        "device": f"{device.host} GPU {device.index}",
        "throttle_reasons": device.throttle_reasons,
    }
    if device.sm_clock_mhz is not None:
        found |= {"sm_clock_mhz": device.sm_clock_mhz, "others_sm_clock_mhz": device.others_sm_clock_mhz}
    if device.strangers:
        found["other_processes"] = device.strangers[:8]
    if device.temperature_c is not None:
        found["temperature_c"] = device.temperature_c
    return found


def facts(alert: Alert) -> SlowRankFacts:
    """Return facts from an alert's evidence, sufficient to detect that it is resolved."""
    own, others, step = (round(1e3 * float(alert.evidence.get(name, 0))) for name in ("own_ms", "others_ms", "step_ms"))
    at = str(alert.evidence.get("slow_at", EVERYWHERE))
    return SlowRankFacts(StragglerFacts(alert.rank or 0, alert.step or 0, 0, own, others, 0, 0, step, at, {}, {}))


def title(facts: StragglerFacts) -> str:
    """Return the title for lists: rank, phase and the two figures that differ."""
    at = _AT.get(facts.slow_at, f"at {facts.slow_at}")
    mine, theirs = _figures(facts)
    return f"rank {facts.rank} is slow {at}: {duration(mine * 1e-6)} a step, others {duration(theirs * 1e-6)}"


def text(facts: StragglerFacts, why: str = "") -> str:
    """Return the meaning and what to check; ``why`` is a clause with a known cause."""
    step = duration(facts.step_us * 1e-6)
    own, others = duration(facts.own_us * 1e-6), duration(facts.others_us * 1e-6)
    clock = " of device time" if facts.device else ""
    if facts.measured:
        sentence = (
            f"Of a step of {step} rank {facts.rank} works {own}{clock} and waits {duration(facts.waited_us * 1e-6)} "
            f"for other ranks; the others work {others} and wait {duration(facts.others_waited_us * 1e-6)} "
            f"(over {facts.steps} steps)."
        )
    else:
        sentence = (
            f"Of a step of {step} rank {facts.rank} takes {own}{clock} up to its first collective, the others "
            f"{others}; their phases with collectives last {duration(facts.others_waited_us * 1e-6)}, its own "
            f"{duration(facts.waited_us * 1e-6)} (over {facts.steps} steps)."
        )
    return " ".join([sentence, *_causes(facts, why)])


def figures(facts: StragglerFacts) -> dict[str, Any]:
    """Return the figures, milliseconds."""
    found: dict[str, Any] = {
        "own_ms": _ms(facts.own_us),
        "others_ms": _ms(facts.others_us),
        "ratio": round(facts.own_us / max(1, facts.others_us), 3),
        "waited_ms": _ms(facts.waited_us),
        "others_waited_ms": _ms(facts.others_waited_us),
        "step_ms": _ms(facts.step_us),
        "slow_at": facts.slow_at,
        "own_ms_by_phase": {name: _ms(us) for name, us in facts.phases_us.items()},
        "others_ms_by_phase": {name: _ms(us) for name, us in facts.others_phases_us.items()},
        "window_steps": facts.steps,
        "clock": "device" if facts.device else "host",
        "waiting": "measured" if facts.measured else "bounded",
    }
    if facts.tokens and facts.others_tokens:
        found |= {"tokens": facts.tokens, "others_tokens": facts.others_tokens}
    if facts.off_cpu_us or facts.others_off_cpu_us:
        found |= {"off_cpu_ms": _ms(facts.off_cpu_us), "others_off_cpu_ms": _ms(facts.others_off_cpu_us)}
    return found


def _figures(facts: StragglerFacts) -> tuple[int, int]:
    if facts.slow_at == EVERYWHERE:
        return facts.own_us, facts.others_us
    return facts.phases_us.get(facts.slow_at, 0), facts.others_phases_us.get(facts.slow_at, 0)


def _causes(facts: StragglerFacts, why: str) -> list[str]:
    found = [f"{why[0].upper()}{why[1:]}."] if why else []
    if facts.tokens and facts.tokens > _LONGER_BATCHES * facts.others_tokens > 0:
        found.append(f"Its batches hold {facts.tokens} tokens, the others' {facts.others_tokens}.")
    if facts.off_cpu_us - facts.others_off_cpu_us > _MOST * (facts.own_us - facts.others_us):
        found.append(
            f"Its training thread used no CPU for {duration(facts.off_cpu_us * 1e-6)} of that: it slept, or waited for "
            "a disk, the network, a lock or a CPU."
        )
    return found if why else [*found, _CAUSES.get(facts.slow_at, "")]


def _ms(us: int) -> float:
    return round(us / 1e3, 3)
