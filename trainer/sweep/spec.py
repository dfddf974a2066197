"""Reads the sweep file: axes, their values, and bounds. Every error names the line and the key."""

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from ...protocol.analysis.sweep import columns
from ...protocol.errors import ConfigError
from ...protocol.sweep.rows import Budget, Goal, Search, Value
from ..recipe.config import yaml_nodes
from ..recipe.config.load import plain_scalar

KEYS = (
    "name", "config", "set", "command", "env", "axes", "search", "steps", "warm_up", "repeats", "timeout",
    "hang_grace", "budget", "capacity", "predict", "columns", "one_process",
)  # fmt: skip
LENGTH = "training.sequence_length"
ENVIRONMENT = "env."
"""Prefix of an axis that sets an environment variable."""
PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
_GOALS: tuple[Goal, ...] = ("largest", "fastest", "phases")
_SIZE = {"GiB": 1 << 30, "MiB": 1 << 20, "GB": 10**9, "MB": 10**6, "": 1}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "": 1}
_MOST_RUNS = 10_000


class Axis(NamedTuple):
    """One axis of a sweep."""

    name: str
    values: list[Value]
    places: list[str]
    """Place of each value."""


class Spec(NamedTuple):
    """A sweep file."""

    source: str
    name: str
    config: str
    """Configuration of ftmon's trainer; empty with a ``command``."""
    settings: dict[str, Value]
    """Overrides of the configuration, the same in each run."""
    command: list[str]
    """A script's command with placeholders ``{axis}``."""
    environment: dict[str, str]
    axes: list[Axis]
    search: Search | None
    steps: int
    warm_up: int
    repeats: int
    timeout: float
    hang_grace: float
    budget: Budget
    capacity_bytes: int | None
    predict: bool
    columns: list[str]
    """Figures of the recordings in the table; empty: the default ones."""
    one_process: bool
    """Whether configurations that differ only in their sequence length are measured in one process."""

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
    tree = yaml_nodes.read(path)
    if not isinstance(tree, MappingNode):
        raise ConfigError(f"{path}: must hold keys such as config and axes; docs/sweep.md has an example")
    found: dict[str, Node] = {}
    for key, value in yaml_nodes.pairs(tree):
        if key.value not in KEYS:
            close = difflib.get_close_matches(key.value, KEYS, 1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(KEYS)}"
            raise ConfigError(f"{yaml_nodes.place(key)}: unknown key {yaml_nodes.shown(key.value)}; {hint}")
        found[key.value] = value
    spec = Spec(
        source=path,
        name=_text(found.get("name"), "name") or Path(path).stem,
        config=_config(path, found),
        settings=_mapping(found.get("set"), "set"),
        command=_command(found.get("command")),
        environment=_environment(found.get("env")),
        axes=_axes(found.get("axes")),
        search=_search(found.get("search")),
        steps=_whole(found.get("steps"), "steps", 3, 1),
        warm_up=_whole(found.get("warm_up"), "warm_up", 2, 0),
        repeats=_whole(found.get("repeats"), "repeats", 1, 1),
        timeout=_duration(found.get("timeout"), "timeout", 600.0),
        hang_grace=_duration(found.get("hang_grace"), "hang_grace", 60.0),
        budget=_budget(found.get("budget")),
        capacity_bytes=_size(found.get("capacity")),
        predict=_switch(found.get("predict"), "predict", True),
        columns=_columns(found.get("columns")),
        one_process=_switch(found.get("one_process"), "one_process", False),
    )
    _check(spec, found)
    return spec


def _check(spec: Spec, found: dict[str, Node]) -> None:
    if bool(spec.config) == bool(spec.command):
        both = "config and command exclude each other" if spec.config else "config or command is missing"
        raise ConfigError(f"{spec.source}: {both}: config for ftmon's trainer, command for a script of your own")
    if not spec.axes and spec.search is None:
        raise ConfigError(f"{spec.source}: axes is missing: what is varied, such as zero.stage: [2, 3]")
    if spec.search is not None and spec.search.axis in [axis.name for axis in spec.axes]:
        raise ConfigError(f"{yaml_nodes.place(found['search'])}: search.axis {spec.search.axis} is among the axes too")
    if spec.command and spec.settings:
        raise ConfigError(f"{yaml_nodes.place(found['set'])}: set goes with config; write it into the command")
    count = 1
    for axis in spec.axes:
        count *= len(axis.values)
    if count * spec.repeats > _MOST_RUNS:
        raise ConfigError(
            f"{yaml_nodes.place(found['axes'])}: axes make {count * spec.repeats:,} runs, over {_MOST_RUNS:,}"
        )
    if spec.one_process:
        _check_one_process(spec, found["one_process"])
    if spec.command:
        _check_template(spec, found)


