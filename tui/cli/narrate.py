"""Plain lines of a run: its events, the same for a live run and its replay; its jobs; its end and results."""

import shlex
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...protocol.analysis.oom.words import remedy_words
from ...protocol.messages.control import Alert
from ...protocol.messages.hosts import Job
from ...protocol.messages.telemetry import Evaluation
from ...protocol.run.end import FATAL, first_failure, last_lines, standing
from ...protocol.run.rundir import ExitFile, RunDir
from ...protocol.text import counted, duration, gib, sanitize
from ..model.oom import verdict_of
from ..model.run import RunInfo, RunModel, early_stop_words
from ..model.runs import JobRow, failed, job_row, job_rows
from ..model.training import perplexity_of

_COLUMNS = 80
_PLACES = ("frame", "place")  # keys of evidence with a place in the script
_SHOWN = 40  # maximum number of listed jobs: the last ones


def job_table(jobs: Mapping[int, Job], now: float) -> Iterator[str]:
    """Yield the table of jobs, with the reason below each failed one."""
    rows = job_rows(jobs, now)
    if len(rows) > _SHOWN:
        yield f"jobs: the last {_SHOWN} of {len(rows)}; all of them: --json"
    shown = rows[-_SHOWN:]
    resident = any(row.job.peak != row.job.allocated_peak for row in shown)
    heads = ("allocated", "reserved", *(("resident",) if resident else ()))
    table = [("job", "outcome", "ranks", "steps", "s/step", "loss", *heads, "time", "command")]
    table += [_cells(row, resident) for row in shown]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for at, cells in enumerate(table):
        left = [cells[0].rjust(widths[0]), cells[1].ljust(widths[1])]
        middle = [cell.rjust(width) for cell, width in zip(cells[2:-1], widths[2:-1], strict=True)]
        yield "  ".join([*left, *middle, cells[-1]]).rstrip()
        if at and shown[at - 1].text:
            yield f"{' ' * widths[0]}    {shown[at - 1].text}"


def _cells(row: JobRow, resident: bool) -> tuple[str, ...]:
    job = row.job
    peaks = [job.allocated_peak, job.reserved_peak, *([job.peak] if resident else [])]
    outcome = row.outcome if job.shown else f"{row.outcome} (not shown)"
    return (
        *(str(job.number), outcome, str(job.world_size)),
        f"{job.steps:,}",
        f"{job.step_us / 1e6:.3f}" if job.step_us else "-",
        f"{job.loss:.4f}" if job.loss is not None else "-",
        *(gib(peak) if job.steps else "-" for peak in peaks),
        duration(row.seconds),
        row.words,
    )


def job_line(jobs: Mapping[int, Job], number: int, now: float) -> str:
    """Return the state of a job in one line."""
    row = job_row(jobs, number, now)
    job, rank = row.job, row.job.peak_rank
    parts = [f"job {number} {row.outcome}", row.words, counted(job.steps, "step")]
    if job.loss is not None:
        parts.append(f"loss {job.loss:.4f}")
    if rank is not None and (top := rank.peak_phase) is not None and job.peak:
        parts.append(f"peak {gib(job.peak)} (rank {rank.rank}, {top.name} of step {top.peak_step:,})")
    parts.append(duration(row.seconds))
    return "  ".join(filter(None, parts)) + (f": {row.text}" if row.text else "")


PROGRESS_SECONDS = 2.0
"""Minimum interval of progress lines, by the run's own clock, so that a replay prints the same as the live run."""

_MARKS = {"info": ("·", "-"), "warning": ("▲", "!"), "error": ("✖", "X")}


