"""A sweep's plan: the sweep file, the jobs of its configurations, their GPUs, and the printed lines."""

import difflib
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

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ...protocol.analysis.sweep import summary
from ...protocol.analysis.sweep.search import left
from ...protocol.analysis.sweep.summary import pool
from ...protocol.analysis.sweep.text import (
    aligned,
    budget_text,
    cost_lines,
    counts_text,
    duration_text,
    goal_text,
    left_text,
    predicted_text,
    result_lines,
    row_text,
    settings_text,
    table,
)
from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.run.rundir import RunOptions
from ...protocol.run.start import StartRequest
from ...protocol.sweep.rows import Budget, Ended, Goal, Plan, Predicted, Row, Search, Settings, Value, key_of
from ...protocol.sweep.store import verdicts
from ...protocol.text import duration, gib, sanitize
from ..host.hardware.gpus import GpuUse, gpu_use, wait_until_free
from ..recipe.config import load, write
from ..recipe.hardware import missing_packages

LENGTH = "training.sequence_length"
ENVIRONMENT = "env."  # prefix of an axis that sets an environment variable
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_GOALS: tuple[Goal, ...] = ("largest", "fastest", "phases")
_MOST_RUNS = 10_000


class Axis(NamedTuple):
    """One axis of a sweep."""

    name: str
    values: list[Value]
    places: list[str]  # place of each value


class Spec(NamedTuple):
    """A sweep file."""

    source: str
    name: str
    config: str = ""  # configuration of ftmon's trainer; empty with a `command`
    settings: Mapping[str, Value] = {}  # overrides of the configuration, the same in each run
    command: Sequence[str] = ()  # a script's command with placeholders `{axis}`
    environment: Mapping[str, str] = {}
    axes: Sequence[Axis] = ()
    search: Search | None = None
    steps: int = 3
    warm_up: int = 2
    repeats: int = 1
    timeout: float = 600.0
    hang_grace: float = 60.0
    budget: Budget = Budget()
    capacity_bytes: int | None = None
    predict: bool = True
    columns: Sequence[str] = ()  # figures of the recordings in the table; empty: the default ones
    one_process: bool = False  # whether configurations that differ only in their length are measured in one process

    @property
    def axis_names(self) -> list[str]:
        """Names of all axes, that of the search last."""
        searched = [self.search.axis] if self.search is not None and self.search.axis else []
        return [*(axis.name for axis in self.axes), *searched]


def read(path: str) -> Spec:
    """Read a sweep file.

    Raises:
        ConfigError: a key or value is wrong; one line with the place and the fix.
    """
    if Path(path).is_dir():
        raise ConfigError(f"{path}: is a folder; give the sweep file in it")
    if not Path(path).is_file():
        raise ConfigError(f"{path}: no such file; docs/sweep.md has an example")
    tree = load.read(path)
    if not isinstance(tree, MappingNode):
        raise ConfigError(f"{path}: must hold keys such as config and axes; docs/sweep.md has an example")
    nodes = _nodes(tree, "", _KEYS)
    found = {_FIELDS.get(name, name): _KEYS[name](node, name) for name, node in nodes.items()}
    found["name"] = found.get("name") or Path(path).stem
    if name := found.get("config"):
        config = Path(path).parent / Path(name).expanduser()
        if not config.is_file():
            raise _error(nodes["config"], f"config {name}: no such file; 'ftmon train --print-config' writes one")
        found["config"] = str(config)
    spec = Spec(path, **found)
    _check(spec, nodes)
    return spec


def _check(spec: Spec, nodes: dict[str, Node]) -> None:
    if bool(spec.config) == bool(spec.command):
        both = "config and command exclude each other" if spec.config else "config or command is missing"
        raise ConfigError(f"{spec.source}: {both}: config for ftmon's trainer, command for a script of your own")
    if not spec.axes and spec.search is None:
        raise ConfigError(f"{spec.source}: axes is missing: what is varied, such as zero.stage: [2, 3]")
    names = [axis.name for axis in spec.axes]
    if spec.search is not None and spec.search.axis in names:
        raise _error(nodes["search"], f"search.axis {spec.search.axis} is among the axes too")
    if spec.command and spec.settings:
        raise _error(nodes["set"], "set goes with config; write it into the command")
    count = math.prod(len(axis.values) for axis in spec.axes) * spec.repeats
    if count > _MOST_RUNS:
        raise _error(nodes["axes"], f"axes make {count:,} runs, over {_MOST_RUNS:,}")
    if spec.one_process:
        if spec.command:
            raise _error(nodes["one_process"], "one_process goes with config: a script is started for each length")
        if spec.search is not None:
            raise _error(nodes["one_process"], "one_process goes without search, which chooses lengths one by one")
        if LENGTH not in names:
            raise _error(nodes["one_process"], f"one_process needs the axis {LENGTH}, whose values share a process")
    if spec.command:
        _check_template(spec, nodes["command"])


