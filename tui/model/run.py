"""A run's state as a fold over the frames of its stream, live or replayed, and the figures derived from it."""

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

import msgspec

from ...protocol.messages import control, hosts, memory, telemetry
from ...protocol.messages.memory import OomReport, Prediction
from ...protocol.messages.telemetry import MAX_RANKS, PAUSES, DeviceSample, EarlyStop, Evaluation, Step
from ...protocol.messages.wire import Frame
from ...protocol.recording.curves import mean_loss, point_of
from ...protocol.run.notices import TERMINAL, Notice, Notices, read_notify
from ...protocol.run.rundir import RunDir
from ...protocol.text import counted, duration, sanitize
from .alerts import AlertHistory, LogHistory
from .oom import CaseKey, OomCase, OomCases
from .rank import RECENT_STEPS, Fit, Peak, RankModel, fit
from .timeline import Mark
from .training import HistoryPoint, Training, perplexity_of, seconds_of_pauses_left, times_left

RATE_STEPS = 8

_NEWEST = 3
_CHANGE = 1.5
"""If the median of the newest 3 steps differs by this factor from that of the steps before, only these 3 count."""

_PATIENCE = 3.0  # a step may take this many times the recent duration before the run counts as stalled
_DELIVERY_SECONDS = 2.0  # delays up to this are ignored: steps are sent, recorded and shown in batches


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed without evaluations and checkpoints; all 0 while unknown."""

    steps_per_second: float = 0.0
    seconds_per_step: float = 0.0
    """Time between the ends of two steps; a stall does not increase it, so that time left stays realistic."""
    tokens_per_second: float = 0.0
    flops_per_second: float = 0.0  # model FLOP/s of all ranks together; 0 unless known for every rank


def rates(ranks: Iterable[RankModel], now: float, *, rests: bool = False) -> Rates:
    """Return the speed over the last few steps: of the slowest rank, and the tokens of all; ``ranks`` are of one job.

    The one source of every displayed step time, throughput and time left; evaluations and checkpoints are no part of
    it. ``now`` is hub time: a rank without a recent step counts as slow, unless no step is due (``rests``: the last one
    is done, or the run evaluates, saves or exports).
    """
    slowest = seconds = tokens = flops = 0.0
    all_flops = True
    for rank in ranks:
        steps = rank.steps
        if not steps or rank.state == "gone":
            continue
        recent = [steps[index] for index in range(max(0, len(steps) - RATE_STEPS - 1), len(steps))]
        taken = recent_seconds(recent)
        recent = recent[-len(taken) :]
        typical = max(median(taken), 1e-6)
        silence = now - rank.clock_offset - _end(recent[-1])
        waits = not rests and rank.state != "finished" and rank.phase not in PAUSES
        late = max(0.0, silence - max(_PATIENCE * typical, _DELIVERY_SECONDS)) if waits else 0.0
        stretched = typical + late / len(recent)
        tokens += sum(step.tokens for step in recent) / len(recent) / stretched
        flops += sum(step.flops for step in recent) / len(recent) / stretched
        all_flops = all_flops and all(step.flops for step in recent)
        slowest = max(slowest, stretched)
        seconds = max(seconds, typical)
    return Rates(1 / slowest if slowest else 0.0, seconds, tokens, flops if all_flops else 0.0)


def recent_seconds(steps: Sequence[Step]) -> list[float]:
    """Return the seconds of the steps that show the present speed, a suffix of those of ``steps``.

    The first of several steps only gives the beginning of the second. Older steps are left out if the newest ones have
    another speed.
    """
    if len(steps) == 1:
        return [steps[0].training_us * 1e-6]
    taken = [_seconds(before, step) for before, step in pairwise(steps)]
    older, newest = taken[:-_NEWEST], taken[-_NEWEST:]
    if older:
        low, high = sorted((median(older), median(newest)))
        if high > _CHANGE * low:
            return newest
    return taken


def _seconds(before: Step, step: Step) -> float:
    """Return the time since the previous step's end without pauses; steps that were not recorded share it."""
    paused = (step.host_us - step.training_us) * 1e-6
    return max(0.0, _end(step) - _end(before) - paused) / max(1, step.step - before.step)


