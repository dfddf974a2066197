"""Streams as a hub's: realistic messages of N ranks, for tests and benchmarks that have no training at hand.

``tests/support`` is on pytest's path (``pythonpath`` in pyproject.toml), so a test says ``from streams import Stream``;
a benchmark adds the folder to ``sys.path`` itself. Figures are those of a 1B model under ZeRO-2 on H200s with all of
the probe's fields in use, or of gloo ranks on a CPU; the same seed gives the same stream.

    frames = list(Stream(ranks=8, steps=100).frames())     # every message in order, as the hub would number it
    write(path, frames)                                    # a recording, through the real Writer
"""

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ftmon.protocol.messages.control import Alert, HubStats, RankState, RunState
from ftmon.protocol.messages.telemetry import (
    AllocatorEvents,
    AllocatorPhase,
    DeviceInfo,
    DeviceSample,
    Goodbye,
    Heartbeat,
    Hello,
    LogLine,
    PhaseRecord,
    Plan,
    ProcessMemory,
    Span,
    Step,
)
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run.rundir import RunFile

GIB = 2**30
STARTED = 1_780_000_000.0
SHARES = {"data": 0.02, "forward": 0.31, "backward": 0.50, "optimizer": 0.15}
RUN = RunFile(
    id="llama3-guanaco-20260528-202640", name="llama3-guanaco", created=STARTED - 20,
    command=["ftmon", "train", "llama3.yaml"], cwd="/home/user/llama3", host="node-1", kind="train",
)  # fmt: skip


class Later(Sequence[Frame]):
    """Frames that are made when they are first looked at: every worker of the suite imports every test module."""

    def __init__(self, make: Callable[[], Iterable[Frame]]) -> None:
        self._make = make

    @cached_property
    def _frames(self) -> list[Frame]:
        return list(self._make())

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, place: Any) -> Any:
        return self._frames[place]


