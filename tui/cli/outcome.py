"""How a run ended: as an exit status, and as the last lines a person reads about it."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...protocol.rundir import ExitFile, RunDir
from ...protocol.text import sanitize
from ..model.run import RunModel

INTERRUPTED = 130
WRONG_USAGE = 2
HUNG = 3
HUNG_AT_EXIT = 4
_LOG_LINES = 15
_LINE_LENGTH = 400
_LOG_TAIL_BYTES = 16_384
_FATAL = ("failure", "oom", "died")


def exit_status(end: ExitFile, kind: str = "run") -> int:
    """Map how the job ended to a command's exit status.

    Args:
        end: how it ended.
        kind: the run's kind. Where the job is ftmon's own trainer, its 2 means what it means for the command: a wrong
            configuration, found out where the model or the data were loaded.

    Returns:
        0 done, 1 failed, 2 wrong configuration, 3 it hung and ftmon ended it (``--on-hang``), 4 it hung at exit after
        its work was done and ftmon ended it (``--exit-timeout``), 130 ended by somebody's wish before it was done.
    """
    if end.cause:
        return HUNG_AT_EXIT if end.cause == "hang-at-exit" else HUNG
    if end.state == "stopped":
        return INTERRUPTED
    if end.exit_code == WRONG_USAGE and kind in ("demo", "train"):
        return WRONG_USAGE
    return int(end.exit_code != 0)


def closing_lines(run: RunDir, end: ExitFile, model: RunModel, *, output_told: bool = False) -> Iterator[str]:
    """Say how a run ended, and where what it leaves is: checkpoint, recording, logs.

    Args:
        run: the run.
        end: how it ended.
        model: what is known of the run: where its trainer writes checkpoints (``Plan.output_dir``; without one, where
            ftmon's own does), and which rank failed first.
        output_told: what the ranks and the launcher printed was told already; their last words are not said again.
    """
    if end.state == "failed" and not output_told:
        first = first_to_fail(model)
        if first is not None:
            yield from (f"  rank {first}| {sanitize(line)}" for line in last_words(run.rank_log(first, "err")))
        yield from (f"  {sanitize(line)}" for line in last_words(run.logs / "launcher.log"))
    output_dir = model.plan.output_dir if model.plan else ""
    yield f"{run.id} {end.state}" + (f": {sanitize(end.text)}" if end.text else "")
    yield from _results(Path(output_dir or run.path / "output"))
    if run.recording.exists():
        yield f"recording:  {run.recording}"
        yield f"replay it:  ftmon replay {shlex.quote(run.id)}"
    if end.state == "failed":
        yield f"logs:       {run.logs}"


def attach_line(run_id: str, words: Sequence[str] = ()) -> str:
    """Say that a run goes on, and how to come back to it: with ``ftmon attach`` and these words, or its id alone."""
    return f"{run_id} goes on; attach again: ftmon attach {shlex.join(words or [run_id])}"


def _results(output: Path) -> Iterator[str]:
    """Say where the trainer's results are: the final model, and the newest checkpoint to resume from."""
    if (output / "model" / "config.json").exists():
        yield f"model:      {output / 'model'}"
    try:
        newest = output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return
    yield f"checkpoint: {newest}  (resume: ftmon train CONFIG.yaml checkpoint.resume={shlex.quote(str(newest))})"


def first_to_fail(model: RunModel) -> int | None:
    """Return the rank whose failure or death came first; None when no rank is to blame."""
    blamed = [alert for alert in model.alerts if alert.kind in _FATAL and alert.severity == "error"]
    return min(blamed, key=lambda alert: (alert.time, alert.id)).rank if blamed else None


def last_words(log: Path, limit: int = _LOG_LINES) -> list[str]:
    """Return the last lines of a log, the long ones cut: what the job, or one rank of it, said before it failed."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines if line.strip()][
        -limit:
    ]
