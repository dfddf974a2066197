"""Text of out-of-memory errors: the verdict, and the alert."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...messages.memory import OomKind, OomReport, OomVerdict, Remedy
from ...messages.telemetry import Oom
from ...text import duration, first_line, gib
from ..findings.finding import Finding, Kind, ResolvedWhy, Shown
from ..words import PART_LABELS, Added, Words, stop
from .detector import ALONE, FITTING, OomContext, Released, Uncaught, elements, judge

_REMEDIES_TOLD = 3
_ROOM_NAMED = ("limit", "fragmentation")  # verdicts whose text names the device's free memory
_FIGURES = ("requested_bytes", "device_free_bytes", "device_total_bytes", "allocated_bytes", "reserved_bytes")
_MORE_FIGURES = ("largest_free_bytes", "batch_shape", "largest_shape", "held", "peer_timeout_s")
"""Fields of the report that are evidence."""
_NAMES: dict[OomKind, str] = {
    "fragmentation": "fragmentation",
    "limit": "a limit on this process, not a full device",
    "longer_batch": "activations of a longer or larger batch than any before",
    "activations": "activations",
    "logits": "logits and loss",
    "optimizer_states": "the optimizer's states, created in its first step",
    "optimizer_temporaries": "temporaries of the optimizer step",
    "buckets": "communication and reduction buckets",
    "leak": "a leak",
    "checkpoint": "gathering a checkpoint",
    "outside": "memory outside of PyTorch's allocator",
    "other_process": "another process holds memory of this device",
    "too_large": "simply too large",
    "unknown": "cannot tell why",
}
_MORE: dict[OomKind, str] = {
    "fragmentation": ": enough was free, but not in one piece",
    "leak": ": allocated memory grows from step to step",
}
"""Additions to a verdict's name in its title."""


def _failed_allocation(report: OomReport, _: Finding) -> Words:
    oom = report.oom
    parts = (_numbers(oom), report.verdict.text, _remedy_sentences(report.remedies), _held(oom))
    return Words(
        f"rank {oom.rank} out of memory{_in(oom.phase)}: wanted {gib(oom.requested_bytes)}, "
        f"{gib(oom.device_free_bytes)} free; {_NAMES[report.verdict.kind]}",
        " ".join(filter(None, parts)),
    )


def _uncaught(facts: Uncaught, finding: Finding) -> Words:
    return Words(
        f"rank {finding.rank} out of memory{_in(finding.phase)}: {first_line(facts.error)}",
        f"{stop(first_line(facts.error, 1000))} The script did not catch it and failed in step {finding.step}.",
        "Use a smaller micro-batch with more accumulation, gradient checkpointing, or a higher ZeRO stage.",
    )


def _report_evidence(finding: Finding) -> dict[str, Any]:
    report: OomReport = finding.facts
    oom, verdict = report.oom, report.verdict
    names = ("kind", "setting", "frees_bytes", "bound")
    return {
        "verdict": verdict.kind,
        "sure": verdict.sure,
        "why": verdict.evidence,
        "remedies": [{name: getattr(one, name) for name in names} for one in report.remedies],
        **{name: getattr(oom, name) for name in _FIGURES},
        "reserved_unallocated_bytes": max(0, oom.reserved_bytes - oom.allocated_bytes),
        **{name: getattr(oom, name) for name in _MORE_FIGURES},
        "report": report.path,
        "snapshot": oom.snapshot or oom.snapshot_note,
        "message": oom.message[:2000],
        "stack": oom.stack[-20:],
    }


def explain(oom: Oom, around: OomContext = ALONE) -> OomVerdict:
    """Return the verdict on a failed allocation, with its text."""
    judged = judge(oom, around)
    kind, found = judged.kind, judged.figures
    text = _sentence(kind, oom, found)
    if judged.also:
        text += f" Without {' or '.join(_NAMES[other] for other in judged.also)} it would have fitted too."
    if oom.measure == "cuda" and oom.limit and kind != "limit":
        text += f" The process may use {gib(oom.device_total_bytes)} of the device's memory only ({oom.limit})."
    elif oom.measure == "cuda" and oom.device_free_bytes >= oom.requested_bytes > 0 and kind not in _ROOM_NAMED:
        text += (
            f" The device had {gib(oom.device_free_bytes)} free: a limit on this process, such as "
            "torch.cuda.set_per_process_memory_fraction sets, refused it."
        )
    title = f"{_NAMES[kind]}{_MORE.get(kind, '')}"
    return OomVerdict(kind, title, text, judged.sure, _evidence(oom, found), judged.short_bytes)


def shape_words(shape: Sequence[int]) -> str:
    """Return a batch's shape as text: ``4 x 2048``."""
    return " x ".join(map(str, shape))


def parts_words(parts: dict[str, int], most: int = 5) -> str:
    """Return the largest parts as text: ``activations 31.00 GiB, parameters 15.00 GiB``."""
    order = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{PART_LABELS.get(name, name)} {gib(size)}" for name, size in order[:most] if size > 0)


