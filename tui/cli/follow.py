"""Following a run in plain lines, where there is no terminal to draw in or none is wanted."""

import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from ...protocol.errors import HubError
from ...protocol.process import is_alive
from ...protocol.rundir import ExitFile, RunDir, RunFile
from ..model.run import RunModel
from ..source.base import Source
from .narrate import Narrator
from .outcome import INTERRUPTED, attach_line, closing_lines, exit_status

LOOK_SECONDS = 0.1
_LAUNCHER_SECONDS = 30.0
"""A launcher writes itself into the run's file well within this."""
_DRAIN_SECONDS = 5.0
"""How long the stream may lag behind the end of the run before it is no longer waited for."""
_LATE_SECONDS = 25.0
"""And so much longer while the launcher lives, which waits for the hub: a job may be over before its hub is up."""


class Interrupts:
    """Counts Ctrl-C, so that none of them lands in the middle of a fold."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take one signal."""
        self.count += 1


@contextmanager
def counted_interrupts() -> Generator[Interrupts]:
    """Count SIGINT instead of raising KeyboardInterrupt."""
    interrupts = Interrupts()
    before = signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


def follow(source: Source, run: RunDir, narrator: Narrator, *, owned: bool) -> int:
    """Print a live run as lines until it ends; return the exit status that its end stands for.

    Args:
        source: gathers the run; started and closed here.
        run: the run's directory.
        narrator: makes the lines.
        owned: this command started the run. Then the first Ctrl-C asks it to stop in order, the second kills it, and
            the third leaves it; otherwise Ctrl-C only stops following.

    Raises:
        HubError: the run's launcher and hub are both gone, so nobody tells how it ends.
    """
    with counted_interrupts() as interrupts:
        source.start()
        try:
            end = _until_the_end(source, run, narrator, interrupts, owned)
        finally:
            source.close()
    if end is None:
        print(attach_line(run.id))
        return INTERRUPTED
    output_told = narrator.with_output and source.model.ended
    for line in closing_lines(run, end, source.model, output_told=output_told):
        print(line)
    return INTERRUPTED if interrupts.count else exit_status(end, run.read_run().kind)


def _until_the_end(
    source: Source, run: RunDir, narrator: Narrator, interrupts: Interrupts, owned: bool
) -> ExitFile | None:
    """Print until the run has ended; None when the person left before."""
    handled = 0
    drained_by = 0.0
    connection = "connecting"
    while True:
        source.pump(LOOK_SECONDS)
        for line in narrator.tell(source.model):
            print(line, flush=True)
        if source.connection.state != connection:
            connection = source.connection.state
            if connection == "hub-gone":
                print(source.connection.text, flush=True)
        if interrupts.count > handled:
            handled += 1
            if not owned or handled > 2:
                return None
            _end_it(source, run, handled)
        end = run.read_exit() or _end_without_launcher(run, source.model)
        if end is not None:
            now = time.monotonic()
            drained_by = drained_by or now + _DRAIN_SECONDS
            late = now > drained_by + _LATE_SECONDS or (now > drained_by and not _launcher_lives(run.read_run()))
            if source.model.ended or late:
                return end
        time.sleep(LOOK_SECONDS)


def _end_it(source: Source, run: RunDir, time_asked: int) -> None:
    """Pass a Ctrl-C on: by way of the hub, which knows the ranks; where none answers, by way of the launcher."""
    first = time_asked == 1
    print(
        "stopping after this step; ctrl-c again kills the run" if first else "killing the run; ctrl-c again leaves it",
        file=sys.stderr,
        flush=True,
    )
    if source.can_command:
        source.send("stop" if first else "kill")
        return
    launcher = run.read_run().launcher
    if launcher is not None and is_alive(launcher):
        os.kill(launcher.pid, signal.SIGINT if first else signal.SIGTERM)


def _launcher_lives(content: RunFile) -> bool:
    return content.launcher is not None and is_alive(content.launcher)


def _end_without_launcher(run: RunDir, model: RunModel) -> ExitFile | None:
    """Tell how a run ended that has no launcher (any more): as its hub says; None while somebody lives to tell."""
    content = run.read_run()
    starting = content.launcher is None and time.time() - content.created < _LAUNCHER_SECONDS
    if _launcher_lives(content) or starting:
        return None
    if model.ended:
        code = model.exit_code if model.exit_code is not None else int(model.state != "finished")
        return ExitFile(code, model.state_time, model.state, model.state_text)
    if run.living_hub() is None and run.read_exit() is None:
        raise HubError(f"{run.id}: its launcher and its hub are gone; 'ftmon attach {run.id}' looks for its ranks")
    return None
