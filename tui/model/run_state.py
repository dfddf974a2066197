"""The state of a run, and figures derived from it: progress, speed, losses, peaks."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...protocol.messages import control, hosts, jobs, telemetry
from ...protocol.messages.prediction import Prediction
from ...protocol.recording.curves import mean_loss
from .alerts import AlertHistory
from .capacity import Fit, fit
from .logs import LogHistory
from .oom import OomCases
from .rank import Peak, RankModel
from .rates import Rates, mean_rates, rates
from .series import StepSeries
from .training import HistoryPoint, Training, seconds_of_pauses_left

DeviceKey = tuple[str, str, int]
"""Host, kind (``gpu`` or ``host``) and index."""

FEWEST_STEPS = 40
"""Minimum number of recent steps kept in full per rank."""

_NEAR_STEPS = 4
"""Maximum difference in steps between synchronous ranks of one training."""

_STANDING = ("hung", "stopped", "gone", "unreachable", "held")
"""Rank states in which the run makes no progress."""


@dataclass(slots=True)
class RunInfo:
    """Information about a run besides its state, from its directory, recording and ranks' ``Hello`` messages."""

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
    trainable_parameters: int = 0
    world_size: int = 0
    micro_batch: int | None = None
    grad_accumulation: int | None = None


class RunState:
    """Everything the screens draw of a run, and derived figures; ``RunModel`` changes it."""

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
        """By rank, in rank order."""
        self.devices: dict[DeviceKey, telemetry.DeviceSample] = {}
        """The latest sample of each device and host."""
        self.alerts = AlertHistory()
        self.logs = LogHistory()
        self.ooms = OomCases()
        self.hub: control.HubStats | None = None
        self.hosts: dict[str, hosts.HostState] = {}
        """The run's other hosts, by name."""
        self.results: deque[control.Result] = deque(maxlen=100)
        """Results of commands, newest last."""
        self.losses = StepSeries()
        """Mean over ranks of each step's loss, weighted by label tokens where they are known, over the whole job."""
        self.training = Training()
        """Training figures of the job over its steps, its evaluations and checkpoints."""
        self.job = 0
        """Number of the job of ranks, steps, losses and peaks; 0 if the hub reports no jobs."""
        self.jobs: dict[int, jobs.Job] = {}
        """The latest state of each job, by number."""
        self.job_losses: dict[int, StepSeries] = {}
        """Losses of previous jobs (the latest ones), by number."""
        self.first_t = 0.0
        """Hub time of the first frame; 0 before any."""
        self.now = 0.0
        """Time of this state, seconds since the epoch: the latest frame's, or later (see ``tick``)."""
        self.last_t = 0.0
        """Hub time of the latest frame."""
        self.last_seq = 0
        self.version = 0
        """Incremented with every frame."""
        self.damaged = 0
        """Number of ignored messages with impossible figures (an infinite time, a rank out of range)."""
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
        return max(self._first_step, min((rank.step for rank in self.ranks.values()), default=0))

    @property
    def _first_step(self) -> int:
        """Number of steps before a resume."""
        return self.plan.first_step if self.plan else 0

    @property
    def reported_step(self) -> int:
        """The last step whose figures every rank has sent (0 before the first); heartbeats count steps before that."""
        return min((rank.last.step if rank.last else 0 for rank in self.ranks.values()), default=0)

    @property
    def leading_step(self) -> int:
        """The last step that any rank has finished."""
        return max((self._first_step, *(rank.step for rank in self.ranks.values())))

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
        complete, count = self.complete_step, len(found)
        while count and found[count - 1].first_step > complete:
            count -= 1
        return found if count == len(found) else found[:count]

    @property
    def total_steps(self) -> int | None:
        """Planned steps of the run; None: not known."""
        return self.plan.total_steps if self.plan else None

    @property
    def rates(self) -> Rates:
        """Speed over the last few steps; of an ended run, the mean over all."""
        if self.ended and len(self.training.course):
            return mean_rates(self.training.course, self.world_size)
        return rates(self.ranks.values(), self.now, rests=self.rests)

    @property
    def rests(self) -> bool:
        """Whether no step is due, because all are done or the run has another activity, and no rank is in trouble."""
        done = bool(self.total_steps) and self.reported_step >= (self.total_steps or 0)
        return self.ended or (
            (done or self.no_step_follows or self.training.activity is not None) and not self._is_standing
        )

    @property
    def _is_standing(self) -> bool:
        """Whether a rank blocks the run."""
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
        """Return the seconds per step spent on evaluations and checkpoints, over the recent steps of one rank."""
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
        """Return the last step common to all ranks except those far behind; 0: none."""
        lasts = [rank.last.step for rank in self.ranks.values() if rank.last is not None]
        lead = max(lasts, default=0)
        return min((step for step in lasts if lead - step < FEWEST_STEPS), default=0)

    def _at_step(self, number: int) -> Iterator[telemetry.Step]:
        """Yield each rank's record of a recent step."""
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

    def losses_of(self, job: int) -> StepSeries | None:
        """Return the known losses of a job."""
        return self.losses if job == self.job else self.job_losses.get(job)

    def rank_states(self) -> dict[control.RankStateName, int]:
        """Count the ranks in each state; states without ranks are omitted."""
        counts: dict[control.RankStateName, int] = {}
        for rank in self.ranks.values():
            counts[rank.state] = counts.get(rank.state, 0) + 1
        return counts