def _check_one_process(spec: Spec, node: Node) -> None:
    if spec.command:
        raise ConfigError(
            f"{yaml_nodes.place(node)}: one_process goes with config: a script is started for each length"
        )
    if spec.search is not None:
        raise ConfigError(
            f"{yaml_nodes.place(node)}: one_process goes without search, which chooses lengths one by one"
        )
    if LENGTH not in [axis.name for axis in spec.axes]:
        raise ConfigError(
            f"{yaml_nodes.place(node)}: one_process needs the axis {LENGTH}, whose values share a process"
        )


def _check_template(spec: Spec, found: dict[str, Node]) -> None:
    used = {name for word in spec.command for name in PLACEHOLDER.findall(word)}
    names = spec.axis_names
    for name in names:
        if name not in used and not name.startswith(ENVIRONMENT):
            raise ConfigError(
                f"{yaml_nodes.place(found['command'])}: command has no {{{name}}}, which axes vary: write it where the "
                "script takes it"
            )
    for name in sorted(used - set(names)):
        known = ", ".join(names)
        raise ConfigError(f"{yaml_nodes.place(found['command'])}: command has {{{name}}}, but the axes are {known}")


def _config(path: str, found: dict[str, Node]) -> str:
    name = _text(found.get("config"), "config")
    if not name:
        return ""
    config = Path(path).parent / Path(name).expanduser()
    if not config.is_file():
        raise ConfigError(
            f"{yaml_nodes.place(found['config'])}: config {name}: no such file; 'ftmon train --print-config' writes one"
        )
    return str(config)


def _command(node: Node | None) -> list[str]:
    if node is None:
        return []
    if isinstance(node, SequenceNode):
        words = [str(_scalar(part, "command")) for part in node.value]
    else:
        import shlex

        try:
            words = shlex.split(_text(node, "command"))
        except ValueError as error:
            raise ConfigError(f"{yaml_nodes.place(node)}: command cannot be split into words: {error}") from None
    if not words:
        raise ConfigError(f"{yaml_nodes.place(node)}: command is empty")
    return words


def _axes(node: Node | None) -> list[Axis]:
    if node is None:
        return []
    axes: list[Axis] = []
    for key, value in _pairs(node, "axes"):
        where = f"axes.{key.value}"
        if not isinstance(value, SequenceNode) or not value.value:
            raise ConfigError(f"{yaml_nodes.place(value)}: {where} must be a list of values such as [512, 1024]")
        if key.value.startswith(ENVIRONMENT):
            _check_variable(key, key.value.removeprefix(ENVIRONMENT), where)
        values = [_scalar(part, where) for part in value.value]
        for number, one in enumerate(values):
            if any(one == other and type(one) is type(other) for other in values[:number]):
                raise ConfigError(f"{yaml_nodes.place(value.value[number])}: {where} has {one!r} twice")
        axes.append(Axis(key.value, values, [yaml_nodes.place(part) for part in value.value]))
    return axes


def _environment(node: Node | None) -> dict[str, str]:
    if node is not None:
        for key, _ in _pairs(node, "env"):
            _check_variable(key, key.value, f"env.{key.value}")
    return {name: str(value) for name, value in _mapping(node, "env").items()}


def _check_variable(key: Node, name: str, where: str) -> None:
    if not re.fullmatch(r"[^=\x00]+", name):
        raise ConfigError(f"{yaml_nodes.place(key)}: {yaml_nodes.shown(where)} is no name of an environment variable")


def _columns(node: Node | None) -> list[str]:
    if node is None:
        return []
    if not isinstance(node, SequenceNode) or not node.value:
        raise ConfigError(
            f"{yaml_nodes.place(node)}: columns must be a list of figures such as [peak, backward.peak, loss]"
        )
    names: list[str] = []
    for part in node.value:
        name = _text(part, "columns")
        try:
            columns.check(name)
        except ValueError as error:
            raise ConfigError(
                f"{yaml_nodes.place(part)}: columns: {yaml_nodes.shown(name)} is not a figure of a run; they {error}"
            ) from None
        if name in names:
            raise ConfigError(f"{yaml_nodes.place(part)}: columns has {name} twice")
        names.append(name)
    return names


