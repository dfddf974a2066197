"""One interface to all health detectors: messages of the stream in, findings out. Pure: times are passed in.

A rank's hello from another process starts another job of the run and resets all detectors that use steps.

The monitor's own faults: dropped telemetry, no recording.

- **telemetry_lost**: the loss counters of a HubStats rose. The count is incremented with each rise; resolved after 60 s
  without one.
- **not_recording**: HubStats has a reason why nothing is recorded. Resolved if it has none; not raised if an alert of
  the kind ``disk`` is active.
- **not_exported**: an exporter reports that its target accepts nothing, or has dropped further points. Resolved once it
  accepts points and has dropped none for 60 s.
"""

import math
from collections.abc import Mapping

import msgspec

from ...messages.control import ExporterState, HubStats
from ...messages.telemetry import Checkpoint, CheckpointFailed, Compiles, DeviceSample, Hello, Plan, Step
from ...text import counted
from ..findings.alerts import RANKS_LISTED
from ..findings.finding import Condition, Detector, Finding, Handler, Kind, Resolution, Shown, only, resolved
from ..words import Words
from . import gradients, loss, machine, nonfinite, speed
from .gradients import FLOOR, Gradients, Scaler
from .loss import Divergence, Plateau
from .machine import Checkpoints
from .nonfinite import NonFinite
from .series import Join
from .speed import DataWait, Recompilation

QUIET_S = 60.0


class HealthMonitor(Detector):
    """The detectors of one run that compare steps."""

    kinds = (*nonfinite.KINDS, *loss.KINDS, *gradients.KINDS, *speed.KINDS, *machine.KINDS)
    replays = (Hello, Plan, Step, Checkpoint, CheckpointFailed)

    def __init__(self) -> None:
        self._join = Join()
        self._losses, self._norms = NonFinite("loss"), NonFinite("grad_norm")
        self._divergence, self._plateau = Divergence(), Plateau()
        self._gradients, self._scaler = Gradients(), Scaler()
        self._data_wait = DataWait()
        self._compiles = Recompilation()
        self._checkpoints = Checkpoints()
        self._processes: dict[int, tuple[int, int]] = {}
        self._precision = self._computes_in = ""
        self._total_steps = 0

    def handlers(self) -> Mapping[type, Handler]:
        return {
            Hello: self.hello,
            Plan: self.plan,
            Step: self.step,
            DeviceSample: self.sample,
            Compiles: self._compiles.compiles,
            Checkpoint: self._checkpoints.complete,
            CheckpointFailed: self._checkpoints.failed,
        }

    def hello(self, hello: Hello) -> list[Finding]:
        process = hello.pid, hello.start_ticks
        before = self._processes.get(hello.rank)
        found: list[Finding] = []
        if before is not None and before != process:
            found = self._reset()
            self._processes.clear()
        self._processes[hello.rank] = process
        self._precision = hello.precision or self._precision
        self._computes_in = hello.matmul_precision
        self._scaler.floor = _floor(hello)
        self._join.ranks.add(hello.rank)
        self._data_wait.hello(hello)
        return found

    def rank_ended(self, rank: int) -> list[Finding]:
        """Stop waiting for a rank that ended, and comparing with it."""
        self._join.drop(rank)
        self._data_wait.drop(rank)
        return self._losses.raise_complete(self._join.ranks) + self._norms.raise_complete(self._join.ranks)

    def plan(self, plan: Plan) -> list[Finding]:
        self._total_steps = plan.total_steps
        return []

    def step(self, step: Step) -> list[Finding]:
        found = self._losses.step(step, self._precision, self._join.ranks)
        found += self._norms.step(step, self._precision, self._join.ranks)
        found += self._data_wait.step(step)
        for row in self._join.add(step):
            if not self._join.alternating:
                found += self._divergence.step(row)
                found += self._plateau.step(row, self._total_steps)
            found += self._gradients.step(row)
            by_script = row.overflow and row.loss_scale is None and self._precision != "fp16"
            has_scaler = row.loss_scale is not None or not (by_script or self._precision in ("bf16", "fp32"))
            if has_scaler and self._computes_in != "bf16":
                found += self._scaler.step(row)  # else a scale decides nothing, and ``learning.updates`` judges
            if row.step % 10 == 0:
                found += self._compiles.step(row.step)
        return found

    def sample(self, sample: DeviceSample) -> list[Finding]:
        """Raise delayed findings: samples arrive every second."""
        return [*self._losses.tick(sample.time), *self._norms.tick(sample.time)]

    def _reset(self) -> list[Finding]:
        self._join = Join()
        parts = (
            *(self._losses, self._norms, self._divergence, self._plateau, self._gradients, self._scaler),
            *(self._data_wait, self._compiles, self._checkpoints),
        )
        return [finding for part in parts for finding in part.reset()]


def _floor(hello: Hello) -> float:
    """Return DeepSpeed's ``min_loss_scale``, or 1."""
    section = (hello.deepspeed_config or {}).get("fp16")
    value = section.get("min_loss_scale", FLOOR) if isinstance(section, dict) else FLOOR
    return float(value) if isinstance(value, int | float) and value > 0 else FLOOR


