"""The end of a run: the exit status, and the closing lines of the output."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ....protocol.analysis.oom.words import remedy_words
from ....protocol.run import exits
from ....protocol.run.failure import FATAL, first_failure, standing
from ....protocol.run.job_log import last_lines
from ....protocol.run.rundir import ExitFile, RunDir
from ....protocol.text import sanitize
from ...model.jobs import failed
from ...model.run import RunModel
from .jobs_text import job_table

_LOG_LINES = 15
_LINE_LENGTH = 400


def exit_status(end: ExitFile) -> int:
    """Return a command's exit status for a job's end: the training's own, or one of ``protocol.run.exits.OWN``."""
    return exits.of_run(end)


def closing_lines(run: RunDir, end: ExitFile, model: RunModel, *, output_printed: bool = False) -> Iterator[str]:
    """Yield lines about a run's end, and the places of its results: checkpoint, recording, logs.

    Args:
        run: the run.
        end: how it ended.
        model: state of the run, with the folder of its checkpoints (``Plan.output_dir``; else that of ftmon's own
            trainer), and the rank that failed first.
        output_printed: whether the output of ranks and launcher was printed; then their last lines are not repeated.
    """
    if end.state == "failed" and not output_printed:
        rank = first_to_fail(model)
        if rank is not None:
            yield from (f"  rank {rank}| {sanitize(line)}" for line in last_words(run.rank_log(rank, "err")))
        yield from (f"  {sanitize(line)}" for line in last_words(run.logs / "launcher.log"))
    output_dir = model.plan.output_dir if model.plan else ""
    yield f"{run.id} {end.state}" + (f": {sanitize(end.text)}" if end.text else "")
    if end.state == "failed" and (first := first_failure(model.alerts)) is not None:
        yield f"why:        {sanitize(first.title)}"
        case = model.ooms.of_rank(first.rank) if first.kind == "oom" and first.rank is not None else None
        if case is not None:
            yield from (f"try first:  {sanitize(remedy_words(remedy), _LINE_LENGTH)}" for remedy in case.remedies[:1])
            yield f"details:    ftmon oom {shlex.quote(run.id)}"
    if model.has_jobs:
        bad = failed(model.jobs)
        yield f"jobs:       {len(model.jobs)}" + (f", {len(bad)} failed" if bad else "")
        yield from (f"            {line}" for line in job_table(model.jobs, end.time))
    yield from _results(run, Path(output_dir or run.path / "output"), is_over=end.state == "finished")
    if not run.path.exists():
        yield f"directory:  {run.path} was moved or removed during the run: no recording and no logs are there"
        return
    if run.recording.exists():
        yield f"recording:  {run.recording}"
        yield f"replay it:  ftmon replay {shlex.quote(run.id)}"
    if end.state == "failed":
        yield f"logs:       {run.logs}"


def attach_line(run_id: str, words: Sequence[str] = ()) -> str:
    """Return the line about a run that continues: ``ftmon attach`` with these words, or its id alone."""
    return f"{run_id} continues; attach again: ftmon attach {shlex.join(words or [run_id])}"


def _results(run: RunDir, output: Path, *, is_over: bool) -> Iterator[str]:
    """Yield the places of the trainer's results: the final model, and the newest checkpoint.

    Args:
        run: the run.
        output: folder of the results.
        is_over: whether training is finished, so that the checkpoint needs no resume.
    """
    model = output / "model"
    if any((model / name).exists() for name in ("config.json", "adapter_config.json")):
        yield f"model:      {model}"
        # A run of another trainer has no configuration that names its model.
        yield f"chat:       ftmon chat {shlex.quote(run.id if run.config.exists() else str(model))}"
    try:
        newest = output / "checkpoints" / (output / "checkpoints" / "latest").read_text().strip()
    except OSError:
        return
    yield f"checkpoint: {newest}"
    if is_over:
        return
    own = run.config.exists()
    words = ["resume", run.id] if own else ["train", "CONFIG.yaml", f"checkpoint.resume={newest}"]
    yield f"resume it:  ftmon {shlex.join(words)}"


def first_to_fail(model: RunModel) -> int | None:
    """Return the rank with the first failure or death; None if there is none.

    Failures of an earlier job, resolved when a later one trained, do not count.
    """
    blamed = standing(model.alerts, *FATAL)
    return min(blamed, key=lambda alert: (alert.time, alert.id)).rank if blamed else None


def last_words(log: Path, limit: int = _LOG_LINES) -> list[str]:
    """Return the last lines of a log (of the job or a rank) before the failure, long ones cut."""
    lines = last_lines(log, limit, own=True)
    return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines]
