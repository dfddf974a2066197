"""A sweep's plan: the sweep file, the jobs of its configurations, their GPUs, and the printed lines."""

import hashlib
import json
import math
import os
import re
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from yaml.nodes import MappingNode

from ...protocol.analysis.sweep import summary
from ...protocol.analysis.sweep.search import left
from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.run.rundir import RunOptions
from ...protocol.run.start import StartRequest
from ...protocol.sweep.rows import Budget, Ended, Plan, Predicted, Row, Search, Settings, Value, verdicts
from ...protocol.text import duration, gib, sanitize
from ..host.hardware.gpus import GpuUse, gpu_use, wait_until_free
from ..recipe.config import load, write
from ..recipe.config.schema import AtLeast0, AtLeast1, Positive
from ..recipe.hardware import missing_packages

LENGTH = "training.sequence_length"
ENVIRONMENT = "env."  # prefix of an axis that sets an environment variable
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_MOST_RUNS = 10_000


class _Budget(msgspec.Struct, frozen=True):
    hours: Positive | None = None
    money: Positive | None = None
    price_per_gpu_hour: Positive | None = None
    gpus: AtLeast0 = 0


class _File(msgspec.Struct, frozen=True):
    """The keys of a sweep file, as docs/sweep.md describes them."""

    name: str = ""
    config: str = ""
    set: Settings = {}
    command: list[str] | str = ""
    env: dict[str, str] = {}
    axes: dict[str, list[Value]] = {}
    search: Search | None = None
    steps: AtLeast1 = 3
    warm_up: AtLeast0 = 2
    repeats: AtLeast1 = 1
    timeout: str = "10 m"
    hang_grace: str = "60 s"
    budget: _Budget = _Budget()
    capacity: str | None = None
    predict: bool = True
    columns: list[str] = []
    one_process: bool = False


class Spec(NamedTuple):
    """A sweep file."""

    places: load.Places
    name: str
    config: str  # configuration of ftmon's trainer; empty with a `command`
    settings: Settings  # overrides of the configuration, the same in each run
    command: list[str]  # a script's command with placeholders `{axis}`
    environment: dict[str, str]
    axes: dict[str, list[Value]]
    search: Search | None
    steps: int
    warm_up: int
    repeats: int
    timeout: float
    hang_grace: float
    budget: Budget
    capacity_bytes: int | None
    predict: bool
    columns: list[str]  # figures of the recordings in the table; empty: the default ones
    one_process: bool  # whether configurations that differ only in their length are measured in one process

    @property
    def source(self) -> str:
        """The file's path."""
        return self.places.source

    @property
    def axis_names(self) -> list[str]:
        """Names of all axes, that of the search last."""
        searched = [self.search.axis] if self.search is not None and self.search.axis else []
        return [*self.axes, *searched]


def read(path: str) -> Spec:
    """Read a sweep file; ``ConfigError``: a key or value is wrong, in one line with the place and the fix."""
    if Path(path).is_dir():
        raise ConfigError(f"{path}: is a folder; give the sweep file in it")
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file; docs/sweep.md has an example")
    tree = load.read(path)
    if not isinstance(tree, MappingNode):
        raise ConfigError(f"{path}: must hold keys such as config and axes; docs/sweep.md has an example")
    places = load.Places(path)
    file = load.convert(tree, _File, places)
    config = Path(path).parent / Path(file.config).expanduser() if file.config else None
    if config is not None and not config.is_file():
        raise places.error("config", f"{file.config}: no such file; 'ftmon train --print-config' writes one")
    capacity = None if file.capacity is None else int(_amount(places, "capacity", file.capacity, *_SIZES))
    spec = Spec(
        places=places,
        name=file.name or Path(path).stem,
        config=str(config or ""),
        settings=file.set,
        command=_words(file.command, places),
        environment=file.env,
        axes=file.axes,
        search=file.search,
        steps=file.steps,
        warm_up=file.warm_up,
        repeats=file.repeats,
        timeout=_amount(places, "timeout", file.timeout, *_SECONDS),
        hang_grace=_amount(places, "hang_grace", file.hang_grace, *_SECONDS),
        budget=_budget(file.budget, places),
        capacity_bytes=capacity,
        predict=file.predict,
        columns=file.columns,
        one_process=file.one_process,
    )
    _check(spec)
    return spec


