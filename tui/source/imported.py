"""Makes a recording of a run that ftmon did not watch, from its log (``foreign_logs``).

A log has losses, learning rates and gradient norms, and evaluations; some have times of steps and phases, none has
memory by phase. A loss that the Trainer logged is the mean over the ranks and over the steps since the log before.
"""

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...protocol.errors import RecordingError, UsageError
from ...protocol.messages.control import RankState, RunState
from ...protocol.messages.telemetry import Evaluation, PhaseRecord, Span, Step
from ...protocol.recording.writer import Writer
from ...protocol.run import rundir
from ...protocol.run.rundir import ExitFile, RunDir
from .foreign_logs import Entry, ForeignLog, number_of, read_log

_OF_TRAINING = ("loss", "learning_rate", "grad_norm", "step_seconds")
_NO_RESULTS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "loss", "perplexity")
"""What the results of an evaluation have besides its own."""
_LONGEST_SECONDS = 1e9


class Imported(msgspec.Struct):
    """An imported run."""

    run: RunDir
    steps: int  # logged steps
    last_step: int
    evaluations: int
    repeated: int  # entries left out because later ones repeat their steps


def without_repeated(history: list[Entry]) -> list[Entry]:
    """Return the entries of the training that led to the end.

    A run resumed from a checkpoint repeats the steps after it: where the step falls, the earlier entries of higher
    steps are dropped. Of several entries of one step with the same figure the last is kept.
    """
    kept: list[tuple[int, list[tuple[frozenset[str], Entry]]]] = []
    for entry in history:
        step, figures = entry["step"], _figures(entry)
        while kept and kept[-1][0] > step:
            kept.pop()
        if not kept or kept[-1][0] < step:
            kept.append((step, []))
        of_step = kept[-1][1]
        of_step[:] = [(known, other) for known, other in of_step if not known & figures]
        of_step.append((figures, entry))
    return [entry for _, entries in kept for _, entry in entries]


def _figures(entry: Entry) -> frozenset[str]:
    of_evaluations = (key for key in entry if key.endswith(("_loss", "_runtime")) and not key.startswith("train_"))
    return frozenset((*(entry.keys() & _OF_TRAINING), *of_evaluations)) or frozenset(entry)


def import_log(path: Path, name: str | None) -> Imported:
    """Make a run with a recording of a log; ``name``: of the run, None: from the file's folder.

    Steps without a time are spread evenly over the time of the run. Raises ``UsageError`` if the log cannot be read, or
    has no logged steps, ``RunDirError`` and ``RecordingError`` if the run cannot be made or written.
    """
    log = read_log(path)
    history = without_repeated(log.history)
    of_log = "log_history " if path.suffix == ".json" else ""
    if not any(_is_of_training(entry) or _prefixes(entry) for entry in history):
        raise UsageError(f"{path}: {of_log}has no loss and no evaluation: nothing to import")
    run = rundir.create(name or _name(path), ["ftmon", "import", str(path)], "import")
    try:
        return _write(run, log, history)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise


def _write(run: RunDir, log: ForeignLog, history: list[Entry]) -> Imported:
    started = log.ended if log.started is None else log.started
    content = msgspec.structs.replace(run.read_run(), created=started)
    run.write_run(content)
    last = history[-1]["step"]
    of_plan = f" of {log.planned:,}" if log.planned else ""
    text = f"imported after step {log.steps or last:,}{of_plan}"
    steps = evaluations = 0
    writer = Writer(run.recording, msgspec.structs.replace(content, host=""))  # the file does not name the host
    for seq, message in enumerate(_messages(history, started, (log.ended - started) / max(1, last)), 1):
        writer.append(seq, message.started if isinstance(message, Step) else message.time, message)
        steps += isinstance(message, Step)
        evaluations += isinstance(message, Evaluation)
    reason = "stopped" if log.failed is None else "failed" if log.failed else "finished"
    for message in (RankState(0, "finished", log.ended), RunState(reason, log.ended, text)):
        writer.append(writer.last_seq + 1, log.ended, message)
    writer.close()
    if writer.error or writer.lost:
        raise RecordingError(writer.error or f"{run.recording}: {writer.lost} messages could not be written")
    run.write_exit(ExitFile(int(bool(log.failed)), log.ended, reason, text))
    return Imported(run, steps, last, evaluations, len(log.history) - len(history))


def _messages(history: list[Entry], started: float, seconds: float) -> Iterator[Step | Evaluation]:
    best: dict[str, float] = {}
    for entry in history:
        step = entry["step"]
        at = entry.get("time") or started + seconds * step
        if _is_of_training(entry):
            yield _step(entry, step, at)
        for name, results in _evaluations(entry):
            loss = results.get("loss")
            is_best = loss is not None and loss < best.get(name, math.inf)
            if is_best and loss is not None:
                best[name] = loss
            own = {key: value for key, value in results.items() if key not in _NO_RESULTS}
            took = results.get("runtime", 0.0)
            yield Evaluation(
                0, step, at, name, loss, results.get("perplexity"), seconds=took, best=is_best, metrics=own
            )


def _step(entry: Entry, step: int, at: float) -> Step:
    loss, lr, grad_norm, seconds = (number_of(entry, key) for key in _OF_TRAINING)
    phases: list[PhaseRecord] = []
    unknown, begun = Span(0, 0, 0), 0
    for name in entry.get("phases", ()):
        took = _micros(entry["phases"][name])
        phases.append(PhaseRecord(name, begun, took, unknown, unknown))
        begun += took
    return Step(0, step, at, _micros(seconds), phases, loss=loss, lr=lr, grad_norm=grad_norm)


def _micros(seconds: float | None) -> int:
    return round(seconds * 1e6) if seconds is not None and 0 <= seconds < _LONGEST_SECONDS else 0


def _is_of_training(entry: Entry) -> bool:
    return any(number_of(entry, key) is not None for key in _OF_TRAINING)


def _prefixes(entry: Entry) -> list[str]:
    """Return what the names of each evaluation's results begin with, such as ``eval_squad``, the longest first."""
    found: set[str] = set()
    for key in entry:
        prefix = key.removesuffix("_loss")
        if prefix != key and prefix.startswith("eval"):
            found.add(prefix)
        elif key.endswith("_runtime") and not key.startswith("train_"):
            found.add(key.removesuffix("_runtime"))
    return sorted(found, key=lambda prefix: (-len(prefix), prefix))


def _evaluations(entry: Entry) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the name and the results of each evaluation of an entry; results belong to the longest prefix they have."""
    left = dict(entry)
    for prefix in _prefixes(entry):
        keys = [key for key in left if key.startswith(f"{prefix}_")]
        values = ((key.removeprefix(f"{prefix}_"), number_of(left, key)) for key in keys)
        found = {name: value for name, value in values if value is not None}
        for key in keys:
            del left[key]
        yield prefix.removeprefix("eval").strip("_")[:256] or "evaluation", found


def _name(path: Path) -> str:
    folder = path.absolute() if path.is_dir() else path.absolute().parent
    return f"{folder.parent.name}-{folder.name}" if folder.name.startswith("checkpoint-") else folder.name