class LossFacts(msgspec.Struct, frozen=True):
    """Messages that the hub has not received."""

    total: int
    new: int  # messages lost since the previous statistics
    by_sender: dict[str, int]
    sources: tuple[str, ...]  # the senders of these


class RecordingFacts(msgspec.Struct, frozen=True):
    """Why nothing is recorded, and the number of messages recorded so far."""

    error: str
    recorded: int


class ExportFacts(msgspec.Struct, frozen=True):
    """What a target of an exporter did not get."""

    target: str
    error: str  # why it accepts nothing; empty: it is slow
    dropped: int  # points so far


class HealthDetector:
    """Finds lost telemetry, a failing recording, and exporters whose target accepts nothing."""

    def __init__(self) -> None:
        self._dropped: dict[str, tuple[int, float]] = {}  # by target: points dropped, and when their number last rose
        self._lost: dict[str, int] = {}
        self._rose_at = 0.0

    def stats(self, t: float, stats: HubStats, known: bool) -> list[Finding]:
        """Process the hub's own figures; ``known``: whether an alert about the recording is active."""
        found = self._losses(t, stats)
        if not stats.recording_error:
            return [*found, resolved(Condition("not_recording"), Resolution("resumed"))]
        facts = RecordingFacts(stats.recording_error, stats.recorded)
        return found if known else [*found, Finding("not_recording", facts, severity="error")]

    def exporter(self, state: ExporterState) -> list[Finding]:
        before, at = self._dropped.get(state.target, (0, -math.inf))
        rose = state.dropped > before
        self._dropped[state.target] = state.dropped, state.time if rose else at  # a new process counts from 0 again
        if not (state.error or rose):
            over = state.time - at > QUIET_S or not state.dropped
            return [resolved(Condition("not_exported", key=state.target), Resolution("resumed"))] if over else []
        return [Finding("not_exported", ExportFacts(state.target, state.error, state.dropped), key=state.target)]

    def observe(self, stats: HubStats) -> None:
        """Restore the hub's figures from the recording, so that earlier losses are not reported again."""
        self._lost = dict(stats.lost)

    def _losses(self, t: float, stats: HubStats) -> list[Finding]:
        rose = {source: count for source, count in stats.lost.items() if count > self._lost.get(source, 0)}
        new = sum(count - self._lost.get(source, 0) for source, count in rose.items())
        self._lost = dict(stats.lost)
        if not new:
            return [resolved(Condition("telemetry_lost"), Resolution("calm"))] if t - self._rose_at > QUIET_S else []
        self._rose_at = t
        by_sender = dict(list(stats.lost.items())[:RANKS_LISTED])
        return [Finding("telemetry_lost", LossFacts(sum(stats.lost.values()), new, by_sender, tuple(rose)))]


def _lost(facts: LossFacts, _: Finding) -> Words:
    names = ", ".join(sorted(map(_sender, facts.sources))[:4]) + (" ..." if len(facts.sources) > 4 else "")
    return Words(
        f"{counted(facts.total, 'message')} of telemetry lost, {facts.new} just now from {names}",
        "Charts and tables have gaps; the training is not affected. A probe drops messages instead of waiting when "
        "the hub is down for long or cannot keep up.",
    )


def _not_recording(facts: RecordingFacts, _: Finding) -> Words:
    return Words(
        f"not recording: {facts.error}",
        "The training and the live view continue, but the recording will lack this part of the run.",
        "Free space on that disk; recording resumes by itself.",
    )


def _not_exported(facts: ExportFacts, _: Finding) -> Words:
    lost = f" {counted(facts.dropped, 'point')} dropped so far." if facts.dropped else ""
    return Words(
        f"not exported to {facts.target}: {facts.error or 'it is slower than the run'}",
        f"The training, the recording and other exporters are not affected.{lost}",
        f"The recording has every point. What the exporter wrote: logs/{facts.target}-exporter.log.",
    )


def _sender(source: str) -> str:
    """Shorten a probe's identity, ``rank-3-4711-123456``, to ``rank 3``."""
    parts = source.split("-")
    return f"rank {parts[1]}" if len(parts) == 4 and parts[0] == "rank" else source


KINDS = (
    Kind(
        "telemetry_lost",
        LossFacts,
        _lost,
        "dropped",
        "lost",
        evidence=only("total", "new", "by_sender"),
        shown={
            "total": Shown("lost in total"),
            "new": Shown("newly lost"),
            "by_sender": Shown("lost by sender"),
            "sources": Shown("senders"),
            "recorded": Shown("messages recorded"),
        },
        resolved={"calm": "None lost since."},
        limits={"time without a loss that resolves it": f"{QUIET_S:g} s"},
        counted=True,
    ),
    Kind(
        "not_recording", RecordingFacts, _not_recording, "disk", "recording", resolved={"resumed": "Recording again."}
    ),
    Kind(
        "not_exported",
        ExportFacts,
        _not_exported,
        "note",
        "export",
        shown={"dropped": Shown("points dropped")},
        resolved={"resumed": "It accepts points again."},
        limits={"time without a dropped point that resolves it": f"{QUIET_S:g} s"},
    ),
)