def _check(spec: Spec) -> None:
    error = spec.places.error
    if bool(spec.config) == bool(spec.command):
        both = "config and command exclude each other" if spec.config else "config or command is missing"
        raise ConfigError(f"{spec.source}: {both}: config for ftmon's trainer, command for a script of your own")
    if not spec.axes and spec.search is None:
        raise ConfigError(f"{spec.source}: axes is missing: what is varied, such as zero.stage: [2, 3]")
    for name, values in spec.axes.items():
        _check_axis(f"axes.{name}", values, spec.places)
    variables = [f"env.{name}" for name in spec.environment]
    variables += [f"axes.{name}" for name in spec.axis_names if name.startswith(ENVIRONMENT)]
    for path in variables:
        if not re.fullmatch(r"[^=\x00]+", path.partition(ENVIRONMENT)[2]):
            raise error(path, "is no name of an environment variable")
    if spec.search is not None:
        _check_search(spec, spec.search)
    if spec.command and spec.settings:
        raise error("set", "goes with config; write it into the command")
    count = math.prod(map(len, spec.axes.values())) * spec.repeats
    if count > _MOST_RUNS:
        raise error("axes", f"make {count:,} runs, over {_MOST_RUNS:,}")
    if spec.one_process:
        if spec.command:
            raise error("one_process", "goes with config: a script is started for each length")
        if spec.search is not None:
            raise error("one_process", "goes without search, which chooses lengths one by one")
        if LENGTH not in spec.axes:
            raise error("one_process", f"needs the axis {LENGTH}, whose values share a process")
    if spec.command:
        _check_template(spec)
    for number, name in enumerate(spec.columns):
        try:
            summary.check(name)
        except ValueError as wrong:
            text = f"{load.shown(name)} is not a figure of a run; they {wrong}"
            raise error(f"columns[{number}]", text) from None
        if name in spec.columns[:number]:
            raise error(f"columns[{number}]", f"has {name} twice")


def _check_axis(path: str, values: list[Value], places: load.Places) -> None:
    if not values:
        raise places.error(path, "must be a list of values such as [512, 1024]")
    for number, one in enumerate(values):
        if any(one == other and type(one) is type(other) for other in values[:number]):
            raise places.error(f"{path}[{number}]", f"has {one!r} twice")


def _check_search(spec: Spec, search: Search) -> None:
    error = spec.places.error
    if search.axis in spec.axes:
        raise error("search.axis", f"{search.axis} is among the axes too")
    if search.goal == "fastest":
        if search.axis:
            raise error("search.axis", "goes without fastest, which is searched for over the axes")
    elif not search.axis or "search.high" not in spec.places:
        raise error("search", "needs axis and high, such as training.sequence_length and 8192")
    elif not (0 <= search.low < search.high and search.step >= 1):
        raise error("search", f"needs a low of at least 0, a high above it ({search.low}), and a step of at least 1")


def _check_template(spec: Spec) -> None:
    used = {name for word in spec.command for name in PLACEHOLDER.findall(word)}
    for name in spec.axis_names:
        if name not in used and not name.startswith(ENVIRONMENT):
            text = f"has no {{{name}}}, which axes vary: write it where the script takes it"
            raise spec.places.error("command", text)
    for name in sorted(used.difference(spec.axis_names)):
        raise spec.places.error("command", f"has {{{name}}}, but the axes are {', '.join(spec.axis_names)}")


def _words(command: list[str] | str, places: load.Places) -> list[str]:
    try:
        words = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise places.error("command", f"cannot be split into words: {error}") from None
    if "command" in places and not words:
        raise places.error("command", "is empty")
    return words


