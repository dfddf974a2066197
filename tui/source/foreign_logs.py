"""Reads logs of runs that ftmon did not watch into entries with the names of transformers' Trainer.

Formats: the ``trainer_state.json`` of a Trainer, W&B's ``.wandb`` and TensorBoard's event files, each by its own
package, and the text that DeepSpeed's engine prints (``steps_per_print``, ``wall_clock_breakdown``).
"""

import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import UsageError
from ...protocol.messages.telemetry import LAST_TIME, MAX_WHOLE
from ...protocol.run.targets import is_installed
from ...protocol.text import first_line

_LARGEST = 256 << 20
_LONGEST_ERROR = 4_096
_LONGEST_LINE = 65_536  # longer ones are read in parts: a file that is no text may have no end of a line
Entry = dict[str, Any]
"""What was logged at once: ``step``, figures by the Trainer's names and, where known, ``time`` (seconds since the
epoch), ``step_seconds`` and ``phases`` (seconds by phase)."""


class ForeignLog(msgspec.Struct):
    """A log that was read."""

    history: list[Entry]  # in the order of the log: where the step falls, an earlier run was resumed
    ended: float  # seconds since the epoch
    started: float | None = None  # none: unknown
    steps: int = 0  # the last step that was made, if the log says it; else 0
    planned: int = 0  # number of steps that were planned; 0: unknown
    failed: bool | None = None  # none: the log has no end


def read_log(path: Path) -> ForeignLog:
    """Read a log.

    Raises ``UsageError`` if it cannot be read, is of no known format, or the package that reads it is not installed.
    """
    try:
        if path.is_dir():
            return _read_folder(path)
        if path.exists() and not path.is_file():  # a pipe or a device, which may have no end
            raise UsageError(f"{path}: is not a regular file")
        with path.open("rb") as file:
            start = file.read(16).lstrip()[:1]
        if path.suffix == ".wandb":
            return _read_wandb(path)
        if "tfevents" in path.name:
            return _read_tensorboard(path)
        return _read_state(path) if path.suffix == ".json" or start == b"{" else _read_deepspeed(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None


def _read_folder(folder: Path) -> ForeignLog:
    """Read the log in a folder: a Trainer's checkpoint or output (its last checkpoint counts), or a tracker's."""
    by_step = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=lambda path: (len(path.parent.name), path))
    for state in (folder / "trainer_state.json", *reversed(by_step)):
        if state.is_file():
            return _read_state(state)
    if runs := sorted(folder.glob("run-*.wandb")):
        return _read_wandb(runs[0])
    if any(folder.glob("*tfevents*")):
        return _read_tensorboard(folder)
    found = [path for pattern in ("*/*tfevents*", "*/run-*.wandb") for path in folder.glob(pattern)]
    below = sorted({path.parent.name for path in found if not path.parent.is_symlink()})
    fix = f"; name one of its {len(below)} runs: {folder / below[-1]}" if below else ""
    raise UsageError(f"{folder}: has no file trainer_state.json, run-*.wandb or *tfevents*{fix}")


class TrainerState(msgspec.Struct):
    """The part of a ``trainer_state.json`` that is imported."""

    log_history: list[Entry]
    global_step: int = 0
    max_steps: int = 0


def _read_state(path: Path) -> ForeignLog:
    if path.stat().st_size > _LARGEST:
        raise UsageError(f"{path}: is larger than 256 MiB")
    try:
        tree = json.loads(path.read_bytes())  # which accepts the NaN that Python writes
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: is not JSON: {error}") from None
    try:
        state = msgspec.convert(tree, TrainerState)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: is not the trainer_state.json of a transformers Trainer: {error}") from None
    for number, entry in enumerate(state.log_history):
        step = entry.get("step")
        if type(step) is not int or not 0 <= step <= MAX_WHOLE:
            raise UsageError(f"{path}: log_history[{number}]: step must be a whole number of 0 or more, not {step!r}")
    history = state.log_history
    ended = path.stat().st_mtime
    runtime = next((found for one in reversed(history) if (found := number_of(one, "train_runtime"))), 0.0)
    started = max(0.0, ended - runtime) if math.isfinite(runtime) and runtime > 0 else None
    last = max((entry["step"] for entry in history), default=0)
    summarised = any("train_loss" in entry and entry["step"] == last for entry in history)
    over = state.global_step >= state.max_steps > 0 or summarised
    return ForeignLog(history, ended, started, state.global_step, state.max_steps, False if over else None)


