"""Watches a run, live or recorded, in the app if the terminal supports it, else in plain lines."""

import sys
import time
from argparse import Namespace
from pathlib import Path

from ....protocol.errors import HubError
from ....protocol.run import run_store
from ....protocol.run.rundir import RunDir
from ....protocol.run.starter import CommandEnd
from ...source.find import find_recording
from ..access.recordings import opened
from ..foreground.outcome import attach_line, closing_lines, exit_status
from ..foreground.standing import Standing
from ..output import terminal

_POLL_SECONDS = 0.1


def choose(arguments: Namespace) -> int:
    """Open the list of runs; without a terminal print it."""
    if terminal.why_no_app():
        from .runs import list_runs

        return list_runs(arguments)
    from ...app import run_picker

    run_store.checked_home()
    return run_picker(ascii_only=terminal.draws_ascii(arguments))


def attach(arguments: Namespace) -> int:
    """Watch a run of this user, or a run on another host over ssh:// or tcp://."""
    if arguments.run is not None and arguments.run.startswith("tcp://"):
        from .remote import attach_remote

        return attach_remote(arguments)
    if arguments.run is not None and arguments.run.startswith("ssh://"):
        from .ssh import attach_ssh

        return attach_ssh(arguments)
    run = run_store.find(arguments.run)
    if run.read_exit() is None:
        run.check()
        _bring_back_hub(run)
    return watch(run, arguments)


def watch(run: RunDir, arguments: Namespace, line: CommandEnd | None = None) -> int:
    """Show a run until it ends or the user quits.

    Args:
        run: the run.
        arguments: ``plain``, ``ascii`` and ``read_only`` as given.
        line: the connection to the launcher if this command started the run, whose exit status then is the command's.
    """
    owned = line is not None
    if not opens_app(arguments):
        if run.read_exit() is not None and not owned:
            return print_recording(run.recording, arguments)
        from ...source.live import LiveSource
        from ..foreground.follow import follow
        from ..foreground.narrate import Narrator

        narrator = Narrator(ascii_only=terminal.draws_ascii(arguments), with_output=run.read_run().kind == "run")
        return follow(LiveSource(run), run, narrator, standing=Standing(run, line), owned=owned)
    return _in_app(run, arguments, Standing(run, line), owned)


def _in_app(run: RunDir, arguments: Namespace, standing: Standing, owned: bool) -> int:
    """Watch in the app. The run outlives it, unless SIGTERM ends the app, which ends the run too."""
    from ...app import run_app
    from ...model.notices import TerminalNotices
    from ...source.live import LiveSource
    from ..foreground.signals import passed_on

    standing.let_go()
    source = LiveSource(run)
    with passed_on(standing.send, owned) as stopped:
        status = run_app(
            source,
            ascii_only=terminal.draws_ascii(arguments),
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
    return exit_status(end) if owned else status


def replay(arguments: Namespace) -> int:
    """Play a recording: a file, a run directory, or a run by name."""
    path = find_recording(arguments.run)
    if not opens_app(arguments):
        return print_recording(path, arguments)
    from ...app import run_app
    from ...source.replay import ReplaySource

    return run_app(ReplaySource(path), ascii_only=terminal.draws_ascii(arguments), read_only=True)


def print_recording(path: Path, arguments: Namespace) -> int:
    """Print a recording as the same lines as for the live run.

    Raises:
        RecordingError: it is not a recording, or cannot be read.
    """
    from ...model.run import RunModel
    from ..foreground.narrate import Narrator

    model = RunModel()
    narrator = Narrator(ascii_only=terminal.draws_ascii(arguments))
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
    reason = terminal.why_no_app()
    if reason and sys.stderr.isatty():
        print(f"ftmon: {reason}; plain lines instead", file=sys.stderr)
    return not reason


def _bring_back_hub(run: RunDir) -> None:
    """Start a new hub if it is gone; without one the recording can still be shown."""
    from ..access.trainer_process import living_hub

    try:
        living_hub(run)
    except HubError as error:
        print(f"ftmon: {error}; showing what was recorded", file=sys.stderr)