_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}, "seconds, or such as 90 s, 10 m, 2 h"
_SIZES = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6, "": 1}, "a size such as 80GB or 24GiB"


def _amount(places: load.Places, path: str, text: str, units: Mapping[str, int], words: str) -> float:
    """Return a number with a unit, times the unit."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", text)
    try:
        value = float(found[1]) * units[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if value <= 0:
        raise places.error(path, f"must be {words}")
    return value


def _budget(given: _Budget, places: load.Places) -> Budget:
    if given.money is not None and given.price_per_gpu_hour is None:
        raise places.error("budget.money", "needs price_per_gpu_hour, of one GPU")
    seconds = None if given.hours is None else given.hours * 3600
    return Budget(seconds, given.money, given.price_per_gpu_hour, given.gpus)


def priced(budget: Budget, gpus: int, price: float | None) -> Budget:
    """Return a budget with money as a limit of time; ``price`` replaces its own, ``gpus`` a missing one."""
    price, gpus = price or budget.price_per_gpu_hour, budget.gpus or gpus
    seconds = budget.seconds
    if budget.money is not None and price:
        seconds = min(seconds or math.inf, budget.money / (gpus * price) * 3600)
    return Budget(seconds, budget.money, price, gpus)


_GPUS_SECONDS = 30.0
_POLL_SECONDS = 0.5
_TOLERANCE = 512 << 20  # allowed increase of a device's used memory: contexts of other processes appear and disappear


def still_held(earlier: GpuUse | None, pids: Collection[int], devices: Collection[int]) -> str:
    """Wait until the run's GPUs are as empty as before it; return the memory still in use in words, or empty.

    ``earlier``: None without NVML. ``devices``: the run's GPUs by NVML; empty: not known, so all are compared.
    """
    if earlier is None:
        return ""
    after = wait_until_free(pids, _GPUS_SECONDS)
    if after is not None and after.held:
        return "NVML still lists " + ", ".join(f"{gib(size)} of pid {pid}" for pid, size in after.held.items())
    deadline = time.monotonic() + _GPUS_SECONDS
    while after is not None:
        more = {
            device: size - earlier.used.get(device, size)
            for device, size in after.used.items()
            if (not devices or device in devices) and size - earlier.used.get(device, size) > _TOLERANCE
        }
        if not more:
            break
        if time.monotonic() >= deadline:
            return ", ".join(f"GPU {device} has {gib(size)} more in use than before" for device, size in more.items())
        time.sleep(_POLL_SECONDS)
        after = gpu_use(pids)
    return ""


STOP_GRACE_SECONDS = 5.0  # time between the request to end a run and its kill; its results are not needed
ALLOCATOR_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_MEASURING: dict[str, Value] = {
    "training.rehearsal": False,
    "training.total_batch": 0,
    "schedule.warmup_steps": 0,
    "checkpoint.every": 0,
    "checkpoint.minutes": 0,
    "checkpoint.at_end": False,
    "checkpoint.keep_best": False,
    "checkpoint.rehearse": False,
    "checkpoint.resume": "never",
    "evaluation.path": "",
    "evaluation.split": "",
    "evaluation.share": 0.0,
    "evaluation.every": 0,
    "evaluation.patience": 0,
    "evaluation.samples": 0,
    "output.dir": "",
    "output.save_model": False,
    "output.push": "",
    "output.log_every": 1,
}
"""Overrides of the base configuration: a few measured steps, without outputs. ``set`` and axes override these."""


class Job(NamedTuple):
    """A run to start, and its environment."""

    request: StartRequest
    environment: dict[str, str]


def combinations(spec: Spec) -> list[Settings]:
    """Return the grid: all combinations of the axes' values, the last axis varying fastest."""
    found: list[Settings] = [{}]
    for name, values in spec.axes.items():
        found = [{**settings, name: value} for settings in found for value in values]
    return found


