"""Follows a run in plain lines, without the terminal app."""

import os
import signal
import sys
import time
import traceback
from collections import deque
from contextlib import suppress

from ....protocol.errors import HubError
from ....protocol.messages import verbs
from ....protocol.run import exits
from ....protocol.run.notices import terminal_sequence
from ....protocol.run.rundir import ExitFile, RunDir
from ...model.notices import TerminalNotices
from ...source.base import Connection, ConnectionState, Source
from .narrate import Narrator
from .outcome import attach_line, closing_lines, exit_status
from .signals import FOR_THE_RUN, counted_interrupts, kept
from .standing import Standing

__all__ = ["POLL_SECONDS", "counted_interrupts", "follow"]

POLL_SECONDS = 0.1
_DRAIN_SECONDS = 5.0
"""Time limit of waiting for the rest of the stream after the run's end."""
_LATE_SECONDS = 25.0
"""Additional time while the launcher lives, which waits for the hub: a job may end before its hub has started."""
_INTERRUPTS = 3
"""The first requests the end of the run, the second and third end it; the next one leaves it."""
_INTERRUPT_WORDS = (
    "ctrl-c was passed on to the training; again: SIGTERM to all of it",
    "SIGTERM to all of the run; ctrl-c again kills it",
    "killing the run; ctrl-c again leaves it",
)


class Lines:
    """Prints lines. A closed pipe or a full disk ends only the printing.

    Args:
        forgiving: False: a closed pipe ends the command with ``BrokenPipeError``.
    """

    def __init__(self, *, forgiving: bool) -> None:
        self._forgiving = forgiving
        self._gone = False

    def print(self, text: str, end: str = "\n") -> None:
        """Print one line."""
        if self._gone:
            return
        try:
            print(text, end=end, flush=True)
        except OSError:
            if not self._forgiving:
                raise
            self._gone = True
            # The rest of the buffer must not fail again when the interpreter ends.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Outages:
    """Detects when the hub of a followed run is gone."""

    def __init__(self) -> None:
        self._state: ConnectionState = "connecting"

    def new_lines(self, connection: Connection) -> list[str]:
        """Return a line if the hub has gone since the last call."""
        before, self._state = self._state, connection.state
        return [connection.text] if connection.state == "hub-gone" != before else []


def follow(source: Source, run: RunDir, narrator: Narrator, *, standing: Standing, owned: bool) -> int:
    """Print a live run as lines until it ends; return the exit status of its end.

    Args:
        source: source of the run; started and closed here.
        run: the run's directory.
        narrator: makes the lines.
        standing: state of the run, and the connection to its launcher.
        owned: whether this command started the run. If so, signals are forwarded to it, and its end is awaited even
            after an error here. Otherwise Ctrl-C only stops following.

    Raises:
        HubError: the run's launcher and hub are both gone, so its end is unknown.
    """
    lines = Lines(forgiving=owned)
    with kept(FOR_THE_RUN if owned else (signal.SIGINT,)) as signals:
        following = _Following(source, run, narrator, standing, lines, signals, owned)
        source.start()
        try:
            end = following.until_the_end()
        finally:
            source.close()
        # Still kept: a second signal of the same request may come while the last lines are printed.
        if end is None:
            standing.let_go()
            lines.print(attach_line(run.id))
            return exits.LEFT if owned else exits.INTERRUPTED
        output_printed = narrator.with_output and source.model.ended
        for line in closing_lines(run, end, source.model, output_printed=output_printed):
            lines.print(line)
        asked = following.interrupts and end.state == "stopped" and not following.foreign
        return exits.INTERRUPTED if asked else exit_status(end)


class _Following:
    """State of the loop of ``follow``."""

    def __init__(
        self,
        source: Source,
        run: RunDir,
        narrator: Narrator,
        standing: Standing,
        lines: Lines,
        signals: "deque[signal.Signals]",
        owned: bool,
    ) -> None:
        self._source = source
        self._run = run
        self._narrator = narrator
        self._standing = standing
        self._lines = lines
        self._signals = signals
        self._owned = owned
        self._outages = Outages()
        self._narrates = True
        self._notices = TerminalNotices(run) if sys.stdout.isatty() else None
        self.interrupts = 0
        self.foreign = standing.content.kind not in ("demo", "train")
        """Whether the job is a script without ftmon, which handles ctrl-c itself."""

    def until_the_end(self) -> ExitFile | None:
        """Print lines until the run has ended; return None if the user quit before."""
        drained_by, left_at = 0.0, 0.0
        while True:
            self._print_new()
            if self._left():
                return None
            self._standing.send_waiting()
            end = self._standing.end() or self._standing.end_without_launcher(self._source.model)
            if end is not None:
                now = time.monotonic()
                drained_by = drained_by or now + _DRAIN_SECONDS
                waits = self._narrates and self._standing.launcher_lives and self._run.path.exists()
                if not waits and not left_at:
                    left_at = now
                # The launcher leaves after the hub: what the hub published last may be on its way.
                late = now > drained_by + _LATE_SECONDS if waits else now > left_at + _DRAIN_SECONDS
                if self._source.model.ended or late:
                    return end
            time.sleep(POLL_SECONDS)

    def _print_new(self) -> None:
        """Print new lines. An error here must not end a run that this command started."""
        if not self._narrates:
            return
        try:
            self._source.pump(POLL_SECONDS)
            for line in self._narrator.new_lines(self._source.model):
                self._lines.print(line)
            for notice in self._notices.fresh(self._source.model) if self._notices is not None else ():
                self._lines.print(terminal_sequence(notice), end="")
            for line in self._outages.new_lines(self._source.connection):
                self._lines.print(line)
        except Exception as error:
            if not self._owned or isinstance(error, HubError):
                raise
            self._narrates = False
            _warn(
                f"the run continues, and is not shown any more: {''.join(traceback.format_exception(error)).rstrip()}"
            )

    def _left(self) -> bool:
        """Handle received signals; return whether the user quits."""
        while self._signals:
            number = self._signals.popleft()
            if not self._owned:
                return True
            if number != signal.SIGINT:
                _warn(f"{number.name} is passed on to the run")
                self._standing.send(number)
                continue
            self.interrupts += 1
            if self.interrupts > _INTERRUPTS - (not self.foreign):
                return True
            self._interrupt()
        return False

    def _interrupt(self) -> None:
        """Forward a Ctrl-C; for ftmon's own trainer through the hub, so that it saves a checkpoint before it ends."""
        first = self.interrupts == 1
        if self.foreign:
            _warn(_INTERRUPT_WORDS[self.interrupts - 1])
            self._standing.send(signal.SIGINT)
            return
        _warn("stopping after this step; ctrl-c again kills the run" if first else "killing the run; again leaves it")
        if self._source.can_command:
            self._source.send(verbs.Stop() if first else verbs.Kill())
            return
        self._standing.send(signal.SIGINT)


def _warn(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