def number_of(entry: Entry, key: str) -> float | None:
    """Return a number of an entry; None if it has none there."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


_STEPS = ("train/global_step", "trainer/global_step", "global_step", "step", "_step")
"""Names of the step, the first of which counts."""
_NAMES = {
    "loss": ("train/loss", "loss", "train_loss", "loss/train", "Train/Samples/train_loss"),
    "learning_rate": ("train/learning_rate", "learning_rate", "lr", "train/lr", "train_lr", "Train/Samples/lr"),
    "grad_norm": ("train/grad_norm", "grad_norm", "train/grad_norm_total", "gradient_norm"),
    "step_seconds": ("train/step_duration_seconds",),
}
_PHASE = "train/phase_duration_seconds/"
_EVALUATION = re.compile(r"(?:eval|evaluation|val|valid|validation)[/_]((?!global_step|epoch).+)")
_KNOWN = {name: key for key, names in _NAMES.items() for name in names}


def _entry(step: int, values: dict[str, float], at: float) -> Entry:
    """Return the entry of values by a tracker's names; its ``step`` is the only key if it has none that is imported."""
    entry: Entry = {"step": step}
    phases: dict[str, float] = {}
    for name, value in values.items():
        evaluation = _EVALUATION.fullmatch(name)
        if name in _KNOWN:
            entry[_KNOWN[name]] = value
        elif name.startswith(_PHASE):
            phases[name.removeprefix(_PHASE)] = value
        elif evaluation is not None and not name.endswith("_finite") and "finite/" not in name:
            entry[f"eval_{evaluation[1].replace('duration_seconds', 'runtime')}"] = value
    if phases:
        entry["phases"] = phases
    return {**entry, "time": at} if len(entry) > 1 else entry


def _read_wandb(path: Path) -> ForeignLog:
    """Read the records that W&B's own reader prints, one JSON object a line."""
    if not is_installed("wandb"):
        raise UsageError(f"{path}: is read by W&B's own reader, which is not installed: pip install 'ftmon[wandb]'")
    history: list[Entry] = []
    failed: bool | None = None
    words = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(path)]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said) as reader,
    ):
        for line in reader.stdout or ():
            try:
                record = msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            item = record.get("history", {}).get("item")
            if item is not None:
                values = {name.replace(".", "/"): number for name in item if (number := _float(item[name])) is not None}
                step = next((values[name] for name in _STEPS if name in values), None)
                if step is not None and 0 <= step <= MAX_WHOLE:
                    history.append(_entry(int(step), values, values.get("_timestamp", 0.0)))
            elif record.get("type") == "exit":
                failed = bool(record["exit"].get("exit_code"))
        reader.wait()
        said.seek(0)
        error = first_line(said.read(_LONGEST_ERROR).decode("utf-8", "replace"))
    if not history and (reader.returncode or error):  # with status 0 for a file that has no whole record
        raise UsageError(f"{path}: W&B cannot read it: {error}")
    return _timed(path, history, failed)


def _float(value: Any) -> float | None:
    """Return a number; W&B writes those that JSON has not as texts."""
    if isinstance(value, str) and value not in ("NaN", "Infinity", "-Infinity"):
        return None
    return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None


