"""How a run ended: as an exit status, and as the last lines a person reads about it."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from ...protocol.rundir import ExitFile, RunDir
from ...protocol.text import sanitize

INTERRUPTED = 130
_LOG_LINES = 15
_LOG_TAIL_BYTES = 16_384


def exit_status(end: ExitFile) -> int:
    """Map how the job ended to a command's exit status: 0 done, 1 failed, 130 ended by somebody's wish."""
    if end.exit_code == 0:
        return 0
    return INTERRUPTED if end.state == "stopped" else 1


def closing_lines(run: RunDir, end: ExitFile, output_dir: str = "") -> Iterator[str]:
    """Say how a run ended, and where what it leaves is: checkpoint, recording, logs.

    Args:
        run: the run.
        end: how it ended.
        output_dir: where its trainer writes checkpoints (``Plan.output_dir``); empty: where ftmon's own does.
    """
    if end.state == "failed":
        yield from (f"  {sanitize(line)}" for line in last_words(run))
    yield f"{run.id} {end.state}" + (f": {sanitize(end.text)}" if end.text else "")
    yield from _results(Path(output_dir or run.path / "output"))
    if run.recording.exists():
        yield f"recording:  {run.recording}"
        yield f"replay it:  ftmon replay {shlex.quote(run.id)}"
    if end.state == "failed":
        yield f"logs:       {run.logs}"


def attach_line(run: RunDir) -> str:
    """Say that a run goes on, and how to come back to it."""
    return f"{run.id} goes on; attach again: ftmon attach {shlex.quote(run.id)}"


def _results(output: Path) -> Iterator[str]:
    """Say where the trainer's results are: the final model, and the newest checkpoint to resume from."""
    if (output / "model" / "config.json").exists():
        yield f"model:      {output / 'model'}"
    try:
        newest = output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return
    yield f"checkpoint: {newest}  (resume: ftmon train CONFIG.yaml checkpoint.resume={shlex.quote(str(newest))})"


def last_words(run: RunDir, limit: int = _LOG_LINES) -> list[str]:
    """Return the last lines of the launcher's log: what the job itself said before it failed."""
    try:
        with (run.logs / "launcher.log").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-limit:]
