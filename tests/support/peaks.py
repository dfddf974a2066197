"""A recording whose memory is explained: a 0.5B model under ZeRO-3 on H200s, its batches of many lengths.

Peaks of the phases at a length are those measured (MiB, ``MEASURED``: torch 2.11, DeepSpeed 0.19.8, one H200,
micro-batch 1); in between they lie on the line between two. What they are made of follows from the model's size.
"""

import random
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ftmon.protocol.messages import memory
from ftmon.protocol.messages.control import Alert, RankState, RunState
from ftmon.protocol.messages.telemetry import (
    AllocatorEvents,
    AllocatorPhase,
    DeviceSample,
    Hello,
    PhaseRecord,
    Plan,
    ProcessMemory,
    SnapshotTaken,
    Span,
    StackGroup,
    Step,
)
from ftmon.protocol.messages.wire import Frame, Message
from msgspec import structs
from streams import STARTED, Stream, write

MIB, GIB = 2**20, 2**30
PARAMETERS = 463_987_712
STEP_S = 0.31
RESERVED_MIB = 60  # reserved and not allocated at a peak, at the least
PHASES = ("data", "forward", "backward", "optimizer")


class Measured(NamedTuple):
    """Peaks at one sequence length, MiB."""

    length: int
    forward: int
    backward: int
    optimizer: int


MEASURED = (
    Measured(1, 8099, 8983, 10753),
    Measured(512, 8868, 9545, 10753),
    Measured(1024, 10695, 10992, 10753),
    Measured(2048, 13293, 13886, 10753),
    Measured(4096, 18488, 19675, 10753),
)
START_MIB = 8098  # allocated between steps


def peaks_at(length: int) -> dict[str, int]:
    at = min(max(1, bisect_left([each.length for each in MEASURED], length)), len(MEASURED) - 1)
    low, high = MEASURED[at - 1], MEASURED[at]
    share = (length - low.length) / (high.length - low.length)
    mix = {name: getattr(low, name) + share * (getattr(high, name) - getattr(low, name)) for name in low._fields[1:]}
    return {"data": START_MIB * MIB, **{name: int(size) * MIB for name, size in mix.items()}}


def reserved_at(peaks: dict[str, int]) -> int:
    return max(peaks.values()) + RESERVED_MIB * MIB + max(peaks.values()) // 7 // MIB * MIB


TIMES_US = {name: int(STEP_S * 1e6 * share) for name, share in zip(PHASES, (0.02, 0.30, 0.48, 0.18), strict=True)}
_DEEPSPEED = "/opt/venv/lib/python3.12/site-packages/deepspeed/runtime"
_STEP = ["/home/user/train.py:88 main", f"{_DEEPSPEED}/engine.py:2310 step"]
_STAGE3 = f"{_DEEPSPEED}/zero/stage3.py"
STACK_FOREACH = [*_STEP, f"{_STAGE3}:2159 step", f"{_STAGE3}:2040 _prepare_sub_group"]
STACK_NORM = [*_STEP, f"{_STAGE3}:2162 get_grad_norm_direct"]


