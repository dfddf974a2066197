"""Makes the command of a run from a configuration of the sweep."""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.run.run_options import RunOptions
from ...protocol.run.start_request import StartRequest
from ...protocol.sweep.rows import Settings, Value, key_of
from ..recipe.config import write, yaml_nodes
from ..recipe.config.load import load
from ..recipe.hardware import missing_packages
from .spec import ENVIRONMENT, LENGTH, PLACEHOLDER, Spec

STOP_GRACE_SECONDS = 5.0
"""Time between the request to end a run and its kill; its results are not needed."""
ALLOCATOR_ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

_MEASURING: dict[str, Value] = {
    "training.rehearsal": False,
    "training.total_batch": 0,
    "schedule.warmup_steps": 0,
    "checkpoint.every": 0,
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

    Args:
        spec: the sweep.
        settings: the configuration.
        name: name of the run.
        lengths: sequence lengths to measure in it, one after the other; empty: the configuration's own.
    """
    options = RunOptions(
        allocator_events=False, predict=False, on_hang="kill", hang_grace=spec.hang_grace, stop_grace=STOP_GRACE_SECONDS
    )
    environment = {**os.environ, **spec.environment, **_environment(settings)}
    if spec.command:
        command = [_filled(word, settings) for word in spec.command]
        return Job(StartRequest("run", name, options, command=command), environment)
    words = overrides(spec, {**settings, LENGTH: max(lengths)} if lengths else settings)
    if lengths:
        words.append(f"debug.lengths={json.dumps(list(lengths))}")
    request = StartRequest("train", name, options, config=spec.config, overrides=words)
    return Job(request, environment)


def overrides(spec: Spec, settings: Settings) -> list[str]:
    """Return the assignments that turn the base configuration into a run's."""
    steps: dict[str, Value] = {"training.max_steps": spec.steps + spec.warm_up}
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
    load(spec.config)
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
    base = write.dump(load(spec.config).config) if spec.config else ""
    allocator = {name: os.environ.get(name, "") for name in ALLOCATOR_ENVIRONMENT}
    parts: list[Any] = [base, spec.settings, spec.command, spec.environment, allocator, spec.steps, spec.warm_up]
    parts += ["one process"] if spec.one_process else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _check_one(spec: Spec, name: str, value: Value, where: str) -> None:
    try:
        load(spec.config, [_assignment(name, value)])
    except FtmonError as error:
        words = str(error).removeprefix(f"{yaml_nodes.COMMAND_LINE}: ")
        raise ConfigError(f"{where}: {words}") from None


def _assignment(name: str, value: Value) -> str:
    text = "null" if value is None else json.dumps(value)
    return f"{name}={text}"


def _environment(settings: Settings) -> dict[str, str]:
    return {
        name.removeprefix(ENVIRONMENT): "" if value is None else str(value)
        for name, value in settings.items()
        if name.startswith(ENVIRONMENT)
    }


def _filled(word: str, settings: Settings) -> str:
    return PLACEHOLDER.sub(lambda match: _plain(settings[match[1]]), word)


def _plain(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def group_of(settings: Settings, axis: str) -> str:
    """Return the name of a configuration without one of its axes."""
    return key_of({name: value for name, value in settings.items() if name != axis})
