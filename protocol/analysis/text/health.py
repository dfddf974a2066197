"""Text of findings about the training, the GPUs and the disks."""

from collections.abc import Callable
from typing import Any

import msgspec

from ...text import all_ranks, counted, duration, gib, sanitize
from ..findings import Finding
from ..health.checkpoints import CheckpointFacts
from ..health.compiles import CompileFacts
from ..health.data_wait import DataWaitFacts
from ..health.disks import DiskFacts
from ..health.divergence import DivergenceFacts
from ..health.gpus import DeviceFacts, XidFacts
from ..health.gradients import GradientFacts
from ..health.nonfinite import NonFiniteFacts
from ..health.plateau import PlateauFacts
from ..health.scaler import ScalerFacts
from ..health.xids import of_the_program
from .words import Words, number


def _nan(finding: Finding) -> Words:
    facts: NonFiniteFacts = finding.facts
    what = "loss" if finding.kind == "nan_loss" else "gradient norm"
    who = all_ranks(facts.first_ranks)
    value = "NaN" if facts.value == "nan" else "infinite"
    if facts.last_good_step is None:
        good = f"Rank {facts.first_rank} had no finite one before"
    else:
        norm = f", gradient norm {number(facts.last_good_grad_norm)}" if facts.last_good_grad_norm is not None else ""
        loss = number(facts.last_good_loss)
        good = f"The last good step of rank {facts.first_rank} was {facts.last_good_step}: loss {loss}{norm}"
    others = ""
    if facts.ranks_total > 1 and facts.finite_elsewhere:
        others = f" Other ranks were finite in that step, so it came from the batch or device of {who}."
    elif set(finding.ranks) > set(facts.first_ranks):
        others = f" Since then: {all_ranks(finding.ranks)}."
    if finding.kind == "nan_loss":
        remedy = (
            "Stop, and resume from a checkpoint before that step: parameters that are NaN stay NaN. Check that "
            "batch (labels all masked, empty rows, values out of range), lower the learning rate or lengthen its "
            "warm-up, clip gradients; torch.autograd.set_detect_anomaly(True) names the operation."
        )
    else:
        remedy = (
            "Clip gradients, and skip updates whose norm is not finite; check that batch. The usual cause is a "
            "division or a logarithm near zero; torch.autograd.set_detect_anomaly(True) names the operation."
        )
    if facts.precision == "fp16":
        remedy += " bf16 has a larger range than fp16."
    return Words(
        f"{value} {what} on {who} since step {facts.first_step}",
        f"{good}, learning rate {number(facts.lr)}.{others}",
        remedy,
        "It has been finite on every rank since.",
    )


def _divergence(finding: Finding) -> Words:
    facts: DivergenceFacts = finding.facts
    what = "loss has risen to" if finding.severity == "info" else "loss is diverging:"
    if facts.rollouts:
        why = " The run trains on its own rollouts: the loss of a policy or value model may rise as rewards do."
    elif facts.stepped:
        why = " It rose at once and has not fallen since: other data, or a divergence."
    else:
        why = ""
    return Words(
        f"{what} {number(facts.loss)}, was {number(facts.lowest)} at step {facts.lowest_step}",
        f"Since about step {facts.since_step} the loss (median of 8 steps, mean over ranks) has been at "
        f"{number(facts.loss)}, against {number(facts.lowest)} at the lowest of the {facts.steps} steps before; single "
        f"steps scatter by {number(facts.noise)}. The run began at {number(facts.first_loss)}.{why} Learning rate "
        f"{number(facts.lr)}, gradient norm {number(facts.grad_norm)}.",
        f"If the data changed at step {facts.since_step} (curriculum, another task or shard), check the data first; "
        "otherwise resume from a checkpoint before it with a lower learning rate, a longer warm-up or tighter gradient "
        "clipping.",
        "The loss has fallen again.",
    )