class Narrator:
    """Makes the lines of a run; call ``new_lines`` after frames were applied to the model."""

    def __init__(self, *, ascii_only: bool = False, with_output: bool = False) -> None:
        """Start at the beginning of a run; ``with_output``: include the ranks' output."""
        self._ascii = ascii_only
        self.with_output = with_output
        self._step = 0
        self._step_at = float("-inf")
        self._introduced = False
        self._state = "starting"
        self._alerts: dict[int, bool] = {}
        self._alerts_version = 0
        self._remedied: set[int] = set()
        """Ids of alerts whose remedy was printed: it may become known after they were raised."""
        self._logs_version = 0
        self._log_seq = 0
        self._job = 0
        self._results_version = 0
        self._printed_results: set[tuple[str, int, str]] = set()
        """Printed evaluations, checkpoints and early stops: kind, step, name."""
        self._activities = 0  # number of the job's activities that were printed or skipped
        self._printed_jobs: set[int] = set()

    def new_lines(self, model: RunModel) -> Iterator[str]:
        """Yield the lines, often none, about changes of ``model`` since the last call."""
        for text in self._news(model):
            yield text.encode("ascii", "replace").decode() if self._ascii else text

    def _news(self, model: RunModel) -> Iterator[str]:
        yield from self._jobs(model)
        if not self._introduced and _all_are_known(model):
            self._introduced = True
            yield _at(model.now, _introduction(model))
        if self.with_output:
            yield from self._output(model)
        step = model.reported_step
        if not self._step:
            # Activities before the first step, such as the rehearsal, are printed before it.
            yield from self._results(model)
        self._step = min(self._step, step)  # another training in the same process counts from 1 again
        if step > self._step and (self._is_due(model) or model.ended):
            self._step, self._step_at = step, model.now
            yield _at(model.now, _progress(model))
        yield from self._results(model)
        if model.alerts.version != self._alerts_version:
            self._alerts_version = model.alerts.version
            for alert in model.alerts:
                yield from self._alert(alert, model.now)
        if model.state != self._state:
            self._state = model.state
            if model.ended or model.state == "stopping":
                why = f": {sanitize(model.state_text)}" if model.state_text else ""
                yield _at(model.state_time or model.now, f"{model.state}{why}")

    def _results(self, model: RunModel) -> Iterator[str]:
        training = model.training
        if training.version == self._results_version:
            return
        self._results_version = training.version
        for evaluation in training.evaluations:
            if self._is_new("evaluation", evaluation.step, evaluation.name):
                yield _at(evaluation.time, evaluation_words(evaluation, training.best))
        for checkpoint in training.checkpoints:
            if self._is_new("checkpoint", checkpoint.step, checkpoint.path):
                size = f", {gib(checkpoint.bytes)}" if checkpoint.bytes else ""
                spent = f" in {duration(checkpoint.seconds)}" if checkpoint.seconds else ""
                best = ", the best so far" if checkpoint.best else ""
                step = f"checkpoint of step {checkpoint.step:,}: "
                yield _at(checkpoint.time, f"{step}{sanitize(checkpoint.path, 300)}{size}{spent}{best}")
        stop = training.early_stop
        if stop is not None and self._is_new("early stop", stop.step, ""):
            yield _at(stop.time, early_stop_words(stop))
        begun, self._activities = training.begun[self._activities :], len(training.begun)
        for activity in begun:
            if activity.name not in ("evaluation", "checkpoint"):
                text = f": {sanitize(activity.text, 500)}" if activity.text else ""
                yield _at(activity.time, f"{sanitize(activity.name, 40)}{text}")

    def _is_new(self, kind: str, step: int, name: str) -> bool:
        """Return whether to print a result: not if it is an earlier one, which a late join reads afterwards."""
        if (kind, step, name) in self._printed_results:
            return False
        latest = max((number for of, number, _ in self._printed_results if of == kind), default=0)
        self._printed_results.add((kind, step, name))
        return step >= latest

    def _jobs(self, model: RunModel) -> Iterator[str]:
        if model.job == self._job and not model.has_jobs:
            return
        for number, job in model.jobs.items() if model.has_jobs else ():
            if job.is_over and number not in self._printed_jobs:
                self._printed_jobs.add(number)
                if number == model.job == self._job and model.reported_step > self._step:
                    self._step, self._step_at = model.reported_step, model.now
                    yield _at(model.now, _progress(model))
                yield _at(job.ended or model.now, job_line(model.jobs, number, model.now))
        if model.job != self._job:
            if self._job:
                self._step, self._step_at, self._introduced = 0, float("-inf"), False
                self._printed_results.clear()
                self._activities = 0
                row = job_row(model.jobs, model.job, model.now)
                yield _at(model.jobs[model.job].started, f"job {model.job} begins  {row.words}")
            self._job = model.job

    def _is_due(self, model: RunModel) -> bool:
        late = model.now - self._step_at >= PROGRESS_SECONDS
        return late or model.reported_step == model.total_steps or model.training.early_stop is not None

    def _output(self, model: RunModel) -> Iterator[str]:
        if model.logs.version == self._logs_version:
            return
        # A new model after a late join restarts its version; the stream's numbers continue.
        news = model.logs.version - (self._logs_version if model.logs.version > self._logs_version else 0)
        self._logs_version = model.logs.version
        for line in model.logs.select(limit=news):
            if line.seq <= self._log_seq:
                continue
            self._log_seq = line.seq
            source = "launcher" if line.rank < 0 else f"rank {line.rank}"
            yield f"{source}| {sanitize(line.text)}"

    def _alert(self, alert: Alert, now: float) -> Iterator[str]:
        resolved = alert.resolved is not None
        known = self._alerts.get(alert.id)
        self._alerts[alert.id] = resolved
        if known is None or (known and not resolved):  # new, or raised again
            mark = _MARKS[alert.severity][self._ascii]
            yield _at(now if known else alert.time, f"{mark} {alert.kind}: {sanitize(alert.title)}")
            self._remedied.discard(alert.id)
        if not resolved and alert.id not in self._remedied and (lines := list(remedy_lines(alert))):
            self._remedied.add(alert.id)
            yield from lines
        if resolved and not known:
            yield _at(alert.resolved or alert.time, f"  over: {sanitize(alert.title)}")


