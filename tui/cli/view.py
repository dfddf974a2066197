"""Watching a run, live or recorded: in the app where a terminal can show it, else in plain lines."""

import sys
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

from ...protocol import rundir
from ...protocol.errors import HubError, UsageError
from ...protocol.rundir import RunDir
from . import terminal
from .outcome import attach_line, closing_lines, exit_status


def choose(arguments: Namespace) -> int:
    """Open the list of runs; without a terminal, print it."""
    if terminal.why_no_app():
        from .runs import list_runs

        return list_runs(arguments)
    from ..app import run_picker

    run_picker(ascii_only=_ascii(arguments))
    return 0


def attach(arguments: Namespace) -> int:
    """Watch a run of this user, or one of another host: over ssh, or one that listens."""
    if arguments.run is not None and arguments.run.startswith("tcp://"):
        from .remote import attach_remote

        return attach_remote(arguments)
    if arguments.run is not None and arguments.run.startswith("ssh://"):
        from .ssh import attach_ssh

        return attach_ssh(arguments)
    run = rundir.find(arguments.run)
    if run.read_exit() is None:
        run.check()
        _bring_back_hub(run)
    return watch(run, arguments, owned=False)


def watch(run: RunDir, arguments: Namespace, *, owned: bool) -> int:
    """Watch a run until it ends or the person leaves.

    Args:
        run: the run.
        arguments: ``plain``, ``ascii`` and ``read_only`` as given.
        owned: this command started it, so its exit status becomes the command's.
    """
    ended_before = run.read_exit() is not None
    if not _opens_app(arguments):
        if ended_before and not owned:
            return tell_recording(run.recording, arguments)
        from ..source.live import LiveSource
        from .follow import follow
        from .narrate import Narrator

        narrator = Narrator(ascii_only=_ascii(arguments), with_output=run.read_run().kind == "run")
        return follow(LiveSource(run), run, narrator, owned=owned)
    from ..app import run_app
    from ..source.live import LiveSource

    source = LiveSource(run)
    run_app(source, ascii_only=_ascii(arguments), read_only=arguments.read_only)
    end = run.read_exit()
    if end is None:
        print(attach_line(run.id))
        return 0
    for line in closing_lines(run, end, source.model):
        print(line)
    return exit_status(end, run.read_run().kind) if owned else 0


def replay(arguments: Namespace) -> int:
    """Play a recording: a file, a run directory, or a run by name."""
    path = find_recording(arguments.run)
    if not _opens_app(arguments):
        return tell_recording(path, arguments)
    from ..app import run_app
    from ..source.replay import ReplaySource

    run_app(ReplaySource(path), ascii_only=_ascii(arguments), read_only=True)
    return 0


def check_rank(ranks: Collection[int], rank: int | None) -> None:
    """See that a run has the rank that was asked for; None is any.

    Raises:
        UsageError: there is none of that number.
    """
    if rank is not None and rank not in ranks:
        known = f"{min(ranks)} to {max(ranks)}" if ranks else "none yet"
        raise UsageError(f"no rank {rank} in this run; its ranks: {known}")


def find_recording(name: str) -> Path:
    """Find the recording that a file, a run directory or a run's name means.

    Raises:
        RunNotFoundError: it is neither, or several runs match.
    """
    path = Path(name)
    if path.is_dir():
        return RunDir(path).recording
    return path if path.exists() or path.suffix else rundir.find(name).recording


def tell_recording(path: Path, arguments: Namespace) -> int:
    """Print what a recording holds as the lines that were printed live.

    Raises:
        RecordingError: it is not one, or cannot be read.
    """
    from ...protocol.recording.reader import Reader
    from ..model.run import RunModel
    from .narrate import Narrator

    reader = Reader(path)
    model = RunModel()
    narrator = Narrator(ascii_only=_ascii(arguments))
    info = reader.info()
    while frames := reader.frames(model.last_seq, 2000):
        for frame in frames:
            model.apply(frame)
            for line in narrator.tell(model):
                print(line)
    if info.missing:
        print(f"incomplete: {info.missing}")
    return 0


def _opens_app(arguments: Namespace) -> bool:
    if arguments.plain:
        return False
    reason = terminal.why_no_app()
    if reason and sys.stderr.isatty():
        print(f"ftmon: {reason}; plain lines instead", file=sys.stderr)
    return not reason


def _ascii(arguments: Namespace) -> bool:
    return arguments.ascii or terminal.wants_ascii()


def _bring_back_hub(run: RunDir) -> None:
    """Start a new hub where it is gone; without one its recording can still be shown."""
    from .trainer import living_hub

    try:
        living_hub(run)
    except HubError as error:
        print(f"ftmon: {error}; showing what was recorded", file=sys.stderr)