def _plateau(finding: Finding) -> Words:
    facts: PlateauFacts = finding.facts
    if facts.never_fell:
        return Words(
            f"the loss has not fallen since the start: {number(facts.loss)}",
            f"After {facts.since_step + facts.steps - 1} steps it is at {number(facts.loss)}; it began at "
            f"{number(facts.first_loss)}. Learning rate {number(facts.lr)}.",
            "Check that the parameters are trained at all (requires_grad, the optimizer's parameter groups, a nonzero "
            "learning rate), and that labels are not all masked, or shuffled relative to their inputs.",
            "The loss falls.",
        )
    return Words(
        f"the loss has been flat at {number(facts.loss)} for {facts.steps} steps",
        f"Since step {facts.since_step} it changed by {number(-facts.improvement)}. Learning rate {number(facts.lr)}, "
        "not in the tail of its schedule.",
        "Evaluate whether more steps are worth their cost; a change of the learning rate can end a plateau.",
        "The loss falls again.",
    )


def _gradient(finding: Finding) -> Words:
    facts: GradientFacts = finding.facts
    rate = f" Loss {number(facts.loss)}, learning rate {number(facts.lr)}."
    if finding.kind == "gradient_explosion":
        return Words(
            f"gradient norm {number(facts.grad_norm)}, usually {number(facts.usual)}",
            f"Since step {facts.since_step} it was {facts.ratio:.0f} times its usual size in {facts.steps} "
            f"steps (before clipping).{rate}",
            "Lower the learning rate or clip gradients at a small multiple of the usual norm; a rise in loss that "
            "follows calls for a checkpoint before that step.",
            "The norm is back to normal.",
        )
    return Words(
        f"gradient norm has collapsed to {number(facts.grad_norm)}, usually {number(facts.usual)}",
        f"Since step {facts.since_step}, for {facts.steps} steps in a row, the parameters have received almost no "
        f"gradient.{rate}",
        "Check for activations that are saturated or all zero, a loss that is detached or fully masked, parameters "
        "frozen during the run, fp16 gradients that underflow (use a loss scale, or bf16).",
        "The norm is back to normal.",
    )


def _scaler(finding: Finding) -> Words:
    facts: ScalerFacts = finding.facts
    scale = f"at a loss scale of {number(facts.loss_scale)}" if facts.loss_scale is not None else "by the loss scaler"
    counted = f"{facts.skipped} of the last {facts.window} updates were skipped {scale}"
    remedy = (
        "Use bf16 where the device has it; otherwise look for the operation that overflows in fp16 (attention scores, "
        "a loss summed over tokens) and compute it in fp32, lower the learning rate, clip gradients."
    )
    if finding.kind == "scaler_floor":
        return Words(
            f"loss scale is at its floor, {number(facts.loss_scale)}, and updates still overflow",
            f"{counted}, {facts.skipped_in_all} in all. The scale cannot go lower: the gradients themselves are "
            "infinite, and the run does not learn.",
            remedy,
            "Updates are applied again.",
        )
    return Words(
        f"the loss scaler skips updates: {facts.skipped} of the last {facts.window}",
        f"{counted}, since step {facts.since_step}, {facts.skipped_in_all} in all. A stable loss scaler skips about "
        "one update in a thousand.",
        remedy,
        "Updates are applied again.",
    )


def _input(finding: Finding) -> Words:
    facts: DataWaitFacts = finding.facts
    of = "" if facts.ranks_bound == facts.ranks_total else f" ({facts.ranks_bound} of {facts.ranks_total} ranks)"
    return Words(
        f"waits for data {facts.share:.0%} of each step{of}",
        f"Waiting for the next batch takes {facts.wait_ms:.0f} of {facts.step_ms:.0f} ms a step (mean of "
        f"{facts.window_steps} steps){_loader(facts)}.",
        _loader_remedy(facts),
        "Data arrives in time again.",
    )


def _loader(facts: DataWaitFacts) -> str:
    loader = facts.loader
    if loader is None:
        return ""
    pinned = "pinned" if loader.pin_memory else "not pinned"
    ahead = f", {loader.prefetch_factor} batches ahead each" if loader.workers else ""
    return f"; its DataLoader has num_workers={loader.workers}{ahead}, memory {pinned}"