def remedy_lines(alert: Alert, indent: int = 11) -> Iterator[str]:
    """Yield what an alert's evidence says to do, and the place in the code if known, in lines of 80 columns."""
    verdict = verdict_of(alert)
    if verdict is None or not verdict.remedy:
        return
    places = (verdict.where, *(alert.evidence.get(key) for key in _PLACES))
    place = next((sanitize(one, 200) for one in places if isinstance(one, str) and one), "")
    saves = f" (saves {gib(verdict.saves_bytes)})" if verdict.saves_bytes > 0 else ""
    at = f"{place}: " if place and place not in alert.title else ""
    text = f"try: {at}{sanitize(verdict.remedy, 1000)}{saves}"
    yield from textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + len("try: ")),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _all_are_known(model: RunModel) -> bool:
    hellos = [rank.hello for rank in model.ranks.values() if rank.hello]
    if not 0 < model.info.world_size <= len(hellos):
        return False
    # A rank sends a hello before it makes its model or uses its GPU, and another one after that. Before its first step
    # the device CPU may not be final.
    return model.reported_step > 0 or (bool(model.info.model) and all(hello.device.kind == "cuda" for hello in hellos))


def _introduction(model: RunModel) -> str:
    info = model.info
    hellos = [rank.hello for rank in model.ranks.values() if rank.hello]
    devices = ", ".join(sorted({sanitize(hello.device.name) for hello in hellos}))
    ranks = f"{counted(info.world_size, 'rank')} on {devices}"
    zero = f"ZeRO-{info.zero_stage}" if info.zero_stage is not None else ""
    return ", ".join(filter(None, (ranks, sanitize(info.model) + _trained(info), zero, info.precision, info.backend)))


def _trained(info: RunInfo) -> str:
    """Return the share of the parameters that is trained, in words; empty if it is all of them, or not known."""
    some = 0 < info.trainable_parameters < info.parameters
    return f" ({info.trainable_parameters / info.parameters:.2%} of its parameters trained)" if some else ""