def _check_template(spec: Spec, node: Node) -> None:
    used = {name for word in spec.command for name in PLACEHOLDER.findall(word)}
    for name in spec.axis_names:
        if name not in used and not name.startswith(ENVIRONMENT):
            raise _error(node, f"command has no {{{name}}}, which axes vary: write it where the script takes it")
    for name in sorted(used.difference(spec.axis_names)):
        raise _error(node, f"command has {{{name}}}, but the axes are {', '.join(spec.axis_names)}")


def _error(node: Node, text: str) -> ConfigError:
    return ConfigError(f"{load.place(node)}: {text}")


def _pairs(node: Node, path: str) -> list[tuple[ScalarNode, Node]]:
    if not isinstance(node, MappingNode):
        raise _error(node, f"{path} must be a section of keys and values")
    return load.pairs(node)


def _nodes(node: Node, path: str, known: Collection[str]) -> dict[str, Node]:
    """Return the values of a section (of the file: an empty path) by key, of which all must be known."""
    for key, _ in _pairs(node, path):
        if key.value not in known:
            close = difflib.get_close_matches(key.value, known, 1)
            rest = f"{'it has' if path else 'the keys are'} {', '.join(known)}"
            name = f"{path}.{load.shown(key.value)}" if path else load.shown(key.value)
            raise _error(key, f"unknown key {name}; {f'did you mean {close[0]}?' if close else rest}")
    return {key.value: value for key, value in _pairs(node, path)}


def _scalar(node: Node, path: str) -> Value:
    if not isinstance(node, ScalarNode):
        raise _error(node, f"{path} must be a number or a word, not {load.describe(node)}")
    value = load.plain_scalar(node, path)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # rows of the results file take none (``bounds.Whole``)
        raise _error(node, f"{path} must be a whole number of at most 64 bits")
    return value


def _text(node: Node, path: str) -> str:
    value = _scalar(node, path)
    return "" if value is None else str(value)


def _whole(least: int) -> Callable[[Node, str], int]:
    def read(node: Node, path: str) -> int:
        value = _scalar(node, path)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _error(node, f"{path} must be a whole number of at least {least}")
        return value

    return read


def _amount(node: Node, path: str) -> float:
    value = _scalar(node, path)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise _error(node, f"{path} must be a number above 0")
    return float(value)


def _switch(node: Node, path: str) -> bool:
    value = _scalar(node, path)
    if not isinstance(value, bool):
        raise _error(node, f"{path} must be true or false")
    return value


def _with_unit(units: Mapping[str, int], words: str) -> Callable[[Node, str], float]:
    def read(node: Node, path: str) -> float:
        found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", _text(node, path))
        try:
            value = float(found[1]) * units[found[2]] if found else 0.0
        except (ValueError, KeyError):
            value = 0.0
        if value <= 0:
            raise _error(node, f"{path} must be {words}")
        return value

    return read