_MOST_WORKERS = 64
"""Assumed maximum of useful worker processes on a host whose number of CPUs is unknown."""


def _loader_remedy(facts: DataWaitFacts) -> str:
    loader = facts.loader
    if loader is None:
        return (
            "Load data in advance: a DataLoader with num_workers, or a prefetching thread; or prepare "
            "(tokenize, decode) the data once, before the run."
        )
    parts: list[str] = []
    most = loader.cpus or _MOST_WORKERS
    if not facts.workers_needed:
        pass
    elif facts.workers_needed <= most:
        parts.append(
            f"num_workers={max(facts.workers_needed, loader.workers + 1)} would hide the wait, if workers scale"
        )
    else:
        few = facts.workers_needed <= 2 * most
        needed = f"about {facts.workers_needed}" if few else f"more than {2 * most}"
        cpus = f", but this rank may use {counted(loader.cpus, 'CPU')}" if loader.cpus else ""
        parts.append(
            f"hiding it takes {needed} workers{cpus}: make each sample cheaper (tokenize or decode once, before the "
            "run)"
        )
    if not loader.workers and not parts:
        parts.append("num_workers above 0 loads batches in the background")
    if loader.workers and loader.prefetch_factor < 4:
        parts.append("a higher prefetch_factor evens out samples that differ in cost")
    if loader.workers and not loader.persistent_workers:
        parts.append("persistent_workers=True avoids restarting them at each epoch")
    if facts.cuda and not loader.pin_memory:
        parts.append("pin_memory=True with non_blocking copies overlaps the copy with the step")
    text = "; ".join(parts)
    return f"Try: {text}." if text else "Make each sample cheaper."


def _recompilation(finding: Finding) -> Words:
    facts: CompileFacts = finding.facts
    why = f" Latest reason: {sanitize(facts.reason, 300)}." if facts.reason else ""
    limit = (
        " torch.compile has reached its recompilation limit: it runs uncompiled from now on."
        if facts.limit_reached
        else ""
    )
    return Words(
        f"torch.compile keeps recompiling {facts.function}: {counted(facts.recompiles, 'time')}",
        f"Since step {facts.since_step} compilation took {duration(facts.seconds)}.{why}{limit}",
        "Shapes that change: pad or bucket them, mark the dimension with torch._dynamo.mark_dynamic, or compile with "
        "dynamic=True; Python numbers that change: make them tensors. TORCH_LOGS=recompiles prints every reason.",
        "It has not been recompiled since.",
    )


def _gpu(facts: DeviceFacts) -> str:
    return f"GPU {facts.index} of {facts.host}"


def _throttling(finding: Finding) -> Words:
    facts: DeviceFacts = finding.facts
    others = f" (the host's other GPUs: {facts.others_sm_clock_mhz})" if facts.others_sm_clock_mhz else ""
    figures = [
        *([f"{facts.temperature_c:.0f} °C"] if facts.temperature_c is not None else []),
        *([f"{facts.power_w:.0f} W"] if facts.power_w is not None else []),
        *([f"SM clock {facts.sm_clock_mhz} MHz{others}"] if facts.sm_clock_mhz else []),
    ]
    seen = f": {', '.join(figures)}" if figures else ""
    return Words(
        f"{_gpu(facts)} is throttled: {', '.join(facts.reasons)}",
        f"For most of the last 20 s its clock was reduced while computing{seen}.",
        "Heat: check fans, air flow and neighbouring cards. Power brake or hardware slowdown: check the power supply "
        "and its cables. The whole run is as slow as its slowest GPU.",
        "It is no longer throttled.",
    )


