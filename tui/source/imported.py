"""Makes a recording of a run that ftmon did not watch: from the ``trainer_state.json`` of transformers' ``Trainer``.

The file has the losses, learning rates and gradient norms that the Trainer logged, and its evaluations; no time of a
step and no memory. A logged loss is the mean over the ranks and over the steps since the log before.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.errors import RecordingError, UsageError
from ...protocol.messages.control import RankState, RunState
from ...protocol.messages.telemetry import MAX_WHOLE, Evaluation, Step
from ...protocol.recording.writer import Writer
from ...protocol.run import rundir
from ...protocol.run.rundir import ExitFile, RunDir

_LARGEST = 256 << 20
_OF_TRAINING = ("loss", "learning_rate", "grad_norm")
_NO_RESULTS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "loss")
"""What the Trainer adds to the results of each evaluation."""
Entry = dict[str, Any]


class TrainerState(msgspec.Struct):
    """The part of a ``trainer_state.json`` that is imported."""

    log_history: list[Entry]
    global_step: int = 0
    max_steps: int = 0


class Imported(msgspec.Struct):
    """An imported run."""

    run: RunDir
    steps: int
    """Logged steps."""
    last_step: int
    evaluations: int
    repeated: int
    """Entries left out because later ones repeat their steps."""


def read_state(path: Path) -> TrainerState:
    """Read a ``trainer_state.json``.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise UsageError(f"{path}: is larger than 256 MiB")
        tree = json.loads(path.read_bytes())  # which accepts the NaN that Python writes
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
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
    return state


def without_repeated(history: list[Entry]) -> list[Entry]:
    """Return the entries of the training that led to the end.

    A run resumed from a checkpoint repeats the steps after it: where the step falls, the earlier entries of higher
    steps are dropped. Of several entries of one step with the same keys the last is kept.
    """
    kept: list[tuple[int, dict[frozenset[str], Entry]]] = []
    for entry in history:
        step, keys = entry["step"], frozenset(entry)
        while kept and kept[-1][0] > step:
            kept.pop()
        if not kept or kept[-1][0] < step:
            kept.append((step, {}))
        of_step = kept[-1][1]
        of_step.pop(keys, None)
        of_step[keys] = entry
    return [entry for _, entries in kept for entry in entries.values()]


def import_state(path: Path, name: str | None) -> Imported:
    """Make a run with a recording of a ``trainer_state.json``; ``name``: of the run, None: from the file's folder.

    The end of the run is the file's time of modification; the steps are spread evenly over its ``train_runtime``.

    Raises:
        UsageError: the file cannot be read, or has no logged steps.
        RunDirError: the run directory cannot be made.
        RecordingError: the recording cannot be written.
    """
    state = read_state(path)
    history = without_repeated(state.log_history)
    if not any(_is_of_training(entry) or _prefix(entry) for entry in history):
        raise UsageError(f"{path}: log_history has no loss and no evaluation: nothing to import")
    ended = path.stat().st_mtime
    runtime = next((found for one in reversed(history) if (found := _number(one, "train_runtime"))), 0.0)
    started = max(0.0, ended - runtime) if math.isfinite(runtime) and runtime > 0 else ended
    run = rundir.create(name or _name(path), ["ftmon", "import", str(path)], "import")
    try:
        return _write(run, state, history, started, ended)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def _write(run: RunDir, state: TrainerState, history: list[Entry], started: float, ended: float) -> Imported:
    content = msgspec.structs.replace(run.read_run(), created=started)
    run.write_run(content)
    last = history[-1]["step"]
    summarised = any("train_loss" in entry and entry["step"] == last for entry in history)
    over = state.global_step >= state.max_steps > 0 or summarised
    text = f"imported after step {state.global_step:,} of {state.max_steps:,}"
    seconds = (ended - started) / max(1, last)
    steps = evaluations = 0
    writer = Writer(run.recording, msgspec.structs.replace(content, host=""))  # the file does not name the host
    for seq, message in enumerate(_messages(history, started, seconds), 1):
        writer.append(seq, started + seconds * message.step, message)
        steps += isinstance(message, Step)
        evaluations += isinstance(message, Evaluation)
    reason = "finished" if over else "stopped"
    for message in (RankState(0, "finished", ended), RunState(reason, ended, text)):
        writer.append(writer.last_seq + 1, ended, message)
    writer.close()
    if writer.error or writer.lost:
        raise RecordingError(writer.error or f"{run.recording}: {writer.lost} messages could not be written")
    run.write_exit(ExitFile(0, ended, reason, text))
    return Imported(run, steps, last, evaluations, len(state.log_history) - len(history))


def _messages(history: list[Entry], started: float, seconds: float) -> Iterator[Step | Evaluation]:
    best: dict[str, float] = {}
    for entry in history:
        at, step = started + seconds * entry["step"], entry["step"]
        if _is_of_training(entry):
            loss, lr, grad_norm = (_number(entry, key) for key in _OF_TRAINING)
            yield Step(0, step, at, 0, [], loss=loss, lr=lr, grad_norm=grad_norm)
        prefix = _prefix(entry)
        if prefix:
            name = prefix.removeprefix("eval").strip("_")[:256] or "evaluation"
            loss = _number(entry, f"{prefix}_loss")
            is_best = loss is not None and loss < best.get(name, math.inf)
            if is_best and loss is not None:
                best[name] = loss
            took = _number(entry, f"{prefix}_runtime") or 0.0
            yield Evaluation(
                *(0, step, at, name, loss), seconds=took, best=is_best, metrics=dict(_results(entry, f"{prefix}_"))
            )


def _is_of_training(entry: Entry) -> bool:
    return any(_number(entry, key) is not None for key in _OF_TRAINING)


def _prefix(entry: Entry) -> str:
    """Return what the names of an evaluation's results begin with, such as ``eval_squad``; empty: no evaluation."""
    for suffix in ("_runtime", "_loss"):
        found = [key.removesuffix(suffix) for key in entry if key.endswith(suffix) and not key.startswith("train_")]
        known = [prefix for prefix in found if suffix == "_runtime" or prefix.startswith("eval")]
        if known:
            return min(known, key=len)
    return ""


def _results(entry: Entry, prefix: str) -> Iterator[tuple[str, float]]:
    for key in entry:
        name = key.removeprefix(prefix)
        value = _number(entry, key)
        if key.startswith(prefix) and name not in _NO_RESULTS and value is not None:
            yield name, value


def _number(entry: Entry, key: str) -> float | None:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _name(path: Path) -> str:
    folder = path.absolute().parent
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("checkpoint-") else folder.name
