"""``ftmon attach``, ``replay``, ``ls``, ``status`` and ``logs``: watch, list and print runs, live or recorded."""

import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap

import msgspec

from ...protocol.errors import HubError, UsageError
from ...protocol.messages.telemetry import LogLine
from ...protocol.run import exits, rundir
from ...protocol.run.end import ending_in_words
from ...protocol.run.rundir import RunDir
from ...protocol.run.start import CommandEnd, module_command
from ...protocol.text import cells_of, counted, duration, gib, sanitize, wrapped
from ..model.run import RunModel, TerminalNotices, activity_words, early_stop_words, epoch_words, status
from ..model.runs import RunEntry, RunList, recorded_entry
from ..source.load import describe, load, read_overview
from . import output
from .access import StartFailedError, check_rank, living_hub, opened
from .follow import Standing, await_exporters, follow, kept, passed_on
from .narrate import Narrator, attach_line, closing_lines, evaluation_words, figure_words, job_table, remedy_lines
from .output import print_json

_POLL_SECONDS = 0.1


FOREIGN = "ftmon.trainer.host.foreign"


def watch_foreign(arguments: Namespace) -> int:
    """Watch a run that was started without ftmon, by the pid of a rank or a launcher, or all of this user."""
    if arguments.all == (arguments.pid is not None):
        raise UsageError("watch needs the pid of a rank or of its launcher, or --all")
    words = ["--all"] if arguments.all else [str(arguments.pid)]
    done = subprocess.run(module_command(FOREIGN, words), stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        raise StartFailedError(done.stderr.decode(errors="replace").strip() or FOREIGN, done.returncode)
    found = [msgspec.json.decode(line, type=_Watched) for line in done.stdout.splitlines()]
    if len(found) > 1:
        return _print_watched(found)
    for note in found[0].notes:
        print(sanitize(note, 1000))
    if arguments.detach:
        print(attach_line(RunDir(found[0].run).id))
        return 0
    return watch(RunDir(found[0].run), arguments)


def _print_watched(found: "list[_Watched]") -> int:
    """Print a line for each run, then what holds for several of them once."""
    for each in found:
        print(sanitize(f"{RunDir(each.run).id}: {each.notes[0] if each.notes else 'is watched already'}", 1000))
    for note, count in Counter(note for each in found for note in each.notes[1:]).items():
        print(sanitize(note if count == len(found) else f"{counted(count, 'run')}: {note}", 1000))
    print("watch one of them: ftmon attach RUN")
    return 0


class _Watched(msgspec.Struct):
    run: str
    notes: list[str]


def choose(arguments: Namespace) -> int:
    """Open the list of runs; without a terminal print it."""
    if output.why_no_app():
        return list_runs(arguments)
    from ..app import run_picker

    rundir.checked_home()
    return run_picker(ascii_only=output.draws_ascii(arguments))


def attach(arguments: Namespace) -> int:
    """Watch a run of this user, or a run on another host over ssh:// or tcp://."""
    if arguments.run is not None and arguments.run.startswith(("tcp://", "ssh://")):
        from .remote import attach_remote, attach_ssh

        return (attach_remote if arguments.run.startswith("tcp://") else attach_ssh)(arguments)
    run = rundir.find(arguments.run)
    if run.read_exit() is None:
        run.check()
        try:
            living_hub(run)
        except HubError as error:
            print(f"ftmon: {error}; showing what was recorded", file=sys.stderr)
    return watch(run, arguments)


def watch(run: RunDir, arguments: Namespace, line: CommandEnd | None = None) -> int:
    """Show a run until it ends or the user quits.

    ``line``: the connection to the launcher if this command started the run, whose exit status then is the command's.
    """
    owned = line is not None
    if not opens_app(arguments):
        if run.read_exit() is not None and not owned:
            return print_recording(run.recording, arguments)
        from ..source.live import LiveSource

        narrator = Narrator(ascii_only=output.draws_ascii(arguments), with_output=run.read_run().kind == "run")
        return follow(LiveSource(run), run, narrator, standing=Standing(run, line), owned=owned)
    return _in_app(run, arguments, Standing(run, line), owned)


def _in_app(run: RunDir, arguments: Namespace, standing: Standing, owned: bool) -> int:
    """Watch in the app. The run outlives it, unless SIGTERM ends the app, which ends the run too."""
    from ..app import run_app
    from ..source.live import LiveSource

    standing.let_go()
    source = LiveSource(run)
    with passed_on(standing.send, owned) as stopped:
        status = run_app(
            source,
            ascii_only=output.draws_ascii(arguments),
            read_only=arguments.read_only,
            ends=stopped.is_set,
            notices=TerminalNotices(run),
        )
        end = standing.end()
        while end is None and stopped.is_set():
            standing.send_waiting()
            end = standing.end() or standing.end_without_launcher(source.model)
            time.sleep(_POLL_SECONDS)
    if end is None:
        print(attach_line(run.id))
        return status
    for text in closing_lines(run, end, source.model):
        print(text)
    if not owned:
        return status
    with kept((signal.SIGINT, signal.SIGTERM)) as signals:
        await_exporters(standing, print, signals)
    return exits.of_run(end)


def replay(arguments: Namespace) -> int:
    """Play a recording: a file, a run directory, or a run by name."""
    path = rundir.find_recording(arguments.run)
    if not opens_app(arguments):
        return print_recording(path, arguments)
    from ..app import run_app
    from ..source.replay import ReplaySource

    return run_app(ReplaySource(path), ascii_only=output.draws_ascii(arguments), read_only=True)


def print_recording(path: Path, arguments: Namespace) -> int:
    """Print a recording as the lines of the live run; raise ``RecordingError`` if it is none, or cannot be read."""
    model = RunModel()
    narrator = Narrator(ascii_only=output.draws_ascii(arguments))
    with opened(path) as reader:
        info = reader.info()
        while frames := reader.frames(model.last_seq, 2000):
            for frame in frames:
                model.apply(frame)
                for line in narrator.new_lines(model):
                    print(line)
    if info.missing:
        print(f"incomplete: {info.missing}")
    return 0


def opens_app(arguments: Namespace) -> bool:
    """Return whether the app can open; if it was requested and cannot, print the reason."""
    if arguments.plain:
        return False
    reason = output.why_no_app()
    if reason and sys.stderr.isatty():
        print(f"ftmon: {reason}; plain lines instead", file=sys.stderr)
    return not reason


def show_logs(arguments: Namespace) -> int:
    """Print the last lines of all ranks, or of one, that contain a text."""
    with opened(rundir.find_recording(arguments.run)) as reader:
        # A rank that failed before its first message has lines, although it is not among the known ranks.
        if not reader.logs(rank=arguments.rank, limit=1):
            check_rank(reader.info().ranks, arguments.rank)
        frames = reader.logs(rank=arguments.rank, text=arguments.text, limit=arguments.lines)
    for frame in sorted(frames, key=lambda frame: frame.seq):
        line = frame.message
        if isinstance(line, LogLine):
            source = "launcher" if line.rank < 0 else f"rank {line.rank}"
            print(f"{source}| {sanitize(line.text)}")
    return 0


_WIDE = 140  # columns from which the table has all its columns, and a run its subject in the same line
_INDENT = "    "


def list_runs(arguments: Namespace) -> int:
    """Print the runs of this user, newest first, or the runs of the named recordings."""
    named: list[str] = getattr(arguments, "runs", [])
    entries = [_named(name) for name in named] if named else RunList().entries()
    if getattr(arguments, "json", False):
        print_json(entries)
    elif not entries:
        print(f"no runs in {rundir.home() / 'runs'}: start one with 'ftmon demo' or 'ftmon run -- COMMAND'")
    else:
        # Lines of a pipe are not cut.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in table(entries, width):
            print(line)
    return 0


def _named(name: str) -> RunEntry:
    recording = rundir.recording_file(name)
    return RunList().entry(rundir.find(name)) if recording is None else recorded_entry(recording)


def table(entries: Sequence[RunEntry], width: int | None) -> Iterator[str]:
    """Yield the lines of the table of runs; below 140 columns each run has its subject in a second line."""
    wide = width is None or width >= _WIDE
    heads = ("RUN", "STATE", *(("STARTED",) if wide else ()), "LASTED", "STEP", "LOSS", "EVAL LOSS")
    heads += ("RANKS", "RECORDED") if wide else ()
    rows = [heads, *(_cells(found, wide) for found in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = 3 if wide else 2
    subjects = ("MODEL, DATA, OVERRIDES OR SCRIPT", *(sanitize(found.subject, 1000) for found in entries))
    for row, subject, found in zip(rows, subjects, (None, *entries), strict=True):
        padded = [f"{cell:{'<' if place < texts else '>'}{widths[place]}}" for place, cell in enumerate(row)]
        line, whole = "  ".join(padded), "  ".join([*padded, subject])
        fits = wide and (width is None or cells_of(whole) <= width)
        yield (whole if fits else line).rstrip()
        if found is not None:
            details = ["" if fits else subject, found.problem, found.reason]
            for detail in details:
                text = sanitize(detail, 1000)
                parts = [text] if width is None else wrap(text, width - len(_INDENT), break_on_hyphens=False)
                yield from (f"{_INDENT}{part}" for part in parts if part)


def _cells(found: RunEntry, wide: bool) -> tuple[str, ...]:
    step, loss, evaluation = f"{found.step:,}", _loss(found.loss), _loss(found.evaluation_loss)
    lasted = duration(round(found.duration_s(time.time())))
    names = (sanitize(found.id), sanitize(found.condition, 20))
    if not wide:
        return (*names, lasted, step, loss, evaluation)
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.created))
    size = gib(found.recording_bytes, 1) if found.recording_bytes else "-"
    return (*names, started, lasted, step, loss, evaluation, str(found.ranks), size)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


_SHOWN = 16


def show_status(arguments: Namespace) -> int:
    """Print a run's latest recorded state; of a live run it is up to half a second old."""
    recording = rundir.recording_file(arguments.run)
    entry: RunEntry | None = None
    if recording is None:
        run = rundir.find(arguments.run)
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
            print(wrapped(line, 1))
    return 0


def _lines(entry: RunEntry, model: RunModel) -> Iterator[str]:
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
    unseen = entry.kind == "watch" and not model.step
    yield "steps are not seen from outside" if unseen else f"step {model.step:,}{total}{epoch}{left}"
    if entry.live and (activity := activity_words(model)):
        yield f"now: {activity}"
    means = ["(means over the run)"] if model.ended and model.rates.seconds_per_step else []
    if parts := [*figure_words(model), *means]:
        yield "  ".join(parts)
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
    for alert in model.alerts.unresolved()[:_SHOWN]:
        yield f"{alert.severity}: {sanitize(alert.title)}"
        yield from remedy_lines(alert, indent=2)
    missing = f" ({sanitize(entry.missing)})" if entry.missing else ""
    yield f"recording: {sanitize(entry.recording)}{missing}"
