"""``ftmon status``: prints the state of one run, as text or as JSON."""

from argparse import Namespace
from collections.abc import Iterator

import msgspec

from ....protocol.run import run_store
from ....protocol.run.endings import ending_in_words
from ....protocol.text import duration, gib, sanitize
from ...model.progress import activity_words, early_stop_words, epoch_words
from ...model.run import RunModel
from ...model.runs import RunEntry, RunList, recorded_entry
from ...model.status import status
from ...source.find import recording_file
from ...source.load import describe, load
from ...source.overview import read_overview
from ..access.recordings import opened
from ..foreground.jobs_text import job_table
from ..foreground.narrate import evaluation_words, loss_words, mfu_words
from ..output.printable import print_json

_SHOWN = 16
"""Maximum number of listed ranks, and of alerts."""


def show_status(arguments: Namespace) -> int:
    """Print a run's latest recorded state; of a live run it is up to half a second old.

    Raises:
        RunNotFoundError: it is neither a recording nor a run.
        RecordingError: the named recording cannot be read.
    """
    recording = recording_file(arguments.run)
    entry: RunEntry | None = None
    if recording is None:
        run = run_store.find(arguments.run)
        recording, entry = run.recording, RunList().entry(run)
    model = RunModel()
    if entry is None or (entry.recording and not entry.problem):
        with opened(recording) as reader:
            info = reader.info()
            # The figures of an ended run are means over all its steps.
            overview = None if info.live else read_overview(reader, info)
            model = load(reader, info.last_t, describe(info), overview)
        entry = entry or recorded_entry(recording, info)
    if arguments.json:
        # The list's entry has the job's end even if the recording does not.
        known = {key: value for key, value in msgspec.structs.asdict(entry).items() if key not in ("ranks", "step")}
        print_json({**status(model), **known})
    else:
        for line in _lines(entry, model):
            print(line)
    return 0


def _lines(entry: RunEntry, model: RunModel) -> Iterator[str]:
    """Yield the state of a run in a few lines."""
    code = f", {ending_in_words(entry.exit_code, None)}" if entry.exit_code is not None and not entry.live else ""
    yield f"{sanitize(entry.id)}  {sanitize(entry.condition)}{code}{', live' if entry.live else ''}"
    if entry.subject:
        yield sanitize(entry.subject, 1000)
    if entry.reason:
        yield f"reason: {sanitize(entry.reason, 1000)}"
    if entry.problem or not entry.recording:
        yield f"recording: {entry.problem or 'none yet'}"
        return
    if model.has_jobs:
        yield from job_table(model.jobs, model.now)
        yield f"job {model.job}:"
    total = f" of {model.total_steps:,}" if model.total_steps else ""
    left = f", {duration(model.seconds_left)} left" if model.seconds_left and entry.live else ""
    epoch = f", epoch {epochs}" if (epochs := epoch_words(model)) else ""
    yield f"step {model.step:,}{total}{epoch}{left}"
    if entry.live and (activity := activity_words(model)):
        yield f"now: {activity}"
    rates = model.rates
    parts = [
        *loss_words(model),
        f"{rates.tokens_per_second:,.0f} tok/s" if rates.tokens_per_second else "",
        mfu_words(model),
        f"{rates.seconds_per_step:.3f} s/step" if rates.seconds_per_step else "",
        "(means over the run)" if model.ended and rates.seconds_per_step else "",
    ]
    if any(parts):
        yield "  ".join(filter(None, parts))
    if evaluated := model.training.evaluation:
        yield evaluation_words(evaluated, model.training.best)
    if model.training.early_stop is not None:
        yield early_stop_words(model.training.early_stop)
    if peak := model.peak:
        yield f"highest peak {gib(peak.bytes)}: rank {peak.rank}, {sanitize(peak.place, 60)}"
    if states := model.rank_states():
        yield "ranks: " + ", ".join(f"{count} {state}" for state, count in states.items())
    explained = [rank for rank in model.ranks.values() if rank.state_text]
    yield from (f"  rank {rank.rank} {rank.state}: {sanitize(rank.state_text)}" for rank in explained[:_SHOWN])
    yield from (f"{alert.severity}: {sanitize(alert.title)}" for alert in model.alerts.unresolved()[:_SHOWN])
    missing = f" ({sanitize(entry.missing)})" if entry.missing else ""
    yield f"recording: {sanitize(entry.recording)}{missing}"