@dataclass
class Stream:
    """A run of ``ranks`` ranks that takes ``steps`` steps of about ``step_s`` seconds each.

    Every ``spike_every`` steps rank 1 (or the only one) has a transient of 0.9 GiB in its optimizer step. With
    ``heartbeats`` there is one a phase and rank. If ``finished``, it ends with goodbyes and a run that finished.
    """

    ranks: int = 8
    steps: int = 100
    step_s: float = 0.5
    cuda: bool = True
    seed: int = 1
    spike_every: int = 40
    heartbeats: bool = False
    devices: bool = True
    logs: bool = True
    finished: bool = True
    started: float = STARTED
    first_seq: int = 1
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._base = {rank: self._random.randrange(30 * GIB, 34 * GIB, 512) for rank in range(self.ranks)}
        self._reserved = {rank: 44 * GIB + rank * 2 * 2**20 for rank in range(self.ranks)}
        self._alerts = 0

    def frames(self) -> Iterator[Frame]:
        for seq, (t, message) in enumerate(self._messages(), self.first_seq):
            yield Frame(seq, t, message)

    def _messages(self) -> Iterator[tuple[float, Message]]:
        t = self.started
        yield t, RunState(state="starting", time=t)
        for rank in range(self.ranks):
            t += 0.01
            yield t, self.hello(rank, t)
            yield t, RankState(rank=rank, state="starting", time=t, pid=4000 + rank)
        yield t, Plan(rank=0, total_steps=self.steps, epochs=1.0, output_dir="out/llama3")
        yield t, RunState(state="training", time=t)
        for rank in range(self.ranks):
            yield t, RankState(rank=rank, state="training", time=t, pid=4000 + rank)
        next_device = next_stats = t
        for number in range(1, self.steps + 1):
            begun = t
            if self.heartbeats:
                yield from self._beats(number, begun)
            length = self.step_s * self._random.uniform(0.97, 1.03)
            t = begun + length
            while self.devices and next_device <= t:
                yield from ((max(next_device, begun), sample) for sample in self.samples(next_device))
                next_device += 1.0
            if next_stats <= t:
                yield max(next_stats, begun), self._stats(next_stats, number)
                next_stats += 5.0
            for rank in range(self.ranks):
                t += self._random.uniform(0, 0.0004)
                yield t, self.step(rank, number, begun, length)
            yield from self._remarks(number, t)
        if self.finished:
            for rank in range(self.ranks):
                yield t, Goodbye(rank=rank, time=t, step=self.steps, reason="finished")
                yield t, RankState(rank=rank, state="finished", time=t, pid=4000 + rank, exit_code=0)
            yield t, RunState(state="finished", time=t, exit_code=0)

    def hello(self, rank: int, t: float) -> Hello:
        device = (
            DeviceInfo("cuda", rank % 8, "NVIDIA H200", 139 * GIB + 800 * 2**20, f"GPU-{rank:04d}")
            if self.cuda
            else DeviceInfo("cpu", 0, "AMD EPYC 9654", 64 * GIB)
        )
        return Hello(
            rank=rank,
            local_rank=rank % 8,
            world_size=self.ranks,
            host=f"node-{rank // 8 + 1}",
            pid=4000 + rank,
            start_ticks=900_000 + rank,
            device=device,
            memory_measure="cuda" if self.cuda else "glibc",
            time=t,
            versions={"python": "3.11.9", "torch": "2.11.0", "deepspeed": "0.19.8", "ftmon": "0.1.0"},
            deepspeed_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
            zero_stage=2,
            micro_batch=4,
            grad_accumulation=2,
            precision="bf16",
            model="LlamaForCausalLM",
            parameters=1_235_814_400,
            trainable_parameters=1_235_814_400,
            framework="deepspeed",
            argv=["train.py", "llama3.yaml"],
            backend="nccl" if self.cuda else "gloo",
        )

    def step(self, rank: int, number: int, begun: float, length: float) -> Step:
        draw = self._random
        host_us = int(length * 1e6) - draw.randrange(900)
        shapes = self._shapes(rank, number, self.is_spike(rank, number))
        phases: list[PhaseRecord] = []
        at = draw.randrange(20, 90)
        for name, share in SHARES.items():
            spent = int(host_us * share * draw.uniform(0.98, 1.02))
            phases.append(self._phase(rank, name, at, spent, *shapes[name]))
            at += spent + draw.randrange(5, 60)
        tokens = 16_384 - draw.randrange(900)
        return Step(
            rank=rank,
            step=number,
            started=begun,
            host_us=host_us,
            phases=phases,
            device_us=host_us - draw.randrange(4000) if self.cuda else None,
            micro_steps=2,
            loss=1.1 + 1.9 * math.exp(-number / 400) + draw.gauss(0, 0.02),
            lr=2e-5 * min(1.0, number / 50) * 0.5 * (1 + math.cos(math.pi * number / max(1, self.steps))),
            grad_norm=abs(draw.gauss(0.8, 0.1)),
            loss_scale=None,
            batch_shape=[4, 2048],
            samples=8,
            tokens=tokens,
            padded_tokens=16_384,
            probe_us=draw.randrange(60, 190),
        )

    def is_spike(self, rank: int, number: int) -> bool:
        return bool(self.spike_every) and number % self.spike_every == 0 and rank == min(1, self.ranks - 1)

    def _shapes(self, rank: int, number: int, spike: bool) -> dict[str, tuple[int, int, int]]:
        """Give start, end and peak of allocated memory by phase; the first optimizer step grows by Adam's states."""
        draw = self._random
        base = self._base[rank] if number > 1 else self._base[rank] - 9 * GIB
        activations = draw.randrange(5 * GIB, 5 * GIB + 300 * 2**20, 512)
        gradients = draw.randrange(512, 40 * 2**20, 512)
        transient = draw.randrange(512, 90 * 2**20, 512) + (900 * 2**20 if spike else 0)
        if not self.cuda:
            base, activations, transient = base // 16 + 48, activations // 16 + 32, transient // 16 + 16
        full, left = base + activations, base + gradients
        after = self._base[rank] if self.cuda else base
        return {
            "data": (base, base, base + 131_072),
            "forward": (base, full, full + draw.randrange(512, 2**20, 512)),
            "backward": (full, left, full + draw.randrange(512, 900 * 2**20, 512)),
            "optimizer": (left, after, max(left, after) + transient),
        }

    def _phase(self, rank: int, name: str, at: int, spent: int, start: int, end: int, peak: int) -> PhaseRecord:
        draw = self._random
        reserved = self._reserved[rank]
        collective_us = draw.randrange(spent // 3) if name in ("backward", "optimizer") else 0
        if not self.cuda:
            resident = start + 900 * 2**20
            return PhaseRecord(
                name=name,
                start_us=at,
                host_us=spent,
                allocated=Span(start, end, max(start, end)),
                reserved=Span(start + 8192, end + 8192, max(start, end) + 8192),
                resident=Span(resident, end + 900 * 2**20, peak + 900 * 2**20),
                count=2 if name != "optimizer" else 1,
                collective_us=collective_us,
                collectives=2 if collective_us else 0,
            )
        rounding = 41_000_000 + rank * 7
        inner = draw.randrange(1000, 400_000)
        allocations = {"data": 2, "forward": 2900, "backward": 4100, "optimizer": 610}[name]
        return PhaseRecord(
            name=name,
            start_us=at,
            host_us=spent,
            allocated=Span(start, end, peak),
            reserved=Span(reserved, reserved, reserved),
            device_us=spent - draw.randrange(-200, 300),
            active=Span(start, end, peak + draw.choice((0, 0, 0, 2 * 2**20))),
            requested=Span(start - rounding, end - rounding - inner * (name == "forward"), peak - rounding - inner),
            count=2 if name != "optimizer" else 1,
            allocations=allocations + draw.randrange(4),
            frees=allocations - draw.randrange(300),
            allocated_bytes=draw.randrange(allocations * 512, allocations * 5 * 2**20 + 1024, 512),
            collective_us=collective_us,
            collectives=draw.randrange(1, 40) if collective_us else 0,
        )

    def samples(self, t: float) -> Iterator[DeviceSample]:
        draw = self._random
        hosts = {f"node-{rank // 8 + 1}" for rank in range(self.ranks)}
        for rank in range(self.ranks) if self.cuda else ():
            used = self._reserved[rank] + 2 * GIB
            yield DeviceSample(
                host=f"node-{rank // 8 + 1}",
                kind="gpu",
                index=rank % 8,
                name="NVIDIA H200",
                time=t,
                used_bytes=used,
                total_bytes=139 * GIB + 800 * 2**20,
                uuid=f"GPU-{rank:04d}",
                utilization_percent=float(draw.randrange(90, 100)),
                power_w=round(draw.uniform(560, 690), 3),
                power_limit_w=700.0,
                temperature_c=float(draw.randrange(58, 68)),
                sm_clock_mhz=1980,
                memory_clock_mhz=3201,
                throttle_reasons=["power cap"] if draw.random() < 0.1 else [],
                processes=[ProcessMemory(4000 + rank, used - GIB, rank, "python3.11")],
            )
        for host in sorted(hosts):
            used = 200 * GIB + draw.randrange(GIB)
            busy = round(draw.uniform(5, 12), 1)
            yield DeviceSample(host, "host", 0, "host", t, used, 2015 * GIB, utilization_percent=busy)

    def _beats(self, number: int, begun: float) -> Iterator[tuple[float, Message]]:
        t = begun
        for position, (name, share) in enumerate(SHARES.items()):
            for rank in range(self.ranks):
                memory = {"allocated": self._base[rank], "reserved": self._reserved[rank]}
                calls: Any = {"collectives": number * 12, "last_collective": "reduce_scatter_tensor"}
                yield t, Heartbeat(rank, number, name, t, number * 10 + position, t, **memory, **calls)
            t += share * self.step_s * 0.9

    def _remarks(self, number: int, t: float) -> Iterator[tuple[float, Message]]:
        rank = min(1, self.ranks - 1)
        if self.is_spike(rank, number):
            self._alerts += 1
            title = f"rank {rank} optimizer +0.9 GiB for 4 ms"
            text = "A temporary in the optimizer step set the run's highest peak; a fused AdamW takes none."
            evidence: dict[str, Any] = {"transient_bytes": 900 * 2**20, "usual_bytes": 40 * 2**20}
            where: dict[str, Any] = {"rank": rank, "step": number, "phase": "optimizer"}
            yield t, Alert(self._alerts, "spike", "warning", t, title, **where, text=text, evidence=evidence)
        if self.cuda and number % 50 == 0:
            phases = [AllocatorPhase(name, 2000, 1990, 9 * GIB, 9 * GIB, [GIB, GIB // 2]) for name in SHARES]
            yield t, AllocatorEvents(rank=number // 50 % self.ranks, step=number, time=t, phases=phases, entries=9000)
        if self.logs and number % 10 == 0:
            yield t, LogLine(rank=0, time=t, stream="out", text=f"step {number}/{self.steps} loss 1.2{number % 10}")

    def _stats(self, t: float, number: int) -> HubStats:
        received = number * self.ranks
        return HubStats(t, 3999, received, received, received, recording_bytes=received * 350)


def write(path: str | os.PathLike[str], frames: Iterable[Frame], commit_every: int = 500) -> Path:
    """Write frames into a recording through the real Writer, and close it."""
    writer = Writer(path, RUN)
    append(writer, frames, commit_every)
    writer.close()
    assert not writer.error, writer.error
    return Path(path)


def append(writer: Writer, frames: Iterable[Frame], commit_every: int | None = None) -> None:
    """Append frames, with a commit after each ``commit_every`` of them; None: without one."""
    for count, frame in enumerate(frames, 1):
        writer.append(frame.seq, frame.t, frame.message)
        if commit_every is not None and count % commit_every == 0:
            writer.commit()