def _progress(model: RunModel) -> str:
    total = f"/{model.total_steps}" if model.total_steps else ""
    job = f"job {model.job} " if model.has_jobs else ""
    parts = [f"{job}step {model.reported_step}{total}", *figure_words(model)]
    if model.peak is not None:
        parts.append(f"peak {gib(model.peak.bytes)}")
    if model.seconds_left:
        parts.append(f"{duration(model.seconds_left)} left")
    return "  ".join(parts)


def evaluation_words(evaluation: Evaluation, best: Evaluation | None) -> str:
    """Return an evaluation's result in a line; ``best`` is the one with the lowest loss so far."""
    words = f"{sanitize(evaluation.name, 40)} at step {evaluation.step:,}:"
    if evaluation.loss is not None:
        words += f" loss {evaluation.loss:.4f}"
    if (perplexity := perplexity_of(evaluation)) is not None:
        words += f"  perplexity {perplexity:.4g}"
    words += "".join(f"  {sanitize(name, 30)} {value:.4g}" for name, value in list(evaluation.metrics.items())[:4])
    if evaluation.seconds:
        words += f"  in {duration(evaluation.seconds)}"
    if best is not None and best.loss is not None and best.step < evaluation.step:
        words += f"  (best {best.loss:.4f} at step {best.step:,})"
    return words


def figure_words(model: RunModel) -> list[str]:
    """Return the known ones of loss (with several engines or optimizers the loss of each), tokens/s, MFU, step time."""
    rates, several = model.rates, model.losses_by_name
    parts: list[str] = []
    if len(several) > 1:
        parts.append("loss " + ", ".join(f"{sanitize(name, 24)} {loss:.4f}" for name, loss in several.items()))
    elif model.loss is not None:
        parts.append(f"loss {model.loss:.4f}")
    if rates.tokens_per_second:
        parts.append(f"{rates.tokens_per_second:,.0f} tok/s")
    if model.mfu is not None:
        parts.append(f"MFU {model.mfu * 100:.1f} %")
    if rates.seconds_per_step >= 0.0005:  # else it reads 0.000; an imported run has no times
        parts.append(f"{rates.seconds_per_step:.3f} s/step")
    return parts


def _at(t: float, text: str) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(t))} {text}"


_LOG_LINES = 15
_UNRESOLVED = 3
_LINE_LENGTH = 400


def closing_lines(run: RunDir, end: ExitFile, model: RunModel, *, output_printed: bool = False) -> Iterator[str]:
    """Yield lines about a run's end, and the places of its results: checkpoint, recording, logs.

    If the output of ranks and launcher was printed, their last lines are not repeated.
    """
    if end.state == "failed" and not output_printed:
        # Failures of an earlier job, resolved when a later one trained, do not count.
        blamed = min(standing(model.alerts, *FATAL), key=lambda alert: (alert.time, alert.id), default=None)
        if blamed is not None and (rank := blamed.rank) is not None:
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
        else:
            yield from remedy_lines(first, indent=12)
    if end.state == "finished":
        yield from _unresolved(model)
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


def _unresolved(model: RunModel) -> Iterator[str]:
    """Yield a line for each of the first warnings about the training that were never resolved."""
    left = [alert for alert in model.alerts.unresolved() if alert.kind == "health" and alert.severity != "info"]
    yield from (f"unresolved: {sanitize(alert.title, _LINE_LENGTH)}" for alert in left[:_UNRESOLVED])
    if len(left) > _UNRESOLVED:
        yield f"            and {len(left) - _UNRESOLVED} more: ftmon report"


def attach_line(run_id: str, words: Sequence[str] = ()) -> str:
    """Return the line about a run that continues: ``ftmon attach`` with these words, or its id alone."""
    return f"{run_id} continues; attach again: ftmon attach {shlex.join(words or [run_id])}"


def _results(run: RunDir, output: Path, *, is_over: bool) -> Iterator[str]:
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


def last_words(log: Path) -> list[str]:
    """Return the last lines of a log (of the job or a rank) before the failure, long ones cut."""
    lines = last_lines(log, _LOG_LINES, own=True)
    return [line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]}..." for line in lines]
