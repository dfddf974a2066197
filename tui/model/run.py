"""A run's state as a fold over the frames of its stream, live or replayed."""

from collections.abc import Callable, Iterable
from math import isfinite
from typing import Any, ClassVar

from ...protocol.messages import control, hosts, jobs, memory, telemetry
from ...protocol.messages.bounds import MAX_RANKS
from ...protocol.messages.oom import OomReport
from ...protocol.messages.prediction import Prediction
from ...protocol.messages.wire import Frame
from ...protocol.recording.curves import point_of
from .rank import RECENT_STEPS, RankModel
from .run_state import FEWEST_STEPS, RunState
from .run_state import RunInfo as RunInfo
from .series import StepSeries
from .timeline import Mark
from .training import Training

_MOST_DEVICES = 4_096
_FAR_FUTURE = 1e11
"""Upper bound of valid times, seconds since the epoch."""

_ALL_STEPS = 20_000
"""Maximum number of steps kept in full for all ranks together (about 40 MB)."""

KEPT_JOBS = 64
"""Maximum number of jobs whose losses are kept."""

MARKED_ALERTS = ("spike", "hang", "oom", "died", "growth", "slow", "failure")
"""Kinds of alert that are marked in the timelines of their ranks."""


class RunModel(RunState):
    """A run's state, changed by ``apply`` with each frame, independent of the frames' source."""

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
        self.version += 1
        return True

    def tick(self, now: float) -> None:
        """Advance this state's time without a frame: to a live clock, or a replay's position."""
        if now > self.now:
            self.now = now

    def rank(self, rank: int) -> RankModel:
        """Return the state of a rank, created on the first message.

        Raises:
            ValueError: it is not a valid rank.
        """
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
        if step.loss is not None and isfinite(step.loss):
            self.losses.add(step.step, step.loss, step.label_tokens or 1)
        if step.updates:
            self._update_names += [each.name for each in step.updates if each.name not in self._update_names]
        if self.state == "starting":
            self.state = "training"
            self.state_time = frame.t

    def _hello(self, hello: telemetry.Hello, frame: Frame) -> None:
        info = self.info
        info.world_size = hello.world_size
        self.rank(hello.rank).on_hello(hello)
        info.model = hello.model or info.model
        info.precision = hello.precision or info.precision
        info.framework = hello.framework or info.framework
        info.backend = hello.backend or info.backend
        parts = self._stages(hello)
        info.parameters = sum(each.parameters for each in parts) or info.parameters
        info.trainable_parameters = sum(each.trainable_parameters for each in parts) or info.trainable_parameters
        info.zero_stage = hello.zero_stage if hello.zero_stage is not None else info.zero_stage
        info.micro_batch = hello.micro_batch if hello.micro_batch is not None else info.micro_batch
        if hello.grad_accumulation is not None:
            info.grad_accumulation = hello.grad_accumulation

    def _stages(self, hello: telemetry.Hello) -> Iterable[telemetry.Hello]:
        """Return the hellos that together have the whole model's parameters: one, or one of each pipeline stage."""
        if hello.pipeline_stage is None:
            return (hello,)
        known = (rank.hello for rank in self.ranks.values() if rank.hello is not None)
        return {each.pipeline_stage: each for each in known if each.pipeline_stage is not None}.values()

    def _job(self, job: jobs.Job, frame: Frame) -> None:
        known = self.jobs.get(job.number)
        self.jobs[job.number] = job
        if known is None and len(self.jobs) > 1:
            self.jobs = dict(sorted(self.jobs.items()))
        if job.shown and not job.is_over and job.number != self.job:
            if self.job:
                self._begin_job(job)
            self.job = job.number

    def _begin_job(self, job: jobs.Job) -> None:
        """Reset for a new job; the state of the run and its hosts is kept."""
        self.job_losses[self.job] = self.losses
        while len(self.job_losses) > KEPT_JOBS:
            del self.job_losses[next(iter(self.job_losses))]
        self.losses = StepSeries()
        self.training = Training()
        self.plan = None
        info = self.info
        info.world_size = job.world_size
        info.model = info.precision = info.framework = info.backend = ""
        info.parameters = info.trainable_parameters = 0
        self._update_names = []
        info.zero_stage = info.micro_batch = info.grad_accumulation = None
        self.ranks = {number: rank for number, rank in self.ranks.items() if number < job.world_size}
        for rank in self.ranks.values():
            rank.begin_job(job.started)

    def _plan(self, plan: telemetry.Plan, frame: Frame) -> None:
        self.plan = plan

    def _predicted(self, prediction: Prediction, frame: Frame) -> None:
        self.prediction = prediction

    def _device(self, sample: telemetry.DeviceSample, frame: Frame) -> None:
        key = (sample.host, sample.kind, sample.index)
        if key not in self.devices and len(self.devices) >= _MOST_DEVICES:
            raise ValueError("more devices than a run can have")
        self.devices[key] = sample
        if sample.uuid:
            self._by_uuid[sample.uuid] = key

    def _oom(self, oom: telemetry.Oom, frame: Frame) -> None:
        self._touch(oom.rank).oom = oom
        self.ooms.put(oom)

    def _failure(self, failure: telemetry.Failure, frame: Frame) -> None:
        self._touch(failure.rank).failure = failure

    def _stacks(self, stacks: telemetry.Stacks, frame: Frame) -> None:
        rank = self._touch(stacks.rank)
        if stacks.taken_by == "py-spy":
            rank.native_stacks = stacks
        else:
            rank.stacks = stacks

    def _goodbye(self, goodbye: telemetry.Goodbye, frame: Frame) -> None:
        self._touch(goodbye.rank).goodbye = goodbye

    def _run_state(self, state: control.RunState, frame: Frame) -> None:
        self.state, self.state_text = state.state, state.text
        self.state_time, self.exit_code = state.time, state.exit_code

    def _alert(self, alert: control.Alert, frame: Frame) -> None:
        self.alerts.put(alert)
        if alert.kind not in MARKED_ALERTS:
            return
        mark = Mark(alert.time, alert.kind, alert.severity, alert.id)
        ranks = set(alert.ranks) if alert.ranks else set[int]()
        if alert.rank is not None:
            ranks.add(alert.rank)
        for rank in ranks:
            found = self.ranks.get(rank) or self.rank(rank)
            found.version += 1
            found.timeline.mark(mark)

    def _host(self, host: hosts.HostState, frame: Frame) -> None:
        if host.host in self.hosts or len(self.hosts) < MAX_RANKS:
            self.hosts[host.host] = host
        for rank in host.ranks:
            if rank in self.ranks:
                self._touch(rank).clock_offset = host.clock_offset or 0.0

    def _hub_stats(self, stats: control.HubStats, frame: Frame) -> None:
        self.hub = stats

    def _touch(self, rank: int) -> RankModel:
        found = self.rank(rank)
        found.version += 1
        return found

    # Functions, not bound methods: a model that refers to itself would survive a seek until garbage collection.
    _HANDLERS: ClassVar[dict[type, Callable[["RunModel", Any, Frame], None]]] = {
        telemetry.Step: _step,
        telemetry.Heartbeat: lambda run, beat, _: run.rank(beat.rank).on_beat(beat),
        telemetry.Hello: _hello,
        telemetry.Plan: _plan,
        telemetry.DeviceSample: _device,
        telemetry.LogLine: lambda run, line, frame: run.logs.put(frame.seq, line),
        telemetry.AllocatorEvents: lambda run, events, _: run._touch(events.rank).allocator.on_events(events),
        telemetry.SnapshotTaken: lambda run, snapshot, _: run._touch(snapshot.rank).snapshots.append(snapshot),
        memory.Composition: lambda run, made, _: run._touch(made.rank).memory.on_composition(made),
        memory.Cause: lambda run, cause, _: run._touch(cause.rank).memory.on_cause(cause),
        telemetry.Oom: _oom,
        OomReport: lambda run, report, _: run.ooms.report(report),
        telemetry.Failure: _failure,
        telemetry.Stacks: _stacks,
        telemetry.Closing: lambda run, closing, _: run.rank(closing.rank).on_closing(closing),
        telemetry.Goodbye: _goodbye,
        control.RankState: lambda run, state, _: run.rank(state.rank).on_state(state),
        control.RunState: _run_state,
        control.Alert: _alert,
        control.HubStats: _hub_stats,
        hosts.HostState: _host,
        control.Result: lambda run, result, _: run.results.append(result),
        jobs.Job: _job,
        telemetry.Evaluation: lambda run, evaluation, _: run.training.on_evaluation(evaluation),
        telemetry.Checkpoint: lambda run, checkpoint, _: run.training.on_checkpoint(checkpoint),
        telemetry.EarlyStop: lambda run, stop, _: run.training.on_early_stop(stop),
        telemetry.Activity: lambda run, activity, _: run.training.on_activity(activity),
        Prediction: _predicted,
    }