def _search(node: Node | None) -> Search | None:
    if node is None:
        return None
    found = {key.value: value for key, value in _pairs(node, "search")}
    _known(node, found, "search", ("goal", "axis", "low", "high", "step"))
    goal: Goal | None = next((one for one in _GOALS if one == _text(found.get("goal"), "search.goal")), None)
    if goal is None:
        raise ConfigError(f"{yaml_nodes.place(found.get('goal', node))}: search.goal must be {', '.join(_GOALS)}")
    axis = _text(found.get("axis"), "search.axis")
    if goal == "fastest":
        if axis:
            raise ConfigError(
                f"{yaml_nodes.place(found['axis'])}: search.axis: the fastest is searched for over the axes"
            )
        return Search("fastest")
    if not axis or "high" not in found:
        raise ConfigError(
            f"{yaml_nodes.place(node)}: search needs axis and high, such as training.sequence_length and 8192"
        )
    low = _whole(found.get("low"), "search.low", 1, 0)
    high = _whole(found["high"], "search.high", 1, low + 1)
    return Search(goal, axis, low, high, _whole(found.get("step"), "search.step", 1, 1))


def _budget(node: Node | None) -> Budget:
    if node is None:
        return Budget()
    found = {key.value: value for key, value in _pairs(node, "budget")}
    _known(node, found, "budget", ("hours", "money", "price_per_hour"))
    hours, money, price = (_amount(found.get(name), f"budget.{name}") for name in ("hours", "money", "price_per_hour"))
    if money is not None and price is None:
        raise ConfigError(f"{yaml_nodes.place(node)}: budget.money needs price_per_hour, of all the GPUs together")
    limits = [hours * 3600] if hours is not None else []
    if money is not None and price:
        limits.append(money / price * 3600)
    return Budget(min(limits) if limits else None, price)


def _known(node: Node, found: dict[str, Node], path: str, names: tuple[str, ...]) -> None:
    for name in found:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
            raise ConfigError(f"{yaml_nodes.place(node)}: unknown key {path}.{yaml_nodes.shown(name)}; {hint}")


def _mapping(node: Node | None, path: str) -> dict[str, Value]:
    if node is None:
        return {}
    return {key.value: _scalar(value, f"{path}.{key.value}") for key, value in _pairs(node, path)}


def _pairs(node: Node, path: str) -> list[tuple[ScalarNode, Node]]:
    if not isinstance(node, MappingNode):
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be a section of keys and values")
    return yaml_nodes.pairs(node)


def _scalar(node: Node, path: str) -> Value:
    if not isinstance(node, ScalarNode):
        raise ConfigError(
            f"{yaml_nodes.place(node)}: {path} must be a number or a word, not {yaml_nodes.describe(node)}"
        )
    value = plain_scalar(node, path)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # rows of the results file take none (``bounds.Whole``)
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be a whole number of at most 64 bits")
    return value


def _text(node: Node | None, path: str) -> str:
    if node is None:
        return ""
    value = _scalar(node, path)
    return "" if value is None else str(value)


def _whole(node: Node | None, path: str, default: int, least: int) -> int:
    if node is None:
        return default
    value = _scalar(node, path)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be a whole number of at least {least}")
    return value


def _amount(node: Node | None, path: str) -> float | None:
    if node is None:
        return None
    value = _scalar(node, path)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be a number above 0")
    return float(value)


def _switch(node: Node | None, path: str, default: bool) -> bool:
    if node is None:
        return default
    value: Any = _scalar(node, path)
    if not isinstance(value, bool):
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be true or false")
    return value


def _duration(node: Node | None, path: str, default: float) -> float:
    return default if node is None else _with_unit(node, path, _SECONDS, "seconds, or such as 90 s, 10 m, 2 h", float)


def _size(node: Node | None) -> int | None:
    return None if node is None else int(_with_unit(node, "capacity", _SIZE, "a size such as 80GB or 24GiB", float))


def _with_unit(node: Node, path: str, units: dict[str, int], words: str, number: Callable[[str], float]) -> float:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", _text(node, path))
    try:
        value = number(found[1]) * units[found[2]] if found else 0.0
    except (ValueError, KeyError):
        value = 0.0
    if value <= 0:
        raise ConfigError(f"{yaml_nodes.place(node)}: {path} must be {words}")
    return value