def _sentence(kind: OomKind, oom: Oom, found: dict[str, int]) -> str:
    asked, free = gib(oom.requested_bytes), gib(oom.device_free_bytes)
    shape = shape_words(oom.batch_shape)
    where = "host" if oom.measure != "cuda" else "device"
    if kind == "fragmentation" and not oom.free_blocks:
        unused = gib(oom.reserved_bytes - oom.allocated_bytes)
        return f"{asked} was requested, and {unused} was reserved but not allocated: enough, if it were in one piece."
    if kind == "fragmentation":
        return (
            f"{asked} was requested and {gib(oom.usable_free_bytes)} of reserved memory was free for it, but the "
            f"largest piece was {gib(oom.largest_free_bytes)}, and the device had {free} more."
        )
    if kind == "limit":
        named = f": {oom.limit}" if oom.limit else "; such as ulimit -v, a control group or vm.overcommit_memory"
        return f"{asked} was requested while the {where} had {free} free. A limit refused it{named}."
    if kind == "longer_batch":
        return (
            f"The batch of {shape} is larger than any of the {oom.steps_done:,} steps before: the largest was "
            f"{shape_words(oom.largest_shape)} in step {oom.largest_shape_step:,}. With this request "
            f"{gib(found.get('excess', 0))} more than the highest peak so far would have been allocated."
        )
    if kind == "activations":
        known = oom.parts.get("activations", 0)
        held = f"Activations saved for the backward pass held {gib(known)} of {gib(oom.allocated_bytes)}. "
        held = held if known else ""
        like = "the first of this process" if not oom.steps_done else "no larger than those before"
        return f"{held}The batch ({shape or 'shape not known'}) is {like}; the phase needs more than was left."
    if kind == "logits":
        size = f", {gib(found['logits'])} in fp32" if "logits" in found else ""
        longer = ""
        if oom.largest_shape and elements(oom.batch_shape) > elements(oom.largest_shape) > 0:
            longer = f" The batch is larger than any before ({shape_words(oom.largest_shape)})."
        words = f" x {oom.vocabulary:,} vocabulary entries" if oom.vocabulary else ""
        return (
            f"It failed at the logits and the loss{f': {shape}{words}{size}' if shape else ''}; forward and backward "
            f"hold several copies of them.{longer}"
        )
    if kind == "optimizer_states":
        come = f" About {gib(found['to_come'])} of them were still missing." if "to_come" in found else ""
        size = f" Adam keeps two numbers for each of {oom.trainable:,} trainable parameters." if oom.trainable else ""
        return f"The first optimizer step creates its states, which stay allocated.{size}{come}"
    if kind == "optimizer_temporaries":
        which = f" ({oom.optimizer})" if oom.optimizer else ""
        size = f": up to one parameter-size, {gib(oom.parameter_bytes)}" if oom.parameter_bytes else ""
        return f"The optimizer step{which} needs memory for temporaries, which it frees at its end{size}."
    if kind == "buckets":
        return "The allocation was for a buffer in which gradients or parameters are gathered for communication."
    if kind == "leak":
        steps = max(1, oom.steps_done - 2)
        return (
            f"Memory at the start of a step has grown by {gib(found.get('leak', 0))} in {steps:,} steps, about "
            f"{gib(found.get('leak', 0) / steps)} a step. Without this growth the request would have fitted."
        )
    if kind == "checkpoint":
        return "It failed while a checkpoint was saved: gathering weights or states takes additional memory."
    if kind == "outside" and not oom.requested_bytes:
        return (
            "The driver refused memory outside PyTorch's allocator (NCCL, a library, pinned memory): "
            f"{oom.message.splitlines()[0][:200] if oom.message else 'no message'}. PyTorch held "
            f"{gib(oom.reserved_bytes)}."
        )
    if kind == "outside":
        size = found.get("outside") or found.get("elsewhere", 0)
        whose = "this process outside of PyTorch's allocator"
        if "outside" not in found:
            whose = (
                "something outside this process's PyTorch (its CUDA context, NCCL, libraries, or other processes; the "
                "owner is not known)"
            )
        return f"{gib(size)} of the device is held by {whose}; PyTorch itself held {gib(oom.reserved_bytes)}."
    if kind == "other_process":
        held = gib(found.get("others", 0))
        return f"Other processes hold {held} of this device; without them the request would have fitted."
    if kind == "too_large":
        if oom.requested_bytes > (oom.capacity_bytes or oom.device_total_bytes):
            return f"This single request, {asked}, is more than the whole {where} has."
        held = parts_words({part: size for part, size in oom.parts.items() if part in FITTING})
        return f"The memory that does not depend on the batch leaves too little{f': {held}' if held else ''}."
    return "The available figures do not identify one cause."


def _in(phase: str) -> str:
    return f" in {phase}" if phase else ""