class Explained:
    """The stream of a run of ``ranks`` ranks and ``steps`` steps, with batches up to ``longest``.

    ``taken_apart``: whether steps were. ``predicted``: what a prediction has of each part of a measured peak, as shares
    (``{"activations": 0.8}``), of parts that are not named all of it; None: nothing was predicted, as it was
    ``refused``.
    """

    def __init__(
        self,
        ranks: int = 1,
        steps: int = 48,
        longest: int = 2048,
        cuda: bool = True,
        taken_apart: bool = True,
        predicted: dict[str, float] | None = None,
        refused: str = "",
    ) -> None:
        self.predicted, self.refused = predicted, refused
        self.ranks, self.steps, self.longest, self.cuda, self.taken_apart = ranks, steps, longest, cuda, taken_apart
        self._draw = random.Random(3)

    def frames(self) -> Iterator[Frame]:
        for seq, (t, message) in enumerate(self._messages(), 1):
            yield Frame(seq, t, message)

    def _messages(self) -> Iterator[tuple[float, Message]]:
        t = STARTED
        yield t, RunState(state="training", time=t)
        for rank in range(self.ranks):
            yield t, self._hello(rank, t)
            yield t, RankState(rank=rank, state="training", time=t, pid=4000 + rank)
        yield t, Plan(rank=0, total_steps=self.steps * 4)
        if self.predicted is not None or self.refused:
            yield t, self._prediction(t)
        for step in range(1, self.steps + 1):
            length = self._draw.randrange(64, self.longest) // 8 * 8
            begun, t = t, t + STEP_S
            for rank in range(self.ranks):
                peaks = peaks_at(max(8, length - rank % 7 * 24))
                yield t, self._step(rank, step, begun, length - rank % 7 * 24, peaks)
                if self.taken_apart and (step <= 2 or step % 8 == 0):
                    yield t, self._composition(rank, step, t, peaks)
                    if self.cuda:
                        yield t, self._events(rank, step, t, length)
            if step % 3 == 0 and self.cuda:
                for rank in range(self.ranks):
                    yield t, self._sample(rank, t)
        if self.cuda and self.taken_apart:
            yield from self._spike(t)

    def _hello(self, rank: int, t: float) -> Hello:
        found = Stream(self.ranks, cuda=self.cuda).hello(rank, t)
        capacity = 150_100_000_000 if self.cuda else found.device.capacity_bytes
        here: Any = {"device": structs.replace(found.device, capacity_bytes=capacity), "zero_stage": 3, "argv": []}
        here |= {"versions": {**found.versions, "python": "3.12.3"}, "model": "Qwen2ForCausalLM", "micro_batch": 1}
        here |= {"parameters": PARAMETERS, "trainable_parameters": PARAMETERS}
        return structs.replace(found, **here, grad_accumulation=None, deepspeed_config=None)

    def _step(self, rank: int, step: int, begun: float, length: int, peaks: dict[str, int]) -> Step:
        phases: list[PhaseRecord] = []
        at, start, reserved = 40, START_MIB * MIB, reserved_at(peaks)
        ends = {"data": start, "forward": peaks["forward"] - 9 * MIB, "backward": start + 884 * MIB, "optimizer": start}
        before = start
        for name, spent in TIMES_US.items():
            allocated = Span(before, ends[name], peaks[name])
            resident = None
            if not self.cuda:
                resident, allocated = allocated, Span(before - 3 * GIB, ends[name] - 3 * GIB, before - 3 * GIB)
            phases.append(
                PhaseRecord(
                    name=name,
                    start_us=at,
                    host_us=spent,
                    allocated=allocated,
                    reserved=Span(reserved, reserved, reserved),
                    device_us=spent - 100 if self.cuda else None,
                    resident=resident,
                    allocations={"data": 2, "forward": 1904, "backward": 3120, "optimizer": 410}[name],
                    frees=400,
                    allocated_bytes=peaks[name] // 2,
                )
            )
            before = ends[name]
            at += spent + 20
        return Step(
            rank=rank, step=step, started=begun, host_us=int(STEP_S * 1e6), phases=phases,
            device_us=int(STEP_S * 1e6) - 300 if self.cuda else None, loss=2.1 - step * 0.01, lr=2e-5,
            batch_shape=[1, length], tokens=length, padded_tokens=length,
            retries=0 if step < 30 else 1 if step < 41 else 3, probe_us=150,
        )  # fmt: skip

    def _composition(self, rank: int, step: int, t: float, peaks: dict[str, int]) -> memory.Composition:
        standing = {
            "parameters": 885 * MIB,
            "master_copies": 1770 * MIB,
            "optimizer_states": 3540 * MIB,
            "partitions": 885 * MIB,
            "buckets": 954 * MIB,
        }
        kept = sum(standing.values())
        reserved = reserved_at(peaks)
        phases: list[memory.PhaseComposition] = []
        for name, peak in peaks.items():
            rest = peak - kept
            parts = dict(standing)
            if name in ("forward", "backward"):
                activations = max(0, peaks["forward"] - START_MIB * MIB)
                parts["activations"] = int(activations * (1.0 if name == "forward" else 0.8))
            if name in ("backward", "optimizer"):
                parts["gradients"] = min(884 * MIB, max(0, rest - parts.get("activations", 0)))
            left = peak - sum(parts.values())
            parts["other"] = min(left, 38 * MIB)
            parts["temporaries"] = left - parts["other"]
            if not self.cuda:
                parts["other"] += parts.pop("buckets")
            phases.append(memory.PhaseComposition(name, peak, parts, 140_000, reserved if self.cuda else 0))
        return memory.Composition(
            rank=rank, step=step, time=t, measure="cuda" if self.cuda else "glibc", phases=phases,
            reason="first" if step <= 2 else "periodic", known=dict(standing), allocated_bytes=START_MIB * MIB,
            reserved_bytes=reserved, entries=9120 if self.cuda else 0, walk_us=420, read_us=9400,
        )  # fmt: skip

    def _prediction(self, t: float) -> memory.Prediction:
        if self.predicted is None:
            return memory.Prediction(t, refused=self.refused)
        points: list[memory.PredictedPoint] = []
        for known in MEASURED[:4]:
            phases: list[memory.PredictedPhase] = []
            for phase in self._composition(0, 1, t, peaks_at(known.length)).phases[1:]:
                parts = {name: round(size * self.predicted.get(name, 1.0)) for name, size in phase.parts.items()}
                phases.append(memory.PredictedPhase(phase.name, sum(parts.values()), phase.reserved_bytes, parts))
            points.append(memory.PredictedPoint(0, known.length, phases))
        return memory.Prediction(t, points, 1, 0.02, "peaks of DeepSpeed steps on H200s", "H200", seconds=31.0)

    def _events(self, rank: int, step: int, t: float, length: int) -> AllocatorEvents:
        draw = self._draw
        grown = 512 * MIB if step in (1, 2, 24) else 0
        backward = [max(594 * MIB, length * 297 * 1024)], 2 if grown else 0, 0, grown
        phases = [
            AllocatorPhase("data", 2, 2, 16_384, 16_384, [8192]),
            AllocatorPhase("forward", 1904, 1210, 2 * GIB + length * MIB, 2 * GIB, [594 * MIB, length * MIB // 3]),
            AllocatorPhase("backward", 3120 + draw.randrange(20), 3700, 5 * GIB + length * 2 * MIB, 6 * GIB, *backward),
            AllocatorPhase("optimizer", 410, 410, 3 * GIB, 3 * GIB, [1770 * MIB, 885 * MIB]),
        ]
        return AllocatorEvents(
            rank=rank,
            step=step,
            time=t,
            phases=[structs.replace(each, host_us=TIMES_US[each.name]) for each in phases],
            entries=9120,
            read_us=5400,
            host_us=int(STEP_S * 1e6),
            allocated_bytes=START_MIB * MIB,
            reserved_bytes=15_000 * MIB,
            reserved_growth_bytes=grown,
            free_bytes=5_890 * MIB,
            largest_free_block_bytes=2_414 * MIB,
            rounding_bytes=9 * MIB,
            segments=212,
        )

    def _sample(self, rank: int, t: float) -> DeviceSample:
        used = 15_300 * MIB
        return DeviceSample(
            host=f"node-{rank // 8 + 1}",
            kind="gpu",
            index=rank % 8,
            name="NVIDIA H200",
            time=t,
            used_bytes=used + 31 * MIB,
            total_bytes=150_754_820_096,
            uuid=f"GPU-{rank:04d}",
            utilization_percent=97.0,
            power_w=512.0,
            temperature_c=58.0,
            processes=[ProcessMemory(4000 + rank, used - 640 * MIB, rank, "python3"), ProcessMemory(77, 640 * MIB)],
        )

    def _spike(self, t: float) -> Iterator[tuple[float, Message]]:
        step, size, timing = self.steps, 2655 * MIB, {"armed_us": 71_000, "usual_us": 55_800}
        groups = [
            StackGroup(n * MIB, count, s, n * MIB) for n, count, s in ((1770, 1, STACK_FOREACH), (885, 2, STACK_NORM))
        ]
        sizes = {"peak_bytes": 10_753 * MIB, "attributed_bytes": size, "parameter_bytes": 885 * MIB}
        yield t, memory.Cause(0, step, "optimizer", t, "spike", size, groups, **sizes, trainable=PARAMETERS, **timing)
        evidence = {
            "transient_bytes": size,
            "sets_step_peak": True,
            "steps": [step - 2],
            "cause_rank": 0,
            "cause_step": step,
            "cause_pattern": "gradient_upcast",
            "cause_where": "stage3.py:2040 _prepare_sub_group",
            "remedy": "a smaller sub_group_size (now 1e+09): the copy is made for one sub-group at a time",
            "saves_bytes": 1416 * MIB,
            **timing,
        }
        text = "The optimizer step takes 2.6 GiB in every step: the fp32 gradients of its partition."
        where: dict[str, Any] = {"rank": 0, "ranks": [0], "step": step - 2, "phase": "optimizer"}
        title = "rank 0 optimizer +2.6 GiB for 56 ms"
        yield t, Alert(1, "spike", "warning", t - 1, title, **where, text=text, evidence=evidence)
        path = f"snapshots/rank-0-step-{step}-101203.pickle"
        yield t, SnapshotTaken(rank=0, step=step, time=t, path=path, bytes=4 * MIB, reason="asked", entries=9120)


def explained(path: Path, ranks: int = 1, **options: object) -> Path:
    return write(path, Explained(ranks, **options).frames())  # type: ignore[arg-type]