def _read_tensorboard(path: Path) -> ForeignLog:
    if not is_installed("tensorboard"):
        raise UsageError(
            f"{path}: is read by TensorBoard's own reader, which is not installed: pip install 'ftmon[tensorboard]'"
        )
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    # Without a limit of 0 it keeps a random choice of 10,000; purging drops what a restarted writer repeats, by time.
    accumulator = module.EventAccumulator(str(path), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    accumulator.Reload()
    events = [(event, name) for name in accumulator.Tags()["scalars"] for event in accumulator.Scalars(name)]
    events.sort(key=lambda each: each[0].wall_time)
    rows: list[tuple[int, dict[str, float], float]] = []
    for event, name in events:
        # One row has what one step's events have until a name comes again.
        if not rows or rows[-1][0] != event.step or name in rows[-1][1]:
            rows.append((event.step, {}, event.wall_time))
        rows[-1][1][name] = event.value
    return _timed(path, [_entry(*row) for row in rows if 0 <= row[0] <= MAX_WHOLE], None)


def _timed(path: Path, history: list[Entry], failed: bool | None) -> ForeignLog:
    """Return the log of entries with times; entries without a figure are left out."""
    history = [entry for entry in history if len(entry) > 1]
    for entry in history:
        if not 0 < entry.get("time", 0.0) < LAST_TIME:
            entry.pop("time", None)
    times = [entry["time"] for entry in history if "time" in entry]
    ended = max(times, default=path.stat().st_mtime)
    return ForeignLog(history, ended, min(times, default=None), failed=failed)


_PRINTED = re.compile(r"\[Rank 0\] step=(\d+), skipped=(\d+), lr=\[([^\],]*)")
_PIPELINE = re.compile(r"steps: (\d+) loss: (\S+) .*?iter time \(s\): (\S+)")
_TIMES = re.compile(r"time \(ms\) \|(.*)")
_TIME = re.compile(r"\| ([a-z_]+): ([\d.]+)")
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})\]")
_TIMERS = {"fwd": "forward", "forward": "forward", "bwd": "backward", "backward": "backward", "step": "optimizer"}
"""Phases by DeepSpeed's timers of a whole step; ``forward`` and ``backward`` are those of older versions."""


def _read_deepspeed(path: Path) -> ForeignLog:
    entries: list[Entry] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for entry in _deepspeed_entries(iter(lambda: file.readline(_LONGEST_LINE), "")):
            if entries and entries[-1]["step"] == entry["step"]:
                entries[-1].update(entry)
            else:
                entries.append(entry)
    if not entries:
        raise UsageError(
            f"{path}: is no log that can be imported: a trainer_state.json, a .wandb or tfevents file, or text with "
            "the lines of DeepSpeed's engine ('step=..., skipped=..., lr=...')"
        )
    return _timed(path, entries, None)


def _deepspeed_entries(lines: Iterable[str]) -> Iterator[Entry]:
    """Yield the entries of a log's lines; those of one step follow each other.

    The engine prints the number of a step every ``steps_per_print`` steps, and the timers of each step after it.
    """
    step, printed, at = 0, False, 0.0
    for line in lines:
        stamp = _STAMP.search(line)
        if stamp is not None:
            # In the time zone of its host, which it does not name: this host's.
            at = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + int(stamp[2]) / 1000
        known = {"time": at} if at else {}
        found = _PRINTED.search(line)
        pipeline = _PIPELINE.search(line)
        timers = _TIMES.search(line)
        if found is not None and int(found[1]) > 0:
            step, printed = int(found[1]), True
            yield {"step": step, **_numbers(learning_rate=found[3]), **known}
        elif pipeline is not None:
            step, printed = int(pipeline[1]), True
            yield {"step": step, **_numbers(loss=pipeline[2], step_seconds=pipeline[3]), **known}
        elif timers is not None:
            millis = {_TIMERS[name]: float(value) for name, value in _TIME.findall(f"|{timers[1]}") if name in _TIMERS}
            if len(millis) > 1:  # the timers of a micro-step have other names
                step, printed = step if printed else step + 1, False
                phases = {name: value / 1e3 for name, value in millis.items()}
                yield {"step": step, "phases": phases, "step_seconds": sum(phases.values()), **known}


def _numbers(**texts: str) -> Entry:
    entry: Entry = {}
    for name, text in texts.items():
        try:
            entry[name] = float(text)
        except ValueError:
            continue
    return entry