_duration = _with_unit({"s": 1, "m": 60, "h": 3600, "": 1}, "seconds, or such as 90 s, 10 m, 2 h")
_size = _with_unit({"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6, "": 1}, "a size such as 80GB or 24GiB")


def _mapping(node: Node, path: str) -> dict[str, Value]:
    return {key.value: _scalar(value, f"{path}.{key.value}") for key, value in _pairs(node, path)}


def _environment(node: Node, path: str) -> dict[str, str]:
    for key, _ in _pairs(node, path):
        _check_variable(key, key.value, f"{path}.{key.value}")
    return {name: str(value) for name, value in _mapping(node, path).items()}


def _check_variable(key: Node, name: str, where: str) -> None:
    if not re.fullmatch(r"[^=\x00]+", name):
        raise _error(key, f"{load.shown(where)} is no name of an environment variable")


def _command(node: Node, path: str) -> list[str]:
    if isinstance(node, SequenceNode):
        words = [str(_scalar(part, path)) for part in node.value]
    else:
        try:
            words = shlex.split(_text(node, path))
        except ValueError as error:
            raise _error(node, f"command cannot be split into words: {error}") from None
    if not words:
        raise _error(node, "command is empty")
    return words


def _axes(node: Node, path: str) -> list[Axis]:
    axes: list[Axis] = []
    for key, value in _pairs(node, path):
        where = f"{path}.{key.value}"
        if not isinstance(value, SequenceNode) or not value.value:
            raise _error(value, f"{where} must be a list of values such as [512, 1024]")
        if key.value.startswith(ENVIRONMENT):
            _check_variable(key, key.value.removeprefix(ENVIRONMENT), where)
        values = [_scalar(part, where) for part in value.value]
        for number, one in enumerate(values):
            if any(one == other and type(one) is type(other) for other in values[:number]):
                raise _error(value.value[number], f"{where} has {one!r} twice")
        axes.append(Axis(key.value, values, [load.place(part) for part in value.value]))
    return axes


def _columns(node: Node, path: str) -> list[str]:
    if not isinstance(node, SequenceNode) or not node.value:
        raise _error(node, "columns must be a list of figures such as [peak, backward.peak, loss]")
    names: list[str] = []
    for part in node.value:
        name = _text(part, path)
        try:
            summary.check(name)
        except ValueError as error:
            raise _error(part, f"columns: {load.shown(name)} is not a figure of a run; they {error}") from None
        if name in names:
            raise _error(part, f"columns has {name} twice")
        names.append(name)
    return names


def _search(node: Node, path: str) -> Search:
    found = _nodes(node, path, ("goal", "axis", "low", "high", "step"))
    goal, axis = (_text(found[name], f"search.{name}") if name in found else "" for name in ("goal", "axis"))
    known: Goal | None = next((one for one in _GOALS if one == goal), None)
    if known is None:
        raise _error(found.get("goal", node), f"search.goal must be {', '.join(_GOALS)}")
    if known == "fastest":
        if axis:
            raise _error(found["axis"], "search.axis: the fastest is searched for over the axes")
        return Search("fastest")
    if not axis or "high" not in found:
        raise _error(node, "search needs axis and high, such as training.sequence_length and 8192")
    low = _whole(0)(found["low"], "search.low") if "low" in found else 1
    step = _whole(1)(found["step"], "search.step") if "step" in found else 1
    return Search(known, axis, low, _whole(low + 1)(found["high"], "search.high"), step)


def _budget(node: Node, path: str) -> Budget:
    if isinstance(node, MappingNode):
        for key, _ in load.pairs(node):
            if key.value == "price_per_hour":
                raise _error(key, "budget.price_per_hour was of all GPUs together; write price_per_gpu_hour, of one")
    names = ("hours", "money", "price_per_gpu_hour", "gpus")
    nodes = _nodes(node, path, names)
    gpus = _whole(1)(nodes.pop("gpus"), f"{path}.gpus") if "gpus" in nodes else 0
    amounts = {name: _amount(value, f"{path}.{name}") for name, value in nodes.items()}
    hours, money, price = map(amounts.get, names[:3])
    if money is not None and price is None:
        raise _error(node, "budget.money needs price_per_gpu_hour, of one GPU")
    return Budget(None if hours is None else hours * 3600, money, price, gpus)


def priced(budget: Budget, gpus: int, price: float | None) -> Budget:
    """Return a budget with money as a limit of time; ``price`` replaces its own, ``gpus`` a missing one."""
    price, gpus = price or budget.price_per_gpu_hour, budget.gpus or gpus
    seconds = budget.seconds
    if budget.money is not None and price:
        seconds = min(seconds or math.inf, budget.money / (gpus * price) * 3600)
    return Budget(seconds, budget.money, price, gpus)


_KEYS: dict[str, Callable[[Node, str], Any]] = {
    "name": _text,
    "config": _text,
    "set": _mapping,
    "command": _command,
    "env": _environment,
    "axes": _axes,
    "search": _search,
    "steps": _whole(1),
    "warm_up": _whole(0),
    "repeats": _whole(1),
    "timeout": _duration,
    "hang_grace": _duration,
    "budget": _budget,
    "capacity": lambda node, path: int(_size(node, path)),
    "predict": _switch,
    "columns": _columns,
    "one_process": _switch,
}
_FIELDS = {"set": "settings", "env": "environment", "capacity": "capacity_bytes"}  # keys named otherwise in `Spec`

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
    for axis in spec.axes:
        found = [{**settings, axis.name: value} for settings in found for value in axis.values]
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

    Raises:
        ConfigError: the base configuration, ``set`` or an axis is wrong; the text has the place in the sweep file.
        UsageError: packages are missing.
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
        _check_one(spec, name, value, f"{spec.source}: set.{name}")
    for axis in spec.axes:
        for value, place in zip(axis.values, axis.places, strict=True):
            if not axis.name.startswith(ENVIRONMENT):
                _check_one(spec, axis.name, value, f"{place}: axes.{axis.name}")
    if spec.search is not None and spec.search.axis and not spec.search.axis.startswith(ENVIRONMENT):
        for value in (spec.search.low, spec.search.high):
            _check_one(spec, spec.search.axis, value, f"{spec.source}: search.axis")


def fingerprint(spec: Spec) -> str:
    """Return a hash of everything that a row depends on, besides its settings."""
    base = write.dump(load.load(spec.config).config) if spec.config else ""
    allocator = {name: os.environ.get(name, "") for name in ALLOCATOR_ENVIRONMENT}
    parts: list[Any] = [base, spec.settings, spec.command, spec.environment, allocator, spec.steps, spec.warm_up]
    parts += ["one process"] if spec.one_process else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_one(spec: Spec, name: str, value: Value, where: str) -> None:
    try:
        _refuse_choice(load.load(spec.config, [_assignment(name, value)]))
    except FtmonError as error:
        words = str(error).removeprefix(f"{load.COMMAND_LINE}: ")
        raise ConfigError(f"{where}: {words}") from None


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


def group_of(settings: Settings, axis: str) -> str:
    """Return the name of a configuration without one of its axes."""
    return key_of({name: value for name, value in settings.items() if name != axis})


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
            what = goal_text(plan.search.goal, plan.search.axis) + (f", of {what}" if spec.axes else "")
        repeats = f" x {plan.repeats} repeats" if plan.repeats > 1 else ""
        steps = f"{spec.steps} steps after {spec.warm_up} of warm-up"
        self.note(f"{what}{repeats}, {steps}")
        known = f", {duration(used)} used" if used >= 1 else ""
        self.note(f"budget: {budget_text(plan.budget)}{known}; a run is ended after {duration(plan.timeout)}")
        if answered:
            self.note(f"{answered} runs have their rows already" if answered > 1 else "1 run has its row already")
        for note in plan.notes:
            self.note(note)
        predicts = any(run.predicted for run in plan.runs)
        for run in plan.runs:
            words = [f"predicted {predicted_text(run.predicted) or 'nothing'}"] if predicts else []
            words += [f"about {taken}"] if (taken := duration_text(plan, run)) else []
            self.note(f"  {settings_text(run.settings)}{': ' if words else ''}{'; '.join(words)}")
        for line in cost_lines(plan, rows):
            self.note(line)

    def begins(self, settings: Settings, repeat: int, predicted: Predicted | None) -> None:
        """Print the start of a run."""
        self._number += 1
        again = f" (repeat {repeat + 1})" if repeat else ""
        expected = f"; predicted {predicted_text(predicted)}" if predicted else ""
        self.note(f"{self._counter()} {settings_text(settings)}{again} ...{expected}")

    def row(self, row: Row) -> None:
        """Print the outcome of a run."""
        self.note(f"{self._counter()} {settings_text(row.settings)}: {row_text(row)} ({duration(row.seconds)})")

    def progress(self, plan: Plan, used: float, rows: list[Row]) -> None:
        """Print the remaining runs, time and cost, with a budget or a price."""
        if plan.budget.seconds is not None or plan.budget.price_per_gpu_hour is not None:
            self.note(left_text(left(plan.budget, used, rows, max(0, self._total - self._number))))

    def end(self, ended: Ended, rows: list[Row], plan: Plan, found: list[str]) -> None:
        """Print the table and the conclusions."""
        if rows:
            for line in aligned(table(pool(rows), plan.columns)):
                self.note(line)
        for line in [*found, *result_lines(rows, plan)]:
            self.note(line)
        missing = f"; {ended.not_run} runs are missing, the same command resumes it" if ended.not_run else ""
        why = f": {ended.text}" if ended.text else ""
        self.note(f"{ENDS[ended.reason]}{why}: {counts_text(verdicts(rows))}{missing}")

    def note(self, text: str) -> None:
        """Print a line."""
        self._print_raw(sanitize(text, 600))

    def _counter(self) -> str:
        return f"[{self._number}/{self._total}]" if self._total else f"[{self._number}]"