def _end(step: Step) -> float:
    return step.started + step.host_us * 1e-6


DeviceKey = tuple[str, str, int]  # Host, kind (`gpu` or `host`) and index
FEWEST_STEPS = 40  # minimum number of recent steps kept in full per rank
_NEAR_STEPS = 4  # maximum difference in steps between synchronous ranks of one training
_STANDING = ("hung", "stopped", "gone", "unreachable", "held")


@dataclass(slots=True)
class RunInfo:
    """Information about a run besides its state, from its directory, recording and ranks' ``Hello`` messages."""

    id: str = ""
    name: str = ""
    kind: str = ""  # `demo`, `train`, `run` or `watch`
    command: list[str] = field(default_factory=list[str])
    created: float = 0.0
    host: str = ""
    model: str = ""
    zero_stage: int | None = None
    precision: str = ""
    framework: str = ""
    backend: str = ""
    parameters: int = 0
    trainable_parameters: int = 0
    world_size: int = 0
    micro_batch: int | None = None
    grad_accumulation: int | None = None

    @classmethod
    def of(cls, found: Any) -> "RunInfo":
        """Return the information in a ``run.json``, or in a relay's greeting."""
        return cls(found.id, found.name, found.kind, list(found.command), found.created, found.host)


_MOST_DEVICES = 4_096
_FAR_FUTURE = 1e11  # upper bound of valid times, seconds since the epoch
_ALL_STEPS = 20_000  # maximum number of steps kept in full for all ranks together (about 40 MB)
KEPT_JOBS = 64
SPARK = 60  # maximum number of values of a sparkline

MARKED_ALERTS = ("spike", "hang", "oom", "died", "growth", "slow", "failure")
"""Kinds of alert that are marked in the timelines of their ranks."""