def job(spec: Spec, settings: Settings, name: str, lengths: Sequence[int] = ()) -> Job:
    """Return the job that starts the run of a configuration, under ``name``.

    ``lengths``: sequence lengths to measure in it, one after the other; empty: the configuration's own.
    """
    options = RunOptions(
        allocator_events=False,
        probe_budget=0.0,  # the peaks of phases are what is measured
        predict=False,
        on_hang="kill",
        hang_grace=spec.hang_grace,
        stop_grace=STOP_GRACE_SECONDS,
    )
    varied = {name: value for name, value in settings.items() if name.startswith(ENVIRONMENT)}
    own = {name.removeprefix(ENVIRONMENT): "" if value is None else str(value) for name, value in varied.items()}
    environment = {**os.environ, **spec.environment, **own}
    if spec.command:
        command = [PLACEHOLDER.sub(lambda match: _plain(settings[match[1]]), word) for word in spec.command]
        return Job(StartRequest("run", name, options, command=command), environment)
    words = overrides(spec, {**settings, LENGTH: max(lengths)} if lengths else settings)
    if lengths:
        words.append(f"debug.lengths={json.dumps(list(lengths))}")
    return Job(StartRequest("train", name, options, config=spec.config, overrides=words), environment)


def overrides(spec: Spec, settings: Settings) -> list[str]:
    """Return the assignments that turn the base configuration into a run's."""
    steps: dict[str, Value] = {"training.max_steps": spec.steps + spec.warm_up}
    if load.load(spec.config).config.training.grad_accumulation == "auto":
        steps["training.grad_accumulation"] = 1
    varied = {name: value for name, value in settings.items() if not name.startswith(ENVIRONMENT)}
    return [_assignment(name, value) for name, value in {**_MEASURING, **steps, **spec.settings, **varied}.items()]


def check(spec: Spec) -> None:
    """Refuse keys and values that no configuration accepts, before anything is started.

    Raises ``ConfigError`` if the base configuration, ``set`` or an axis is wrong; the text has the place in the sweep
    file, ``UsageError`` if packages are missing.
    """
    if spec.command:
        from ..launch.start import check_command

        if not PLACEHOLDER.search(spec.command[0]):
            check_command(spec.command)
        return
    if missing := missing_packages():
        raise UsageError(f"training needs {', '.join(missing)}, not installed here; run: pip install 'ftmon[train]'")
    _refuse_choice(load.load(spec.config))
    for name, value in spec.settings.items():
        _check_one(spec, name, value, f"set.{name}")
    for name, values in spec.axes.items():
        for number, value in enumerate(values):
            if not name.startswith(ENVIRONMENT):
                _check_one(spec, name, value, f"axes.{name}[{number}]")
    if spec.search is not None and spec.search.axis and not spec.search.axis.startswith(ENVIRONMENT):
        for value in (spec.search.low, spec.search.high):
            _check_one(spec, spec.search.axis, value, "search.axis")


def fingerprint(spec: Spec) -> str:
    """Return a hash of everything that a row depends on, besides its settings."""
    base = write.dump(load.load(spec.config).config) if spec.config else ""
    allocator = {name: os.environ.get(name, "") for name in ALLOCATOR_ENVIRONMENT}
    parts: list[Any] = [base, spec.settings, spec.command, spec.environment, allocator, spec.steps, spec.warm_up]
    parts += ["one process"] if spec.one_process else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_one(spec: Spec, name: str, value: Value, path: str) -> None:
    try:
        _refuse_choice(load.load(spec.config, [_assignment(name, value)]))
    except FtmonError as error:
        words = str(error).removeprefix(f"{load.COMMAND_LINE}: ")
        raise spec.places.error(path, f"is refused: {words}") from None


def _refuse_choice(loaded: load.Loaded) -> None:
    for path in sorted(loaded.chosen):
        raise loaded.error(path, "is auto, and a sweep needs a value; 'ftmon train --init MODEL DATA' writes one")