def _numbers(oom: Oom) -> str:
    host = oom.measure != "cuda"
    shape = f" Batch shape {oom.batch_shape}." if oom.batch_shape else ""
    return (
        f"Tried to allocate {gib(oom.requested_bytes)} in step {oom.step}. Of {gib(oom.device_total_bytes)} the "
        f"{'host' if host else 'device'} has {gib(oom.device_free_bytes)} free; "
        f"{'this process holds' if host else 'PyTorch holds'} {gib(oom.reserved_bytes)}: {gib(oom.allocated_bytes)} "
        f"allocated, {gib(max(0, oom.reserved_bytes - oom.allocated_bytes))} reserved but unallocated.{shape}"
    )


def _remedy_sentences(remedies: list[Remedy]) -> str:
    shown = [f"{number}. {remedy_words(remedy)}" for number, remedy in enumerate(remedies[:_REMEDIES_TOLD], 1)]
    return f"To try, in this order: {' '.join(shown)}" if shown else ""


def remedy_words(remedy: Remedy) -> str:
    """Return a remedy with the bytes that it frees and its setting."""
    frees = f" (frees {remedy.bound} {gib(remedy.frees_bytes)})" if remedy.frees_bytes else ""
    setting = f" {remedy.setting}." if remedy.setting else ""
    return f"{remedy.text}{frees}{setting}".replace("  ", " ")


def _held(oom: Oom) -> str:
    if not oom.held:
        return ""
    until = f" for {duration(oom.hold_seconds)} at most" if oom.hold_seconds else ""
    console = ", 'ftmon console' runs Python in that frame" if oom.console else ""
    return (
        f"The rank is held in the failing frame{until}: 'ftmon release' releases it{console}, 'ftmon kill' ends it. "
        f"Meanwhile {oom.others or 'the state of the other ranks is unknown'}."
    )


def _evidence(oom: Oom, found: dict[str, int]) -> list[str]:
    host = oom.measure != "cuda"
    lines = [
        f"requested {gib(oom.requested_bytes)}; {gib(oom.device_free_bytes)} of "
        f"{gib(oom.capacity_bytes or oom.device_total_bytes)} was free on the {'host' if host else 'device'}",
    ]
    if oom.limit:
        lines.append(f"{oom.limit}; it left {gib(oom.room_bytes)}")
    lines.append(
        f"{gib(oom.allocated_bytes)} allocated of {gib(oom.reserved_bytes)} {'held by malloc' if host else 'reserved'}"
    )
    if oom.free_blocks:
        lines.append(
            f"{gib(oom.reserved_free_bytes)} reserved but free in {oom.free_blocks:,} pieces; for a request like this "
            f"{gib(oom.usable_free_bytes)}, at most {gib(oom.largest_free_bytes)} in one"
        )
    if oom.parts:
        note = f" ({oom.parts_note})" if oom.parts_note else ""
        lines.append(f"allocated were: {parts_words(oom.parts, 10)}{note}")
    if oom.batch_shape:
        before = f"; largest before {shape_words(oom.largest_shape)}" if oom.largest_shape else ""
        lines.append(f"batch {shape_words(oom.batch_shape)}{before}")
    if oom.peak_bytes:
        lines.append(f"highest peak of the {oom.steps_done:,} steps before: {gib(oom.peak_bytes)}")
    if found.get("elsewhere", 0) >= 2**28:
        split = ", ".join(
            f"{gib(found[name])} {words}"
            for name, words in (("others", "by other processes"), ("outside", "by this one (CUDA context, NCCL)"))
            if name in found
        )
        lines.append(
            f"{gib(found['elsewhere'])} of the device held outside of this PyTorch{f': {split}' if split else ''}"
        )
    return lines


_ADDED: dict[type, Callable[[Any], Added]] = {
    Uncaught: lambda facts: Added("uncaught", msgspec.to_builtins(facts), "The script did not catch it and failed."),
    Released: lambda _: Added("let_go", {"held": False}, "It was released."),
}
_RESOLVED: dict[ResolvedWhy, str] = {"caught": "The script caught it and finished step {0}."}
KINDS = (
    Kind(
        "oom",
        OomReport,
        _failed_allocation,
        "oom",
        "allocation",
        evidence=_report_evidence,
        shown={
            "sure": Shown("certain"),
            "why": Shown("because"),
            "remedies": Shown("what to try"),
            "setting": Shown("set"),
            "bound": Shown("the bytes are"),
            "requested_bytes": Shown("asked for", "bytes"),
            "device_free_bytes": Shown("free on the device", "bytes"),
            "device_total_bytes": Shown("memory of the device", "bytes"),
            "reserved_unallocated_bytes": Shown("reserved but free", "bytes"),
            "largest_free_bytes": Shown("largest free block", "bytes"),
            "held": Shown("held at the error"),
            "peer_timeout_s": Shown("other ranks fail after", "s"),
        },
        resolved=_RESOLVED,
        added=_ADDED,
        counted=True,
    ),
    Kind("oom_failure", Uncaught, _uncaught, "oom", "exception", resolved=_RESOLVED, added=_ADDED, counted=True),
)
