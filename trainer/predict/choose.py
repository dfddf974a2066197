"""The choice of a configuration: candidates, their figures from fitted pieces of a dry run, and their ranking.

A dry run of one candidate yields the parts of its memory and its work at two sizes of the micro-batch. Memory and work
of other candidates follow from these parts: what grows with the micro-batch is linear in it, and what ZeRO, offload and
recomputing change are known shares of the parameters. The best candidates are then run themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ...protocol.analysis.estimates.time import Communication, Operation, Work, combined, step_time
from ...protocol.errors import ConfigError
from ...protocol.host.machine import Gpu
from ...protocol.text import gib
from .deepspeed_file import LIVE_PARAMETERS

if TYPE_CHECKING:
    from .ranks import Outcome, RankRun
    from .result import Rank

MOST_RUNS = 3  # Full dry runs of a choice
MARGIN = 0.92  # Share of PyTorch's memory that a chosen configuration may need: predictions are up to 6 % off
_ALIKE = 0.01  # Share of the highest speed within which the candidate with the least memory is chosen
_STAGE_3 = 0.95  # Share of its predicted speed with which ZeRO 3 competes: its hooks depend most on the host
LORA_RANK = 16
_STATES = ("parameters", "gradients", "optimizer_states", "master_copies", "partitions")
_AGAIN = 1.5  # Bytes gathered in a micro-step, per byte of the weights, from which most are gathered twice
_GRADIENT_BYTES = 4  # Of a gradient that is accumulated and reduced (``zero.grad_accum_dtype``)
_STATE_BYTES = 12  # Of a master weight and AdamW's two running averages
_RECOMPUTED = 0.75  # Share of a layer's forward pass that checkpointing repeats: all before its last matrix product
_MODULES = 9  # Modules of a decoder layer with parameters: seven projections, two norms; adapters have two each
_FETCHES, _CALLS, _CALLS_OF_RANK = 3, 11, 2
"""Hooks of ZeRO-3 and operations of the host per module and micro-step, the last for each rank, as counted in dry runs
of 2 to 16 ranks."""
_CALLS_REDUCED, _CALLS_UPDATED = 8, 5
"""Operations of the host per module at stages 2 and 3: at stage 2 those of a micro-step, at both of an update."""
_COPIED = {1: (10, 0, -4, 10), 2: (21, 18, 0, 14), 3: (20, 12, 0, 22)}
"""Bytes that kernels move for a parameter's gradient by stage: in a micro-step for the whole and for a rank's share,
then beside micro-steps. Stage 1 adds it to a sum (the first one is written); the others cast it to fp32, divide it, and
copy it into buckets and back (DeepSpeed's ``stage_1_and_2.py``, ``stage3.py``). From dry runs of 2 and of 8 ranks."""
_GATHERED = 2  # Bytes that kernels move for a gathered byte, and for a byte of a rank's share of it
_OFFLOADED_COPIED, _OFFLOADED_HOST = 6, 28
"""Bytes per parameter of a rank's share that an offloaded update copies, and reads and writes on the host."""


class Candidate(NamedTuple):
    """Settings that are chosen."""

    stage: int
    checkpointing: str
    offload: bool
    lora_rank: int
    micro_batch: int
    accumulation: int
    quantized: bool = False  # Whether the base is held in 4 bits (QLoRA)

    @property
    def kind(self) -> tuple[int, str, bool, int, bool]:
        """All but the division of the batch."""
        return (*self[:4], self.quantized)

    def words(self) -> list[str]:
        """Return the settings in words, without those of a plain training."""
        adapters = f"{'QLoRA' if self.quantized else 'LoRA'} of rank {self.lora_rank}"
        found = [adapters if self.lora_rank else "all weights", f"ZeRO {self.stage}"]
        found += ["offloaded states"] if self.offload else []
        found += [f"{self.checkpointing} recomputed"] if self.checkpointing != "none" else []
        return [*found, f"micro-batch {self.micro_batch} x {self.accumulation}"]

    def assignments(self) -> list[str]:
        """Return the settings as ``key.sub=value``."""
        return [f"{key}={value}" for key, value in self.settings().items()]

    def settings(self) -> dict[str, str]:
        """Return the settings by dotted path, as they are written in YAML."""
        found = {
            "zero.stage": str(self.stage),
            "zero.offload_optimizer": str(self.offload).lower(),
            "model.gradient_checkpointing": self.checkpointing,
            "lora.rank": str(self.lora_rank),
            "training.micro_batch": str(self.micro_batch),
            "training.grad_accumulation": str(self.accumulation),
        }
        return found | ({"model.quantization": "nf4"} if self.quantized else {})


class Space(msgspec.Struct, frozen=True):
    """What may be chosen, and for which machine."""

    gpu: Gpu
    ranks: int
    capacity_bytes: int  # What PyTorch may reserve on a GPU
    rows: int  # Rows of a step over all ranks
    sequence_length: int
    host_bytes: int = 0  # Memory of the host for offloaded states; 0: not known, so that nothing is offloaded
    stages: tuple[int, ...] = ()  # Stages of a fixed setting; empty: those that differ on so many ranks
    checkpointing: tuple[str, ...] = ("none", "layers")
    offload: tuple[bool, ...] = (False, True)
    lora_ranks: tuple[int, ...] = (0, LORA_RANK)
    quantized: tuple[bool, ...] = (False,)  # Whether the base under adapters may be held in 4 bits
    micro_batches: tuple[int, ...] = ()
    accumulation: int = 0  # A fixed one; 0: what makes ``rows``

    @property
    def hosts(self) -> int:
        """Number of hosts, of eight GPUs."""
        return -(-self.ranks // 8)

    @property
    def usable_bytes(self) -> int:
        """What a chosen configuration may need on a GPU."""
        return round(MARGIN * self.capacity_bytes)


def candidates(space: Space) -> list[Candidate]:
    """Return all candidates."""
    of_rank = max(1, round(space.rows / space.ranks))
    powers = tuple(1 << power for power in range(of_rank.bit_length()))
    found: list[Candidate] = []
    kinds = [(lora, held) for lora in space.lora_ranks for held in (space.quantized if lora else (False,))]
    batches = product(kinds, space.offload, space.checkpointing, space.micro_batches or powers)
    for (lora, quantized), offload, checkpointing, micro_batch in batches:
        if offload and (lora or not space.host_bytes) and space.offload != (True,):
            continue
        accumulation = space.accumulation or max(1, round(of_rank / micro_batch))
        for stage in space.stages or _stages(space.ranks, offload):
            if stage < 3 or not quantized:
                found.append(Candidate(stage, checkpointing, offload, lora, micro_batch, accumulation, quantized))
    return found


def _stages(ranks: int, offload: bool) -> tuple[int, ...]:
    """Return the stages that differ: on one rank nothing is partitioned, and offloaded gradients need stage 2."""
    if ranks == 1:
        return (2,) if offload else (1,)
    return (2, 3) if offload else (1, 2, 3)


class FitPoint(msgspec.Struct, frozen=True):
    """Figures of a dry run at one size of the micro-batch."""

    tokens: int
    parts: dict[str, dict[str, int]]  # Composition of the allocated peak by phase
    needed_bytes: int
    micro_step: Work
    rest: Work  # Work of a step beside its micro-steps


class Fit(msgspec.Struct, frozen=True):
    """Pieces of one dry run, from which the figures of other candidates are made."""

    run: Candidate
    parameters: int
    trainable: int
    layers: int
    hidden: int
    largest_layer: int
    weight_bytes: int
    first: FitPoint
    second: FitPoint
    state_bytes: float = _STATE_BYTES


class Estimate(NamedTuple):
    """Figures of a candidate."""

    candidate: Candidate
    needed_bytes: int  # Memory that PyTorch must be able to reserve on a GPU
    step_seconds: float
    tokens_per_second: float  # Of all ranks
    exact: bool = False  # Whether the candidate itself was run dry


def fit_of(run: Candidate, of: "RankRun", points: Sequence[tuple[int, "Outcome"]]) -> Fit:
    """Return the pieces of a rank's dry run at one or two numbers of tokens in a micro-batch.

    With one, the second has twice the tokens: activations, logits and the work on them are taken to be proportional.
    """
    made = of.made
    assert made is not None
    found = [_fit_point(tokens, outcome, run.accumulation) for tokens, outcome in points]
    sizes = (of.parameters, of.trainable, made.layers, made.hidden, made.largest_layer, made.weight_bytes)
    return Fit(run, *sizes, found[0], found[1] if len(found) > 1 else _doubled(found[0], points[0][1]))


def _fit_point(tokens: int, outcome: "Outcome", accumulation: int) -> FitPoint:
    parts = {name: phase.parts for name, phase in outcome.rank.phases.items() if phase.parts}
    micro_step, rest = outcome.micro_step, Work([], [])
    if micro_step.operations:
        rest = combined([(outcome.work, 1), (micro_step, -accumulation)])
    else:  # no micro-step lies between the first and the last
        updates = [one for one in outcome.work.operations if one.memory == "update"]
        others = [one for one in outcome.work.operations if one.memory != "update"]
        micro_step = combined([(msgspec.structs.replace(outcome.work, operations=others), Fraction(1, accumulation))])
        rest = Work(updates, [])
    return FitPoint(tokens, parts, outcome.rank.needed_bytes, micro_step, rest)


def _doubled(point: FitPoint, outcome: "Outcome") -> FitPoint:
    parts: dict[str, dict[str, int]] = {}
    for name, sizes in point.parts.items():
        logits = outcome.rank.phases[name].logits
        parts[name] = {
            part: size + (size if part == "activations" else logits.get(part, 0)) for part, size in sizes.items()
        }
    # Beside compiled layers, most of what has no arithmetic is the reduction of gradients.
    compiled = any(one.memory == "fused" for one in point.micro_step.operations)
    grows = {one: one.memory == "fused" or not (compiled or one.flops) for one in point.micro_step.operations}
    operations = [
        msgspec.structs.replace(one, flops=2 * one.flops, bytes_moved=one.bytes_moved * (1 + more))
        for one, more in grows.items()
    ]
    micro_step = msgspec.structs.replace(point.micro_step, operations=operations)
    grown = sum(
        max(sum(one.values()) for one in each.values()) * sign for each, sign in ((parts, 1), (point.parts, -1))
    )
    return FitPoint(2 * point.tokens, parts, point.needed_bytes + grown, micro_step, point.rest)


def gathered_bytes(weight_bytes: int, run: "RankRun", rank: "Rank", ranks: int) -> dict[str, float]:
    """Return the parameters that ZeRO-3 holds at each phase's peak beside a rank's share and those of one layer."""
    made = run.made
    assert made is not None
    share = weight_bytes * run.parameters / ranks
    one = weight_bytes * _largest(made.largest_layer, run.parameters, made.layers)
    peaks = {name: phase.parts for name, phase in rank.phases.items() if phase.parts}
    return {name: max(0.0, parts.get("parameters", 0) - share - one) for name, parts in peaks.items()}


def _largest(module: int, parameters: int, layers: int) -> float:
    """Return the parameters of the largest layer: an embedding, or one of equal decoder layers."""
    return max(module, (parameters - 2 * module) / max(1, layers))


def gathers_again(fit: Fit) -> bool:
    """Return whether ZeRO-3 gathers most parameters for the backward pass again, as there are too many to be kept."""
    sent = sum(one.size_bytes * one.count for one in fit.first.micro_step.communications if one.kind == "all_gather")
    return sent > _AGAIN * fit.weight_bytes * fit.parameters


def with_parameters(fit: Fit, ranks: int, on_host: bool, released: bool) -> Fit:
    """Return a ZeRO-3 run's pieces with a rank's share of the parameters on the host, or none kept gathered.

    A share on the host is copied to the GPU for each gather, and back after the update. If each is released after its
    use, a layer's are gathered at a time, and all of them twice in a micro-step.
    """
    weights = fit.weight_bytes * fit.parameters
    share = weights / ranks
    largest = fit.weight_bytes * _largest(fit.largest_layer, fit.parameters, fit.layers)

    def held(sizes: dict[str, int]) -> dict[str, int]:
        kept = sizes.get("parameters", 0)
        if released:
            kept = min(kept, share + largest)
        return sizes | {"parameters": round(max(0.0, kept - share) if on_host else kept)}

    def changed(point: FitPoint) -> FitPoint:
        step, rest = point.micro_step, point.rest
        sent = sum(one.size_bytes * one.count for one in step.communications if one.kind == "all_gather")
        if released and sent:
            again = max(1.0, 2 * weights / sent)
            gathers = [
                msgspec.structs.replace(one, size_bytes=one.size_bytes * (again if one.kind == "all_gather" else 1))
                for one in step.communications
            ]
            step, sent = msgspec.structs.replace(step, communications=gathers), sent * again
        if on_host:
            step = msgspec.structs.replace(step, transfer_bytes=round(step.transfer_bytes + sent / ranks))
            rest = msgspec.structs.replace(rest, transfer_bytes=round(rest.transfer_bytes + share))
        parts = {name: held(sizes) for name, sizes in point.parts.items()}
        return msgspec.structs.replace(point, parts=parts, micro_step=step, rest=rest)

    return msgspec.structs.replace(fit, first=changed(fit.first), second=changed(fit.second))


def highest_bytes(fit: Fit) -> tuple[int, int]:
    """Return the highest allocated memory of the run whose pieces these are, and the parameters in it."""
    return max((sum(sizes.values()), sizes.get("parameters", 0)) for sizes in fit.first.parts.values())


def estimate(fit: Fit, candidate: Candidate, space: Space) -> Estimate:
    """Return a candidate's figures from the pieces of a dry run of the same kind of training (adapters or not)."""
    tokens = candidate.micro_batch * space.sequence_length
    fragmented = max(1.0, fit.second.needed_bytes / max(sum(one.values()) for one in fit.second.parts.values()))
    seconds = step_time(_work(fit, candidate, space.ranks, tokens), space.gpu, space.hosts).total.value
    needed = round(allocated_bytes(fit, candidate, space) * fragmented)
    return Estimate(candidate, needed, seconds, _speed(candidate, space, seconds))


def allocated_bytes(fit: Fit, candidate: Candidate, space: Space) -> float:
    """Return a candidate's highest allocated memory from the pieces of a dry run."""
    tokens = candidate.micro_batch * space.sequence_length
    return max(_phase_bytes(fit, candidate, space.ranks, phase, tokens) for phase in fit.first.parts)


def _speed(candidate: Candidate, space: Space, seconds: float) -> float:
    return candidate.micro_batch * candidate.accumulation * space.ranks * space.sequence_length / seconds


def _line(fit: Fit, tokens: int) -> tuple[float, float]:
    """Return the factors of the two points with which their sum is the value on the line through them."""
    share = (tokens - fit.first.tokens) / (fit.second.tokens - fit.first.tokens)
    return 1 - share, share


def _phase_bytes(fit: Fit, candidate: Candidate, ranks: int, phase: str, tokens: int) -> float:
    first, second = _line(fit, tokens)
    parts = fit.first.parts[phase]
    sizes = {
        part: max(0.0, first * size + second * fit.second.parts[phase].get(part, 0))
        for part, size in parts.items()
        if part not in _STATES
    }
    if candidate.checkpointing == "layers" and fit.run.checkpointing == "none" and "activations" in sizes:
        kept = sizes["activations"]
        inputs = float(fit.weight_bytes * fit.layers * fit.hidden * tokens)
        sizes["activations"] = min(kept, inputs + kept / max(1, fit.layers))
    weights = parts.get("parameters", 0) if candidate.quantized else fit.weight_bytes * fit.parameters
    return sum(sizes.values()) + _states_bytes(fit, candidate, ranks, phase, weights, sizes.get("activations", 0.0))


def _states_bytes(fit: Fit, candidate: Candidate, ranks: int, phase: str, weights: float, activations: float) -> float:
    """Return weights, gradients and optimizer states of the rank with the most in a phase, by ZeRO's stage."""
    stage = candidate.stage
    size = weights if stage < 3 else weights / ranks + fit.weight_bytes * min(LIVE_PARAMETERS, fit.parameters)
    size += 0 if candidate.offload else fit.state_bytes * fit.trainable / ranks
    gradients = _GRADIENT_BYTES * fit.trainable / (1 if stage < 2 else ranks)
    if stage == 2 and candidate.accumulation == 1 and phase != "optimizer":
        # The only micro-step. The last rank's partition fills first, while a rank's share of the activations is freed.
        beside = max(0.0, gradients - activations / ranks)
        size += beside if phase == "backward" and ranks > 1 and not candidate.offload else 0
    elif not (candidate.offload and stage == 3):
        size += gradients * (2 if stage == 3 and phase == "optimizer" else 1)
    whole = min(fit.largest_layer, fit.trainable) * fit.weight_bytes  # before it is reduced or added
    return size + (whole if phase == "backward" else 0)


def _work(fit: Fit, candidate: Candidate, ranks: int, tokens: int) -> Work:
    first, second = _line(fit, tokens)
    micro_step = combined([(fit.first.micro_step, first), (fit.second.micro_step, second)])
    rest = fit.first.rest
    if candidate.checkpointing == "layers" and fit.run.checkpointing == "none":
        flops = sum(one.flops * one.count for one in micro_step.operations) or 1.0
        inside = max(0, fit.parameters - fit.largest_layer)
        again = _without_transfers(micro_step, fetches=micro_step.fetches)
        micro_step = combined([(micro_step, 1), (again, 2.0 * inside * tokens * _RECOMPUTED / flops)])
    if (candidate.stage, candidate.offload) != (fit.run.stage, fit.run.offload):
        micro_step = _with_hooks(fit, candidate, ranks, _without_transfers(micro_step))
        before = _without_transfers(_reduced(fit, fit.run, ranks))
        micro_step = combined([(micro_step, 1), (_reduced(fit, candidate, ranks), 1), (before, -1)])
        before = _without_transfers(_updated(fit, fit.run, ranks))
        rest = combined([(_without_transfers(rest), 1), (_updated(fit, candidate, ranks), 1), (before, -1)])
    return combined([(micro_step, candidate.accumulation), (rest, 1)])


def _without_transfers(work: Work, fetches: float = 0) -> Work:
    return msgspec.structs.replace(work, communications=[], transfer_bytes=0, host_bytes=0, fetches=fetches)


def _with_hooks(fit: Fit, candidate: Candidate, ranks: int, micro_step: Work) -> Work:
    """Return a micro-step with the host's work for ZeRO-3, in place of that of the stage that was run."""
    tensors = _MODULES * (3 if candidate.lora_rank else 1)
    times = fit.layers * (1.4 if candidate.checkpointing == "layers" else 1)
    sign = (candidate.stage == 3) - (fit.run.stage == 3)
    # A compiled layer's are gathered at once, for the forward pass and the backward pass (``Work.fetches``).
    of_layer = 2 * (1 + tensors / 5) if micro_step.graphs else _FETCHES * tensors
    fetches = of_layer * times if candidate.stage == 3 else 0
    each = (_CALLS + _CALLS_OF_RANK * ranks) * _MODULES * (1.5 if candidate.lora_rank else 1)
    calls = max(0, micro_step.calls + sign * round(each * times))
    return msgspec.structs.replace(micro_step, fetches=fetches, calls=calls)


def _reduced(fit: Fit, candidate: Candidate, ranks: int) -> Work:
    """Return the collectives of a micro-step, and the work of copying what they send."""
    gradients, weights = _GRADIENT_BYTES * fit.trainable, fit.weight_bytes * fit.parameters
    per_layer = max(1, fit.layers)
    if ranks == 1:
        return Work([], [])
    whole, share, *_ = _COPIED[max(1, candidate.stage)]
    copied = fit.trainable * (whole + share / ranks)
    calls = _CALLS_REDUCED * _MODULES * per_layer if candidate.stage == 2 else 0
    if candidate.stage < 2:
        return Work([Operation(0.0, copied)], [])
    if candidate.stage == 2:
        sent = [Communication("all_reduce", gradients / per_layer, ranks, True, per_layer)]
        return Work([Operation(0.0, copied)], sent, calls)
    # Those that are not kept gathered, again for the backward pass.
    gathered = weights * (1 + max(0.0, 1 - LIVE_PARAMETERS / fit.parameters))
    copied += _GATHERED * gathered * (1 + 1 / ranks)
    gathers = Communication("all_gather", gathered / (2 * per_layer), ranks, True, 2 * per_layer)
    scatters = Communication("reduce_scatter", gradients / per_layer, ranks, True, per_layer)
    return Work([Operation(0.0, copied)], [gathers, scatters])


def _updated(fit: Fit, candidate: Candidate, ranks: int) -> Work:
    """Return the collectives around an update, and what an offloaded one moves."""
    share = fit.trainable // ranks
    moved = (_OFFLOADED_COPIED * share, _OFFLOADED_HOST * share) if candidate.offload else (0, 0)
    sent: list[Communication] = []
    operations: list[Operation] = []
    if ranks > 1:
        *_, whole, part = _COPIED[max(1, candidate.stage)]
        operations.append(Operation(0.0, fit.trainable * (whole + part / ranks)))
    calls = _CALLS_UPDATED * _MODULES * fit.layers if ranks > 1 and candidate.stage > 1 else 0
    if ranks > 1 and candidate.stage < 2:
        sent.append(Communication("reduce_scatter", _GRADIENT_BYTES * fit.trainable, ranks))  # ``recipe/engine.py``
    if ranks > 1 and candidate.stage < 3:
        sent.append(Communication("all_gather", fit.weight_bytes * fit.trainable, ranks))
    return Work(operations, sent, calls, *moved)


def order(found: Sequence[Estimate], space: Space) -> list[Estimate]:
    """Return the candidates that fit, best first.

    All weights before adapters, a base as it is before one in 4 bits, states on the GPU before offloaded ones, then by
    speed, ZeRO 3 only where it is clearly faster; of those that are about as fast, the one with the least memory. An
    offloaded candidate fits if the host has memory for its states.
    """

    def speed(one: Estimate) -> float:
        return one.tokens_per_second * (_STAGE_3 if one.candidate.stage == 3 else 1.0)

    waiting = sorted((one for one in found if fits(one, space)), key=lambda one: (_tier(one), -speed(one)))
    result: list[Estimate] = []
    while waiting:
        tier, fastest = _tier(waiting[0]), speed(waiting[0])
        alike = [one for one in waiting if _tier(one) == tier and speed(one) >= (1 - _ALIKE) * fastest]
        best = min(alike, key=lambda one: one.needed_bytes)
        waiting.remove(best)
        result.append(best)
    return result


def fits(one: Estimate, space: Space) -> bool:
    """Return whether a candidate fits the GPU, with the margin."""
    return one.needed_bytes <= space.usable_bytes


def _tier(one: Estimate) -> tuple[bool, bool, bool]:
    return one.candidate.lora_rank > 0, one.candidate.quantized, one.candidate.offload


class Choice(NamedTuple):
    """The result of a choice."""

    ranked: list[Estimate]  # Those that fit, best first; the first one is chosen
    found: list[Estimate]  # All candidates
    runs: int  # Full dry runs
    fits: list[Fit]


def choose(space: Space, fit: Callable[[int, bool], Fit], run: Callable[[Candidate], tuple[int, float]]) -> Choice:
    """Return the ranked candidates; the first one was run dry itself.

    ``fit`` returns the pieces of a dry run with adapters of a rank (0: all weights), on a base in 4 bits or not, and
    ``run`` the needed bytes and the step seconds of a candidate from a dry run of its own. Adapters on a base as it is
    have no dry run if the pieces of all weights show that they do not fit, and those on a base in 4 bits follow. Raises
    ``ConfigError`` if nothing fits, or a dry run was refused.
    """
    every = candidates(space)
    fitted: list[Fit] = []
    found: dict[Candidate, Estimate] = {}
    kinds = sorted({(one.lora_rank, one.quantized) for one in every}, key=lambda kind: (kind[0] > 0, kind[1]))
    for lora, quantized in kinds:
        mine = [one for one in every if (one.lora_rank, one.quantized) == (lora, quantized)]
        if fitted and (lora, quantized) != kinds[-1]:
            frozen = msgspec.structs.replace(fitted[0], trainable=0)
            found.update({one: estimate(frozen, one, space) for one in mine})
            if not order(list(found.values()), space):
                continue
        try:
            made = fit(lora, quantized)
        except ConfigError:
            if quantized and fitted:  # not every model can be held in 4 bits
                continue
            raise
        fitted.append(made)
        mine = [one for one in mine if not one.offload or offloaded_bytes(made, one, space) <= space.host_bytes]
        found.update({one: estimate(made, one, space) for one in mine})
        if order(list(found.values()), space):
            break
    exact: dict[Candidate, Estimate] = {}
    while True:
        now = [exact.get(one) or _corrected(known, exact, found) for one, known in found.items()]
        ranked = order(now, space)
        if not ranked:
            raise _refusal(now, space)
        best, runs = ranked[0], len(fitted) + len(exact)
        if best.exact:
            return Choice(ranked, now, runs, fitted)
        if runs >= MOST_RUNS and (ready := [one for one in ranked if one.exact]):
            return Choice([ready[0], *(one for one in ranked if one is not ready[0])], now, runs, fitted)
        needed, seconds = run(best.candidate)
        exact[best.candidate] = Estimate(best.candidate, needed, seconds, _speed(best.candidate, space, seconds), True)


def _corrected(one: Estimate, exact: Mapping[Candidate, Estimate], found: Mapping[Candidate, Estimate]) -> Estimate:
    """Return fitted figures, multiplied by what a dry run of the same kind has had more or less than its own."""
    for candidate, known in exact.items():
        if candidate.kind == one.candidate.kind:
            fitted = found[candidate]
            memory, time = known.needed_bytes / fitted.needed_bytes, known.step_seconds / fitted.step_seconds
            speed = one.tokens_per_second / time
            return Estimate(one.candidate, round(one.needed_bytes * memory), one.step_seconds * time, speed)
    return one


def offloaded_bytes(fit: Fit, candidate: Candidate, space: Space) -> int:
    """Return the bytes that all ranks of a host keep in its memory: states, and copies of gradients and weights."""
    return round((fit.state_bytes + _GRADIENT_BYTES + fit.weight_bytes) * fit.trainable / space.hosts)


def _refusal(found: Sequence[Estimate], space: Space) -> ConfigError:
    least = min(found, key=lambda one: one.needed_bytes)
    words = [*least.candidate.words()[:-1], f"{least.candidate.micro_batch} x {space.sequence_length:,} tokens"]
    return ConfigError(
        f"does not fit {space.ranks} x {space.gpu.name}: the least ({', '.join(words)}) needs "
        f"{gib(least.needed_bytes)} of the {gib(space.usable_bytes)} that a GPU has for it; use more or larger GPUs, "
        "or a shorter training.sequence_length"
    )