def _assignment(name: str, value: Value) -> str:
    text = "null" if value is None else json.dumps(value)
    return f"{name}={text}"


def _plain(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


ENDS = {
    "finished": "the sweep is done",
    "budget": "the budget ends the sweep",
    "failure": "the sweep ends",
    "interrupted": "interrupted",
    "gpus": "the sweep ends, as its GPUs are not empty",
}


class Lines:
    """Prints a sweep, each line by ``say``."""

    def __init__(self, spec: Spec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._print_raw = say
        self._total = 0
        self._number = 0

    def plan(self, plan: Plan, rows: Sequence[Row], answered: int, used: float) -> None:
        """Print the planned runs, their expected time and cost, and the budget; ``rows``: those of earlier sessions."""
        spec = self._spec
        self._total = 0 if plan.search is not None and plan.search.goal != "fastest" else len(plan.runs) * plan.repeats
        self._number = answered
        what = f"{len(plan.runs)} configurations" if len(plan.runs) != 1 else "1 configuration"
        if plan.search is not None:
            what = summary.goal_text(plan.search.goal, plan.search.axis) + (f", of {what}" if spec.axes else "")
        repeats = f" x {plan.repeats} repeats" if plan.repeats > 1 else ""
        steps = f"{spec.steps} steps after {spec.warm_up} of warm-up"
        self.note(f"{what}{repeats}, {steps}")
        known = f", {duration(used)} used" if used >= 1 else ""
        self.note(f"budget: {summary.budget_text(plan.budget)}{known}; a run is ended after {duration(plan.timeout)}")
        if answered:
            self.note(f"{answered} runs have their rows already" if answered > 1 else "1 run has its row already")
        for note in plan.notes:
            self.note(note)
        predicts = any(run.predicted for run in plan.runs)
        for run in plan.runs:
            words = [f"predicted {summary.predicted_text(run.predicted) or 'nothing'}"] if predicts else []
            words += [f"about {taken}"] if (taken := summary.duration_text(plan, run)) else []
            self.note(f"  {summary.settings_text(run.settings)}{': ' if words else ''}{'; '.join(words)}")
        for line in summary.cost_lines(plan, rows):
            self.note(line)

    def begins(self, settings: Settings, repeat: int, predicted: Predicted | None) -> None:
        """Print the start of a run."""
        self._number += 1
        again = f" (repeat {repeat + 1})" if repeat else ""
        expected = f"; predicted {summary.predicted_text(predicted)}" if predicted else ""
        self.note(f"{self._counter()} {summary.settings_text(settings)}{again} ...{expected}")

    def row(self, row: Row) -> None:
        """Print the outcome of a run."""
        taken = duration(row.seconds)
        self.note(f"{self._counter()} {summary.settings_text(row.settings)}: {summary.row_text(row)} ({taken})")

    def progress(self, plan: Plan, used: float, rows: list[Row]) -> None:
        """Print the remaining runs, time and cost, with a budget or a price."""
        if plan.budget.seconds is not None or plan.budget.price_per_gpu_hour is not None:
            self.note(summary.left_text(left(plan.budget, used, rows, max(0, self._total - self._number))))

    def end(self, ended: Ended, rows: list[Row], plan: Plan, found: list[str]) -> None:
        """Print the table and the conclusions."""
        if rows:
            for line in summary.aligned(summary.table(summary.pool(rows), plan.columns)):
                self.note(line)
        for line in [*found, *summary.result_lines(rows, plan)]:
            self.note(line)
        missing = f"; {ended.not_run} runs are missing, the same command resumes it" if ended.not_run else ""
        why = f": {ended.text}" if ended.text else ""
        self.note(f"{ENDS[ended.reason]}{why}: {summary.counts_text(verdicts(rows))}{missing}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._print_raw(sanitize(text, 600))

    def _counter(self) -> str:
        return f"[{self._number}/{self._total}]" if self._total else f"[{self._number}]"