def _memory_errors(finding: Finding) -> Words:
    facts: DeviceFacts = finding.facts
    parts: list[str] = []
    if facts.uncorrected:
        new = f", {facts.new_errors} of them during this run" if facts.new_errors else ", none of them during this run"
        errors = counted(facts.uncorrected, "uncorrectable ECC error")
        parts.append(f"{errors} since its driver was loaded{new}")
    if facts.remap_failed:
        parts.append("a memory row could not be remapped")
    if facts.remap_pending:
        parts.append("a memory row waits to be remapped at the next reset")
    wrong = " Results computed with it cannot be trusted." if facts.new_errors or facts.remap_failed else ""
    return Words(
        f"{_gpu(facts)} has memory errors: {parts[0] if parts else 'none'}",
        f"{'; '.join(parts)}.{wrong}",
        "Drain the host and reset the GPU (nvidia-smi -r); if errors recur, or remapping failed, have it replaced.",
        "NVML reports no errors any more.",
    )


def _xid(finding: Finding) -> Words:
    facts: XidFacts = finding.facts
    where = f"GPU {facts.index} of {facts.host}" if facts.index >= 0 else f"{facts.bus or 'a GPU'} of {facts.host}"
    again = f", {facts.count} times" if facts.count > 1 else ""
    line = f' The driver\'s line: "{sanitize(facts.text, 300)}".' if facts.text else ""
    remedy = (
        "Run with CUDA_LAUNCH_BLOCKING=1, or compute-sanitizer, to find the kernel."
        if of_the_program(facts.code)
        else "Drain the host, reset the GPU (nvidia-smi -r) or reboot, and have it tested (dcgmi diag -r 3)."
    )
    return Words(f"XID {facts.code} on {where}{again}: {facts.meaning}", f"{facts.meaning}.{line}", remedy)


def _disk(finding: Finding) -> Words:
    facts: DiskFacts = finding.facts
    left = f"{gib(facts.free_bytes)} of {gib(facts.total_bytes)} left"
    where = f"{sanitize(facts.path, 120)} ({facts.use}) on {facts.host}"
    if facts.why == "rate" and facts.full_in_s is not None:
        title = f"disk full in {duration(facts.full_in_s)} at {gib(facts.bytes_per_s * 60)}/min: {where}"
    elif facts.why == "next write":
        title = f"the next checkpoint will not fit, {left}: {where}"
    else:
        title = f"disk nearly full, {left}: {where}"
    burst = f" The largest single write was {gib(facts.burst_bytes)}, more than is left." if facts.burst_bytes else ""
    return Words(
        title,
        f"{left}.{burst} Most trainings end if a checkpoint or a log cannot be written.",
        "Free space there, keep fewer checkpoints (save_total_limit), or have them written elsewhere.",
        "There is enough free space again.",
    )


def _checkpoint(finding: Finding) -> Words:
    facts: CheckpointFacts = finding.facts
    error, path = sanitize(facts.error, 120), sanitize(facts.path, 160)
    again = f"{facts.failures} checkpoints in a row" if facts.failures > 1 else "a checkpoint"
    kept = f"The newest complete one is {sanitize(facts.kept, 160)}." if facts.kept else "There is no complete one."
    return Words(
        f"{again} could not be written, at step {facts.step}: {error}",
        f"{path}: {error}. Training continues. {kept} What was trained since then is lost if the run ends now.",
        "Free space on that disk, or make its folder writable again; the next checkpoint is tried as planned.",
        "A later checkpoint is complete.",
    )


WORDS: dict[str, Callable[[Finding], Words]] = {
    "nan_loss": _nan,
    "nan_gradient": _nan,
    "diverging_loss": _divergence,
    "loss_plateau": _plateau,
    "gradient_explosion": _gradient,
    "gradient_collapse": _gradient,
    "scaler_floor": _scaler,
    "scaler_skipping": _scaler,
    "input_bound": _input,
    "recompilation": _recompilation,
    "gpu_throttling": _throttling,
    "gpu_memory_errors": _memory_errors,
    "gpu_xid": _xid,
    "disk_filling": _disk,
    "checkpoint_failed": _checkpoint,
}


def evidence(finding: Finding) -> dict[str, Any]:
    """Return a finding's figures as plain values, with its kind and its remedy."""
    plain: dict[str, Any] = msgspec.to_builtins(finding.facts)
    return {"finding": finding.kind, "remedy": WORDS[finding.kind](finding).remedy, **plain}