class RunModel:
    """Everything the screens draw of a run, changed by ``apply`` with each frame, and figures derived from it."""

    def __init__(self, info: RunInfo | None = None) -> None:
        self.info = info or RunInfo()
        self.state: control.RunStateName = "starting"
        self.state_text = ""
        self.state_time = 0.0
        self.exit_code: int | None = None
        self.plan: telemetry.Plan | None = None
        self.prediction: Prediction | None = None
        """The run's prediction, or the reason for a missing one; None: not received."""
        self.ranks: dict[int, RankModel] = {}
        self.devices: dict[DeviceKey, telemetry.DeviceSample] = {}
        self.alerts = AlertHistory()
        self.logs = LogHistory()
        self.ooms = OomCases()
        self.hub: control.HubStats | None = None
        self.hosts: dict[str, hosts.HostState] = {}
        self.results: deque[control.Result] = deque(maxlen=100)
        self.training = Training()
        self.job = 0  # number of the job of ranks, steps, losses and peaks; 0 if the hub reports no jobs
        self.jobs: dict[int, hosts.Job] = {}
        self.job_losses: dict[int, list[float]] = {}  # `losses_of` each earlier job
        self.first_t = 0.0  # hub time of the first frame; 0 before any
        self.now = 0.0  # time of this state, seconds since the epoch: the latest frame's, or later (see `tick`)
        self.last_t = 0.0
        self.last_seq = 0
        self.damaged = 0  # number of ignored messages with impossible figures (an infinite time, a rank out of range)
        self._update_names: list[str] = []
        """Engines or optimizers that share the steps, in the order of their first messages."""
        self._by_uuid: dict[str, DeviceKey] = {}

    def device_of(self, rank: RankModel) -> telemetry.DeviceSample | None:
        """Return the latest sample of a rank's device, by uuid, else by host and index; the host's for a CPU rank."""
        hello = rank.hello
        if hello is None:
            return None
        if hello.device.kind == "cpu":
            return self.devices.get((hello.host, "host", 0))
        key = self._by_uuid.get(hello.device.uuid) if hello.device.uuid else None
        if key is None and not hello.device.uuid:
            key = (hello.host, "gpu", hello.device.index)
        return self.devices.get(key) if key else None

    @property
    def world_size(self) -> int:
        """Number of ranks: from ``Hello`` messages, or the number of ranks that have sent messages."""
        return max(self.info.world_size, len(self.ranks))

    @property
    def step(self) -> int:
        """The last step that every rank has finished (0 before the first)."""
        first = self.plan.first_step if self.plan else 0
        return max(first, min((rank.step for rank in self.ranks.values()), default=0))

    @property
    def reported_step(self) -> int:
        """The last step whose figures every rank has sent (0 before the first); heartbeats count steps before that."""
        return min((rank.last.step if rank.last else 0 for rank in self.ranks.values()), default=0)

    @property
    def leading_step(self) -> int:
        """The last step that any rank has finished."""
        return max((self.plan.first_step if self.plan else 0, *(rank.step for rank in self.ranks.values())))

    @property
    def complete_step(self) -> int:
        """The last step that all living ranks have finished, except those far behind the others."""
        leading = self.leading_step
        near = [rank.step for rank in self.ranks.values() if rank.alive and leading - rank.step <= _NEAR_STEPS]
        return min(near, default=leading)

    @property
    def moments(self) -> list[HistoryPoint]:
        """Training figures up to the last complete step; later ones are not yet means over all ranks."""
        found = self.training.course.moments(self.world_size, self.peak_flops)
        return found[: bisect_right(found, self.complete_step, key=lambda moment: moment.first_step)]

    @property
    def total_steps(self) -> int | None:
        """Planned steps of the run; None: not known."""
        return self.plan.total_steps if self.plan else None

    @property
    def rates(self) -> Rates:
        """Speed over the last few steps; of an ended run, the mean over all."""
        if self.ended and len(self.training.course):
            return self._mean_rates()
        return rates(self.ranks.values(), self.now, rests=self.rests)

    def _mean_rates(self) -> Rates:
        seconds, tokens, flops = self.training.course.mean_step
        if not seconds:
            return Rates()
        return Rates(1 / seconds, seconds, *(self.world_size * amount / seconds for amount in (tokens, flops)))

    @property
    def rests(self) -> bool:
        """Whether no step is due, because all are done or the run has another activity, and no rank is in trouble."""
        done = bool(self.total_steps) and self.reported_step >= (self.total_steps or 0)
        return self.ended or (
            (done or self.no_step_follows or self.training.activity is not None) and not self._is_standing
        )

    @property
    def _is_standing(self) -> bool:
        return any(rank.state in _STANDING for rank in self.ranks.values())

    @property
    def no_step_follows(self) -> bool:
        """Whether no further step follows, regardless of the plan."""
        return self.ended or self.training.early_stop is not None

    @property
    def seconds_left(self) -> float | None:
        """Seconds to the planned end at the recent speed; None without plan or speed, or if the run is blocked."""
        if not self.total_steps or self.no_step_follows or self._is_standing:
            return None
        pace = self.rates.seconds_per_step
        if not pace or self.plan is None:
            return None
        left = max(0, self.total_steps - self.step)
        if self.plan.evaluate_every or self.plan.checkpoint_every or self.plan.evaluate_at_end:
            return left * pace + seconds_of_pauses_left(self.training, self.plan, self.step)
        return left * (pace + self._pause_per_step())

    def _pause_per_step(self) -> float:
        steps = next((rank.steps for rank in self.ranks.values() if rank.steps), ())
        return sum(step.host_us - step.training_us for step in steps) / 1e6 / len(steps) if steps else 0.0

    @property
    def epoch(self) -> float | None:
        """Completed epochs; None if the plan has no number of epochs."""
        if self.plan is None or not self.plan.epochs or not self.plan.total_steps:
            return None
        return self.plan.epochs * self.step / self.plan.total_steps

    @property
    def peak_flops(self) -> float | None:
        """Data-sheet peak of a rank's device, FLOP/s, mean over ranks; None unless known for all."""
        peaks = [rank.peak_flops for rank in self.ranks.values()]
        known = [peak for peak in peaks if peak is not None]
        return sum(known) / len(known) if known and len(known) == len(peaks) else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of all ranks, at the speed of ``rates``; None if unknown."""
        peak, flops = self.peak_flops, self.rates.flops_per_second
        return flops / (peak * len(self.ranks)) if peak and flops else None

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state in ("finished", "failed", "stopped")

    @property
    def loss(self) -> float | None:
        """Mean loss over ranks of the last common step; None: not reported."""
        return mean_loss(
            [(step.loss, step.label_tokens) for step in self._at_step(self._common_number()) if step.loss is not None]
        )

    @property
    def losses_by_name(self) -> dict[str, float]:
        """The latest loss of each engine or optimizer, mean over ranks; empty if only one trains."""
        found: dict[str, float] = {}
        newest = self._common_number() if self._update_names else 0
        for number in range(newest, max(0, newest - FEWEST_STEPS), -1):
            if len(found) == len(self._update_names):
                break
            losses: dict[str, list[tuple[float, int]]] = {}
            for update in (update for step in self._at_step(number) for update in step.updates):
                if update.loss is not None and update.name not in found:
                    losses.setdefault(update.name, []).append((update.loss, 0))
            found |= {name: mean for name, known in losses.items() if (mean := mean_loss(known)) is not None}
        return {name: found[name] for name in self._update_names if name in found}

    def _common_number(self) -> int:
        lasts = [rank.last.step for rank in self.ranks.values() if rank.last is not None]
        lead = max(lasts, default=0)
        return min((step for step in lasts if lead - step < FEWEST_STEPS), default=0)

    def _at_step(self, number: int) -> Iterator[telemetry.Step]:
        for rank in self.ranks.values():
            step = next((step for step in reversed(rank.steps) if step.step <= number), rank.last)
            if step is not None and step.step == number:
                yield step

    @property
    def lr(self) -> float | None:
        """The latest learning rate."""
        return next((r.last.lr for r in self.ranks.values() if r.last and r.last.lr is not None), None)

    @property
    def grad_norm(self) -> float | None:
        """The latest gradient norm."""
        return next((r.last.grad_norm for r in self.ranks.values() if r.last and r.last.grad_norm is not None), None)

    @property
    def peak(self) -> Peak | None:
        """The highest peak over all ranks, with its rank, phase and step."""
        return max((rank.peak for rank in self.ranks.values() if rank.peak), key=lambda peak: peak.bytes, default=None)

    @property
    def fit(self) -> Fit:
        """Whether the run fits its devices."""
        return fit(self.ranks.values())

    @property
    def has_jobs(self) -> bool:
        """Whether the run has had more than one job."""
        return len(self.jobs) > 1

    def losses_of(self, job: int) -> list[float]:
        """Return the known losses of a job, means over ranks pooled into a sparkline."""
        return self.training.course.loss_means(SPARK) if job == self.job else self.job_losses.get(job, [])

    def rank_states(self) -> dict[control.RankStateName, int]:
        return dict(Counter(rank.state for rank in self.ranks.values()))

    def apply(self, frame: Frame) -> bool:
        """Fold one frame; False if it was already applied (its number is not above the last one's)."""
        seq = frame.seq
        if seq <= self.last_seq:
            return False
        self.last_seq = seq
        if not 0.0 <= frame.t < _FAR_FUTURE:
            self.damaged += 1
            return True
        t = self.last_t = frame.t
        if t > self.now:
            self.now = t
        if not self.first_t:
            self.first_t = frame.t
        handler = self._HANDLERS.get(type(frame.message))
        if handler is not None:
            try:
                handler(self, frame.message, frame)
            except (ArithmeticError, ValueError):
                self.damaged += 1
        return True

    def tick(self, now: float) -> None:
        """Advance this state's time without a frame: to a live clock, or a replay's position."""
        if now > self.now:
            self.now = now

    def rank(self, rank: int) -> RankModel:
        """Return the state of a rank, created on the first message; raise ``ValueError`` for an invalid number."""
        found = self.ranks.get(rank)
        if found is None:
            if not 0 <= rank < MAX_RANKS:
                raise ValueError(f"{rank} is no rank")
            keep = min(RECENT_STEPS, max(FEWEST_STEPS, _ALL_STEPS // max(self.info.world_size, 1)))
            found = self.ranks[rank] = RankModel(rank, keep)
            if len(self.ranks) > 1 and rank != max(self.ranks):
                self.ranks = dict(sorted(self.ranks.items()))
        return found

    def _step(self, step: telemetry.Step, frame: Frame) -> None:
        rank = self.ranks.get(step.rank) or self.rank(step.rank)
        if not rank.on_step(step):
            return
        self.training.on_step(step, point_of(step, frame.t))
        self._update_names += [each.name for each in step.updates if each.name not in self._update_names]
        if self.state == "starting":
            self.state = "training"
            self.state_time = frame.t

    def _hello(self, hello: telemetry.Hello, frame: Frame) -> None:
        info = self.info
        info.world_size = hello.world_size
        self.rank(hello.rank).on_hello(hello)
        for name in ("model", "precision", "framework", "backend"):
            setattr(info, name, getattr(hello, name) or getattr(info, name))
        for name in ("zero_stage", "micro_batch", "grad_accumulation"):
            if (value := getattr(hello, name)) is not None:
                setattr(info, name, value)
        parts = self._stages(hello)
        info.parameters = sum(each.parameters for each in parts) or info.parameters
        info.trainable_parameters = sum(each.trainable_parameters for each in parts) or info.trainable_parameters

    def _stages(self, hello: telemetry.Hello) -> Iterable[telemetry.Hello]:
        """Return the hellos that together have the whole model's parameters: one, or one of each pipeline stage."""
        if hello.pipeline_stage is None:
            return (hello,)
        known = (rank.hello for rank in self.ranks.values() if rank.hello is not None)
        return {each.pipeline_stage: each for each in known if each.pipeline_stage is not None}.values()

    def _job(self, job: hosts.Job, frame: Frame) -> None:
        known = self.jobs.get(job.number)
        self.jobs[job.number] = job
        if known is None and len(self.jobs) > 1:
            self.jobs = dict(sorted(self.jobs.items()))
        if job.shown and not job.is_over and job.number != self.job:
            if self.job:
                self._begin_job(job)
            self.job = job.number

    def _begin_job(self, job: hosts.Job) -> None:
        """Reset for a new job; the state of the run and its hosts is kept."""
        self.job_losses[self.job] = self.losses_of(self.job)
        while len(self.job_losses) > KEPT_JOBS:
            del self.job_losses[next(iter(self.job_losses))]
        self.training = Training()
        self.plan, self._update_names = None, []
        info = self.info
        info.world_size = job.world_size
        info.model = info.precision = info.framework = info.backend = ""
        info.parameters = info.trainable_parameters = 0
        info.zero_stage = info.micro_batch = info.grad_accumulation = None
        self.ranks = {number: rank for number, rank in self.ranks.items() if number < job.world_size}
        for rank in self.ranks.values():
            rank.begin_job(job.started)

    def _device(self, sample: telemetry.DeviceSample, frame: Frame) -> None:
        key = (sample.host, sample.kind, sample.index)
        if key not in self.devices and len(self.devices) >= _MOST_DEVICES:
            raise ValueError("more devices than a run can have")
        self.devices[key] = sample
        if sample.uuid:
            self._by_uuid[sample.uuid] = key

    def _oom(self, oom: telemetry.Oom, frame: Frame) -> None:
        self.rank(oom.rank).oom = oom
        self.ooms.put(oom)

    def _stacks(self, stacks: telemetry.Stacks, frame: Frame) -> None:
        rank = self.rank(stacks.rank)
        if stacks.taken_by == "py-spy":
            rank.native_stacks = stacks
        else:
            rank.stacks = stacks

    def _run_state(self, state: control.RunState, frame: Frame) -> None:
        self.state, self.state_text = state.state, state.text
        self.state_time, self.exit_code = state.time, state.exit_code

    def _alert(self, alert: control.Alert, frame: Frame) -> None:
        self.alerts.put(alert)
        if alert.kind not in MARKED_ALERTS:
            return
        mark = Mark(alert.time, alert.kind, alert.severity, alert.id)
        for rank in {*alert.ranks, *(() if alert.rank is None else (alert.rank,))}:
            self.rank(rank).timeline.mark(mark)

    def _host(self, host: hosts.HostState, frame: Frame) -> None:
        if host.host in self.hosts or len(self.hosts) < MAX_RANKS:
            self.hosts[host.host] = host
        for rank in host.ranks:
            if rank in self.ranks:
                self.rank(rank).clock_offset = host.clock_offset or 0.0

    # Functions, not bound methods: a model that refers to itself would survive a seek until garbage collection.
    _HANDLERS: ClassVar[dict[type, Callable[["RunModel", Any, Frame], None]]] = {
        telemetry.Step: _step,
        telemetry.Heartbeat: lambda run, beat, _: run.rank(beat.rank).on_beat(beat),
        telemetry.Hello: _hello,
        telemetry.Plan: lambda run, plan, _: setattr(run, "plan", plan),
        telemetry.DeviceSample: _device,
        telemetry.LogLine: lambda run, line, frame: run.logs.put(frame.seq, line),
        telemetry.AllocatorEvents: lambda run, events, _: run.rank(events.rank).allocator.on_events(events),
        telemetry.SnapshotTaken: lambda run, snapshot, _: run.rank(snapshot.rank).snapshots.append(snapshot),
        memory.Composition: lambda run, made, _: run.rank(made.rank).memory.on_composition(made),
        memory.Cause: lambda run, cause, _: run.rank(cause.rank).memory.on_cause(cause),
        telemetry.Oom: _oom,
        OomReport: lambda run, report, _: run.ooms.report(report),
        telemetry.Failure: lambda run, failure, _: setattr(run.rank(failure.rank), "failure", failure),
        telemetry.Stacks: _stacks,
        telemetry.Closing: lambda run, closing, _: run.rank(closing.rank).on_closing(closing),
        telemetry.Goodbye: lambda run, goodbye, _: setattr(run.rank(goodbye.rank), "goodbye", goodbye),
        control.RankState: lambda run, state, _: run.rank(state.rank).on_state(state),
        control.RunState: _run_state,
        control.Alert: _alert,
        control.HubStats: lambda run, stats, _: setattr(run, "hub", stats),
        hosts.HostState: _host,
        control.Result: lambda run, result, _: run.results.append(result),
        hosts.Job: _job,
        telemetry.Evaluation: lambda run, evaluation, _: run.training.on_evaluation(evaluation),
        telemetry.Checkpoint: lambda run, checkpoint, _: run.training.on_checkpoint(checkpoint),
        telemetry.EarlyStop: lambda run, stop, _: run.training.on_early_stop(stop),
        telemetry.Activity: lambda run, activity, _: run.training.on_activity(activity),
        Prediction: lambda run, prediction, _: setattr(run, "prediction", prediction),
    }


def status(model: RunModel) -> dict[str, Any]:
    """Return the state of a run as JSON values: bytes, seconds, and seconds since the epoch."""
    info, peak, fit, training, plan = model.info, model.peak, model.fit, model.training, model.plan
    speed = ("steps_per_second", "seconds_per_step", "tokens_per_second")
    return {
        **_fields(info, "id", "name", "kind", "command", "created"),
        "time": model.now,
        **_fields(model, "state", "state_text", "exit_code"),
        **_fields(info, "model", "parameters", "trainable_parameters", "framework", "backend"),
        **_fields(info, "zero_stage", "precision"),
        **_fields(model, "world_size", "step", "leading_step", "total_steps", "epoch"),
        "epochs": plan.epochs if plan else None,
        "loss": model.loss,
        "losses": model.losses_by_name,
        **_fields(model, "lr", "grad_norm"),
        **_fields(model.rates, *speed),
        **_fields(model, "mfu", "peak_flops"),
        "evaluation": _evaluation(training.evaluation),
        "best_evaluation": _evaluation(training.best),
        "checkpoint": _whole(training.checkpoints[-1]) if training.checkpoints else None,
        "early_stop": _whole(training.early_stop),
        "activity": training.activity and msgspec.to_builtins(training.activity),
        "seconds_left": model.seconds_left,
        "evaluations_left": _evaluations_left(model),
        "evaluation_seconds": training.seconds_of("eval"),
        "peak": peak and {**_fields(peak, "bytes", "rank", "phase", "step"), "after_last_step": peak.after},
        "fit": _fields(fit, "verdict", "capacity_bytes", "rank"),
        "output_dir": plan.output_dir if plan else "",
        "job": model.job or None,
        "jobs": [_whole(job) for job in model.jobs.values()],
        "rank_states": dict(model.rank_states()),
        "ranks": [_rank(rank, model.device_of(rank), model) for rank in model.ranks.values()],
        "alerts": [msgspec.to_builtins(alert) for alert in model.alerts.unresolved()],
        "hosts": [msgspec.to_builtins(host) for host in model.hosts.values()],
        "hub": model.hub and msgspec.to_builtins(model.hub),
    }


def _fields(of: object, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def _evaluation(evaluation: Evaluation | None) -> Any:
    return None if evaluation is None else {**_whole(evaluation), "perplexity": perplexity_of(evaluation)}


def _evaluations_left(model: RunModel) -> int | None:
    plan = model.plan
    if plan is None or not (plan.evaluate_every or plan.evaluate_at_end):
        return None
    if model.training.early_stop is not None:
        return 0
    return times_left(plan.evaluate_every, plan.evaluate_at_end, model.step, plan.total_steps)


def _whole(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _whole(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]  # pyright: ignore[reportUnknownVariableType]
    return value


def _rank(rank: RankModel, device: DeviceSample | None, model: RunModel) -> dict[str, Any]:
    hello, shares, peak = rank.hello, rank.shares, rank.peak
    own = rates([rank], model.now, rests=model.rests)
    return {
        **_fields(rank, "rank", "state"),
        "text": rank.state_text,
        "since": rank.state_since,
        **_fields(rank, "step", "phase"),
        "host": hello.host if hello else "",
        "pid": hello.pid if hello else 0,
        **_fields(rank, "exit_code", "signal"),
        "memory_measure": hello.memory_measure if hello else "",
        **_fields(rank, "allocated_bytes", "reserved_bytes", "resident_bytes", "capacity_bytes"),
        "peak": peak and _fields(peak, "bytes", "phase", "step"),
        "step_ms": shares.step_ms,
        "shares": shares.parts,
        "shares_clock": shares.clock,
        "device": device and msgspec.to_builtins(device),
        "dropped": rank.dropped,
        "tokens_per_second": own.tokens_per_second,
        "mfu": own.flops_per_second / rank.peak_flops if rank.peak_flops and own.flops_per_second else None,
    }


_ACTIVITY_SECONDS = 1.0  # seconds after which a phase without an `activity` message is named in the summary
_PHASE_ACTIVITIES = {"eval": "evaluation", "checkpoint": "checkpoint"}


def activity_words(model: RunModel) -> str:
    """Return the run's activity besides steps, with its progress; empty while it trains, or after its end."""
    if model.state not in ("starting", "training"):
        return ""
    activity = model.training.activity
    if activity is not None:
        part = f" {activity.done:,}/{activity.total:,}" if activity.total else ""
        return f"{sanitize(activity.name, 20)}{part}"
    for rank in model.ranks.values():
        beat = rank.beat
        if beat is not None and beat.phase in _PHASE_ACTIVITIES and rank.alive:
            begun = beat.phase_started + rank.clock_offset
            return _PHASE_ACTIVITIES[beat.phase] if model.now - begun >= _ACTIVITY_SECONDS else ""
    return ""


def epoch_words(model: RunModel) -> str:
    """Return completed and planned epochs: ``1.25 / 3``; empty if unknown."""
    if model.epoch is None or model.plan is None or not model.plan.epochs:
        return ""
    planned = f"{model.plan.epochs:.2f}".rstrip("0").rstrip(".")
    return f"{model.epoch:.2f} / {planned}"


def early_stop_words(stop: EarlyStop) -> str:
    """Return the reason of an early end of training: ``stopped early at step 14: no lower loss in ...``."""
    words = f"stopped early at step {stop.step:,}: no lower loss in {counted(stop.evaluations, 'evaluation')}"
    if stop.best_loss is not None:
        words += f"; best {stop.best_loss:.4f}" + (f" at step {stop.best_step:,}" if stop.best_step else "")
    return words


class TerminalNotices:
    """Finds events of a run that cause a notification, from its creation on."""

    def __init__(self, run: RunDir) -> None:
        notify = read_notify(run)
        wanted = notify.events if notify is not None and TERMINAL in notify.targets else []
        self._since = time.time()
        self._notices = Notices(run.id, "", wanted, self._since) if wanted else None
        self._version = 0

    def fresh(self, model: RunModel) -> Iterator[Notice]:
        """Yield the notifications for changes of the model since the last call."""
        if self._notices is None:
            return
        events: list[control.Alert | control.RunState] = []
        if model.alerts.version != self._version:
            self._version = model.alerts.version
            events += model.alerts
        if model.ended and model.state_time >= self._since:
            events.append(control.RunState(model.state, model.state_time, model.state_text, model.exit_code))
        yield from filter(None, map(self._notices.of, events))


def held_since(model: RunModel, case: OomCase) -> float:
    """Return when the rank began to wait at this error, seconds since the epoch; 0 if it does not."""
    rank = model.ranks.get(case.oom.rank)
    latest = model.ooms.of_rank(case.oom.rank)
    if rank is None or not case.oom.held or not rank.alive or latest is None or latest.key != case.key:
        return 0.0
    if rank.beat is not None and rank.beat.time > case.oom.time:
        return rank.beat.held_since
    return rank.state_since or case.oom.time if rank.state == "held" else 0.0


def held_cases(model: RunModel) -> list[OomCase]:
    """List the errors at which a rank waits now."""
    return [case for case in model.ooms.ordered() if held_since(model, case)]


def first_to_show(model: RunModel, rank: int | None = None) -> OomCase | None:
    """Return the error to show first: that rank's, else that of a held rank, else the first of the latest group.

    When one rank fails, others often follow within seconds; the first one is the most informative.
    """
    own = model.ooms.of_rank(rank) if rank is not None else None
    if own is not None:
        return own
    if held := held_cases(model):
        return held[0]
    cases = model.ooms.ordered()
    return next((case for case in cases if case.oom.time >= cases[-1].oom.time - _TOGETHER_S), None)


_TOGETHER_S = 120.0  # errors of several ranks within this many seconds form a group


class HeldWatch:
    """Reports each error at which a rank has begun to wait, once."""

    def __init__(self) -> None:
        self._reported: set[CaseKey] = set()

    def fresh(self, model: RunModel) -> OomCase | None:
        """Return an unreported error at which a rank waits; all others then count as reported."""
        cases = [case for case in held_cases(model) if case.key not in self._reported]
        self._reported.update(case.key for case in cases)
        return cases[0] if cases else None


def hold_words(model: RunModel, case: OomCase) -> list[str]:
    """Return text about the hold: until when it lasts, and the state of the other ranks."""
    since, oom = held_since(model, case), case.oom
    if not since:
        return []
    lines = [f"rank {oom.rank} waits in the failing frame, for {duration(max(1, int(model.now - since)))} now"]
    if oom.hold_seconds:
        left = since + oom.hold_seconds - model.now
        lines[0] += f"; it is released by itself in {duration(max(0.0, left))} (--hold-timeout)"
    if oom.others:
        lines.append(oom.others)
    if oom.peer_timeout_s:
        left = oom.time + oom.peer_timeout_s - model.now
        timeout = duration(oom.peer_timeout_s)
        lines.append(
            f"their process group gives up {timeout} after it began to wait, in about {duration(left)}"
            if left > 0
            else f"their process group's timeout ({timeout}) has passed; they may have ended"
        )
    elif not oom.others and model.world_size > 1:
        lines.append("the other ranks wait in their next collective until their process group's timeout ends them")
    return lines
