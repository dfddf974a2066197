"""The state of a run: a plain fold over the frames of its one stream, live or replayed."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar

from ...protocol import control, hosts, memory, telemetry
from ...protocol.bounds import MAX_RANKS
from ...protocol.oom import OomReport
from ...protocol.wire import Frame
from .alerts import AlertBook
from .fit import Fit, fit
from .logs import LogBook
from .oom import OomBook
from .rank import RECENT_STEPS, Peak, RankModel
from .rates import Rates, rates
from .series import StepSeries
from .timeline import Mark

DeviceKey = tuple[str, str, int]
"""Host, kind (``gpu`` or ``host``) and index."""

_MOST_DEVICES = 4_096
_FAR_FUTURE = 1e11
"""No time of a message is beyond it, in seconds since the epoch."""

_ALL_STEPS = 20_000
_FEWEST_STEPS = 40
"""Recent steps kept whole: of all ranks together (some 40 MB), and of each rank at the least."""

_STANDING = ("hung", "stopped", "gone", "unreachable", "held")
"""States of a rank in which the run does not go on, however fast it was."""

MARKED_ALERTS = ("spike", "hang", "oom", "died", "growth", "slow", "failure")
"""Kinds of alert that are marked in the timelines of their ranks."""


@dataclass(slots=True)
class RunInfo:
    """What is known of a run besides its state; filled from its directory, its recording and its ranks' hellos."""

    id: str = ""
    name: str = ""
    kind: str = ""
    """``demo``, ``train``, ``run`` or ``watch``."""
    command: list[str] = field(default_factory=list[str])
    created: float = 0.0
    host: str = ""
    model: str = ""
    zero_stage: int | None = None
    precision: str = ""
    framework: str = ""
    backend: str = ""
    parameters: int = 0
    world_size: int = 0
    micro_batch: int | None = None
    grad_accumulation: int | None = None


class RunModel:
    """Everything the screens draw. ``apply`` folds a frame; nothing here knows where frames come from."""

    def __init__(self, info: RunInfo | None = None) -> None:
        self.info = info or RunInfo()
        self.state: control.RunStateName = "starting"
        self.state_text = ""
        self.state_time = 0.0
        self.exit_code: int | None = None
        self.plan: telemetry.Plan | None = None
        self.ranks: dict[int, RankModel] = {}
        """By rank, in rank order."""
        self.devices: dict[DeviceKey, telemetry.DeviceSample] = {}
        """The latest sample of each device and host."""
        self.alerts = AlertBook()
        self.logs = LogBook()
        self.ooms = OomBook()
        self.hub: control.HubStats | None = None
        self.hosts: dict[str, hosts.HostState] = {}
        """The run's other hosts, by name."""
        self.results: deque[control.Result] = deque(maxlen=100)
        """What commands came to, newest last."""
        self.losses = StepSeries()
        """Mean over ranks of each step's loss, over the whole run."""
        self.first_t = 0.0
        """Hub time of the first frame; 0 before any."""
        self.now = 0.0
        """The time this state is of, seconds since the epoch: the latest frame's, or later (see ``tick``)."""
        self.last_t = 0.0
        """Hub time of the latest frame."""
        self.last_seq = 0
        self.version = 0
        """Moves with every frame."""
        self.damaged = 0
        """Messages with figures that cannot be (an infinite time, a rank beyond all ranks); they are left out."""
        self._by_uuid: dict[str, DeviceKey] = {}

    def apply(self, frame: Frame) -> bool:
        """Fold one frame; False when it was already in (its number is not above the last one's)."""
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
        """Move this state's time on without a frame: a live clock, or a replay's position."""
        if now > self.now:
            self.now = now

    def rank(self, rank: int) -> RankModel:
        """Return the state of a rank, making it when it is first heard of.

        Raises:
            ValueError: it is no rank.
        """
        found = self.ranks.get(rank)
        if found is None:
            if not 0 <= rank < MAX_RANKS:
                raise ValueError(f"{rank} is no rank")
            keep = min(RECENT_STEPS, max(_FEWEST_STEPS, _ALL_STEPS // max(self.info.world_size, 1)))
            found = self.ranks[rank] = RankModel(rank, keep)
            if len(self.ranks) > 1 and rank != max(self.ranks):
                self.ranks = dict(sorted(self.ranks.items()))
        return found

    def device_of(self, rank: RankModel) -> telemetry.DeviceSample | None:
        """Find the latest sample of a rank's device: by uuid, else by host and index; of the host for a CPU rank."""
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
        """Ranks of the run: as the hellos say, or as many as were heard of."""
        return max(self.info.world_size, len(self.ranks))

    @property
    def step(self) -> int:
        """The last step that every rank has finished (0 before the first)."""
        return min((rank.step for rank in self.ranks.values()), default=0)

    @property
    def leading_step(self) -> int:
        """The last step that any rank has finished."""
        return max((rank.step for rank in self.ranks.values()), default=0)

    @property
    def total_steps(self) -> int | None:
        """Steps the run means to make; None when nobody said."""
        return self.plan.total_steps if self.plan else None

    @property
    def rates(self) -> Rates:
        """Speed over the recent steps."""
        return rates(self.ranks.values(), self.now)

    @property
    def seconds_left(self) -> float | None:
        """Time to the planned end at the recent speed; None without a plan or a speed, or when it does not go on."""
        if not self.total_steps or self.ended or any(rank.state in _STANDING for rank in self.ranks.values()):
            return None
        pace = self.rates.seconds_per_step
        if not pace:
            return None
        return max(0, self.total_steps - self.step) * pace

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.state in ("finished", "failed", "stopped")

    @property
    def loss(self) -> float | None:
        """The last step's loss, mean over the ranks that have one; None when no rank tells."""
        found = [rank.last.loss for rank in self.ranks.values() if rank.last and rank.last.loss is not None]
        return sum(found) / len(found) if found else None

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
    def stacks(self) -> dict[int, telemetry.Stacks]:
        """The latest stacks of each rank that has any."""
        return {rank.rank: rank.stacks for rank in self.ranks.values() if rank.stacks is not None}

    def rank_states(self) -> dict[control.RankStateName, int]:
        """Count the ranks in each state; states no rank is in are left out."""
        counts: dict[control.RankStateName, int] = {}
        for rank in self.ranks.values():
            counts[rank.state] = counts.get(rank.state, 0) + 1
        return counts

    def _step(self, step: telemetry.Step, frame: Frame) -> None:
        rank = self.ranks.get(step.rank) or self.rank(step.rank)
        rank.on_step(step)
        if step.loss is not None and isfinite(step.loss):
            self.losses.add(step.step, step.loss)
        if self.state == "starting":
            self.state = "training"
            self.state_time = frame.t

    def _beat(self, beat: telemetry.Heartbeat, frame: Frame) -> None:
        self.rank(beat.rank).on_beat(beat)

    def _hello(self, hello: telemetry.Hello, frame: Frame) -> None:
        info = self.info
        info.world_size = hello.world_size
        self.rank(hello.rank).on_hello(hello)
        info.model = hello.model or info.model
        info.precision = hello.precision or info.precision
        info.framework = hello.framework or info.framework
        info.backend = hello.backend or info.backend
        info.parameters = hello.parameters or info.parameters
        info.zero_stage = hello.zero_stage if hello.zero_stage is not None else info.zero_stage
        info.micro_batch = hello.micro_batch if hello.micro_batch is not None else info.micro_batch
        if hello.grad_accumulation is not None:
            info.grad_accumulation = hello.grad_accumulation

    def _plan(self, plan: telemetry.Plan, frame: Frame) -> None:
        self.plan = plan

    def _device(self, sample: telemetry.DeviceSample, frame: Frame) -> None:
        key = (sample.host, sample.kind, sample.index)
        if key not in self.devices and len(self.devices) >= _MOST_DEVICES:
            raise ValueError("more devices than a run can have")
        self.devices[key] = sample
        if sample.uuid:
            self._by_uuid[sample.uuid] = key

    def _log(self, line: telemetry.LogLine, frame: Frame) -> None:
        self.logs.put(frame.seq, line)

    def _events(self, events: telemetry.AllocatorEvents, frame: Frame) -> None:
        self._touch(events.rank).allocator.on_events(events)

    def _snapshot(self, snapshot: telemetry.SnapshotTaken, frame: Frame) -> None:
        self._touch(snapshot.rank).snapshots.append(snapshot)

    def _composition(self, composition: memory.Composition, frame: Frame) -> None:
        self._touch(composition.rank).memory.on_composition(composition)

    def _cause(self, cause: memory.Cause, frame: Frame) -> None:
        self._touch(cause.rank).memory.on_cause(cause)

    def _oom(self, oom: telemetry.Oom, frame: Frame) -> None:
        self._touch(oom.rank).oom = oom
        self.ooms.put(oom)

    def _oom_report(self, report: OomReport, frame: Frame) -> None:
        self.ooms.report(report)

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

    def _rank_state(self, state: control.RankState, frame: Frame) -> None:
        self.rank(state.rank).on_state(state)

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
            if alert.kind == "spike":
                found.spike_step = alert.step

    def _host(self, host: hosts.HostState, frame: Frame) -> None:
        if host.host in self.hosts or len(self.hosts) < MAX_RANKS:
            self.hosts[host.host] = host
        for rank in host.ranks:
            if rank in self.ranks:
                self._touch(rank).clock_offset = host.clock_offset or 0.0

    def _hub_stats(self, stats: control.HubStats, frame: Frame) -> None:
        self.hub = stats

    def _result(self, result: control.Result, frame: Frame) -> None:
        self.results.append(result)

    def _touch(self, rank: int) -> RankModel:
        found = self.rank(rank)
        found.version += 1
        return found

    # Functions and not bound methods: a model that refers to itself would outlive every seek until the collector runs.
    _HANDLERS: ClassVar[dict[type, Callable[["RunModel", Any, Frame], None]]] = {
        telemetry.Step: _step,
        telemetry.Heartbeat: _beat,
        telemetry.Hello: _hello,
        telemetry.Plan: _plan,
        telemetry.DeviceSample: _device,
        telemetry.LogLine: _log,
        telemetry.AllocatorEvents: _events,
        telemetry.SnapshotTaken: _snapshot,
        memory.Composition: _composition,
        memory.Cause: _cause,
        telemetry.Oom: _oom,
        OomReport: _oom_report,
        telemetry.Failure: _failure,
        telemetry.Stacks: _stacks,
        telemetry.Goodbye: _goodbye,
        control.RankState: _rank_state,
        control.RunState: _run_state,
        control.Alert: _alert,
        control.HubStats: _hub_stats,
        hosts.HostState: _host,
        control.Result: _result,
    }
