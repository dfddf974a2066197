"""Follows a run in plain lines, without the terminal app: its signals, its end, its lines."""

import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ...protocol.errors import HubError, RunDirError
from ...protocol.host.process import ProcessId, is_alive
from ...protocol.messages import control
from ...protocol.run import exits
from ...protocol.run.end import last_lines
from ...protocol.run.notices import terminal_sequence
from ...protocol.run.rundir import ExitFile, RunDir, RunFile
from ...protocol.run.start import CommandEnd
from ...protocol.run.targets import EXPORTERS_END_SECONDS
from ...protocol.text import sanitize, wrapped
from ..model.run import RunModel, TerminalNotices
from ..source.base import Connection, ConnectionState, Source
from .narrate import Narrator, attach_line, closing_lines

FOR_THE_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ``ftmon run`` forwards to the run."""


@contextmanager
def kept(numbers: Iterable[signal.Signals]) -> Generator["deque[signal.Signals]"]:
    """Keep received signals in a queue; signals ignored at the start (nohup, a background job) stay ignored."""
    waiting: deque[signal.Signals] = deque()
    with _handled(numbers, waiting.append):
        yield waiting


@contextmanager
def _handled(numbers: Iterable[signal.Signals], handle: Callable[[signal.Signals], object]) -> Generator[None]:
    before: dict[signal.Signals, Any] = {}
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda received, _frame: handle(signal.Signals(received)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def passed_on(send: Callable[[signal.Signals], object], owned: bool) -> Generator[threading.Event]:
    """Forward the app's signals to a run that this command started; a signal that requests the end sets the event.

    SIGHUP is not forwarded: a lost terminal ends only the app.
    """
    stopped = threading.Event()

    def forward(number: signal.Signals) -> None:
        send(number)
        if number in (signal.SIGINT, signal.SIGTERM):
            stopped.set()

    with _handled([number for number in FOR_THE_RUN if owned and number != signal.SIGHUP], forward):
        yield stopped


_LAUNCHER_SECONDS = 30.0  # time limit within which a launcher records itself in the run's file


class Standing:
    """A run's launcher and end; ``line``: the connection to its launcher, if this command started it.

    Raises ``RunDirError`` if there is no ``run.json``. A removed, moved or unreadable run directory raises no error
    later on: the run continues without it.
    """

    def __init__(self, run: RunDir, line: CommandEnd | None = None) -> None:
        self._run = run
        self._line = line
        self._content = run.read_run()
        self._unsent: list[signal.Signals] = []

    @property
    def content(self) -> RunFile:
        """``run.json``, as last read."""
        if self._content.launcher is None:
            with suppress(RunDirError):
                self._content = self._run.read_run()
        return self._content

    def last_of_log(self, name: str) -> list[str]:
        """Return the last line of a process of the run; none if it wrote nothing."""
        return last_lines(self._run.logs / f"{name}.log", 1)

    @property
    def launcher(self) -> ProcessId | None:
        """The launcher's process; None until it has reported it."""
        return (self._line.launcher if self._line is not None else None) or self.content.launcher

    @property
    def launcher_lives(self) -> bool:
        """Whether the launcher is alive, by the open connection or else by its recorded process."""
        if self._line is not None:
            self._line.read()
            return not self._line.closed
        return self.launcher is not None and is_alive(self.launcher)

    def end(self) -> ExitFile | None:
        """Return the job's end; None while it runs, or if its end is unknown."""
        if self._line is not None:
            self._line.read()
            if self._line.end is not None:
                return self._line.end
        with suppress(RunDirError):
            return self._run.read_exit()
        return None

    def end_without_launcher(self, model: RunModel) -> ExitFile | None:
        """Return the end of a run without a launcher, from its hub; None while launcher or hub is alive.

        Raises ``HubError`` if both are gone.
        """
        content = self.content
        starting = self.launcher is None and time.time() - content.created < _LAUNCHER_SECONDS
        if self.launcher_lives or (self._line is None and starting):
            return None
        if model.ended:
            code = model.exit_code if model.exit_code is not None else int(model.state != "finished")
            return ExitFile(code, model.state_time, model.state, model.state_text, "lost" if code else "")
        name = self._run.id
        with suppress(RunDirError):
            if self._run.living_hub() is not None:
                return None
        if self.end() is None:
            raise HubError(f"{name}: its launcher and its hub are gone; 'ftmon attach {name}' looks for its ranks")
        return None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the launcher, which forwards it; deferred if the launcher has not started yet."""
        self._unsent.append(number)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send the deferred signals."""
        if self._line is not None:
            self._line.read()
        launcher = self.launcher
        if launcher is None or not self._unsent:
            return
        unsent, self._unsent = self._unsent, []
        if is_alive(launcher):
            for number in unsent:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(launcher.pid, number)

    def let_go(self) -> None:
        """Close the connection such that the run outlives this command."""
        if self._line is not None:
            self._line.untie()


def pumped(source: Source) -> Generator[None]:
    """Start a source, yield each time its new messages were applied, and close it; ctrl-c ends the iteration."""
    with kept((signal.SIGINT,)) as interrupts:
        source.start()
        try:
            while not interrupts:
                source.pump(POLL_SECONDS)
                yield
                time.sleep(POLL_SECONDS)
        finally:
            source.close()


POLL_SECONDS = 0.1
DRAIN_SECONDS = 5.0  # time limit of waiting for the rest of the stream after the run's end
_LATE_SECONDS = 25.0
"""Additional time while the launcher lives, which waits for the hub: a job may end before its hub has started."""
_QUIET_SECONDS = 1.0  # after which a wait for exporters is said
_INTERRUPTS = 3  # the first requests the end of the run, the second and third end it; the next one leaves it
_INTERRUPT_WORDS = (
    "ctrl-c was passed on to the training; again: SIGTERM to all of it",
    "SIGTERM to all of the run; ctrl-c again kills it",
    "killing the run; ctrl-c again leaves it",
)


class Lines:
    """Prints lines. If ``forgiving``, a closed pipe or a full disk ends only the printing."""

    def __init__(self, *, forgiving: bool) -> None:
        self._forgiving = forgiving
        self._gone = False

    def print(self, text: str, end: str = "\n") -> None:
        """Print one line."""
        try:
            if not self._gone:
                print(wrapped(text, 1), end=end, flush=True)
        except OSError:
            if not self._forgiving:
                raise
            self._gone = True
            # The rest of the buffer must not fail again when the interpreter ends.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Outages:
    """Detects when the hub of a followed run is gone."""

    _state: ConnectionState = "connecting"

    def new_lines(self, connection: Connection) -> list[str]:
        """Return a line if the hub has gone since the last call."""
        before, self._state = self._state, connection.state
        return [connection.text] if connection.state == "hub-gone" != before else []


def follow(source: Source, run: RunDir, narrator: Narrator, *, standing: Standing, owned: bool) -> int:
    """Print a live run as lines until it ends; return the exit status of its end. ``source`` is closed here.

    If this command started (``owned``) the run, signals are forwarded to it, and its end is awaited even after an error
    here. Otherwise Ctrl-C only stops following. Raises ``HubError`` if the run's launcher and hub are both gone.
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
        if owned:
            await_exporters(standing, lines.print, signals)
        asked = following.interrupts and end.state == "stopped" and not following.foreign
        return exits.INTERRUPTED if asked else exits.of_run(end)


def await_exporters(standing: Standing, say: Callable[[str], object], signals: "deque[signal.Signals]") -> None:
    """Wait until the exporters of a run that has ended have sent the rest, if it has any; a signal ends the wait.

    Then the last line of each one's log is said: where the run is, or what was dropped.
    """
    targets = standing.content.options.report_to
    begun, signals_before, said = time.monotonic(), len(signals), False
    while targets and standing.launcher_lives and (waited := time.monotonic() - begun) <= EXPORTERS_END_SECONDS:
        if len(signals) > signals_before:
            return
        if waited > _QUIET_SECONDS and not said:
            said = True
            say(
                f"sending the rest to {', '.join(targets)}, at most {EXPORTERS_END_SECONDS:g} s; "
                "ctrl-c: in the background"
            )
        time.sleep(POLL_SECONDS)
    for target in targets:
        for line in standing.last_of_log(f"{target}-exporter"):
            say(f"{target}: {sanitize(line, 300)}")


@dataclass
class _Following:
    source: Source
    run: RunDir
    narrator: Narrator
    standing: Standing
    lines: Lines
    signals: "deque[signal.Signals]"
    owned: bool
    interrupts: int = 0
    outages: Outages = field(default_factory=Outages)
    narrates: bool = True

    def __post_init__(self) -> None:
        self.notices = TerminalNotices(self.run) if sys.stdout.isatty() else None
        self.foreign = self.standing.content.kind not in ("demo", "train")
        """Whether the job is a script without ftmon, which handles ctrl-c itself."""

    def until_the_end(self) -> ExitFile | None:
        drained_by, left_at = 0.0, 0.0
        while True:
            self._print_new()
            if self._left():
                return None
            self.standing.send_waiting()
            end = self.standing.end() or self.standing.end_without_launcher(self.source.model)
            if end is not None:
                now = time.monotonic()
                drained_by = drained_by or now + DRAIN_SECONDS
                waits = self.narrates and self.standing.launcher_lives and self.run.path.exists()
                if not waits and not left_at:
                    left_at = now
                # The launcher leaves after the hub: what the hub published last may be on its way.
                late = now > drained_by + _LATE_SECONDS if waits else now > left_at + DRAIN_SECONDS
                if self.source.model.ended or late:
                    return end
            time.sleep(POLL_SECONDS)

    def _print_new(self) -> None:
        """Print new lines. An error here must not end a run that this command started."""
        if not self.narrates:
            return
        try:
            self.source.pump(POLL_SECONDS)
            for line in self.narrator.new_lines(self.source.model):
                self.lines.print(line)
            for notice in self.notices.fresh(self.source.model) if self.notices is not None else ():
                self.lines.print(terminal_sequence(notice), end="")
            for line in self.outages.new_lines(self.source.connection):
                self.lines.print(line)
        except Exception as error:
            if not self.owned or isinstance(error, HubError):
                raise
            self.narrates = False
            trace = "".join(traceback.format_exception(error)).rstrip()
            _warn(f"the run continues, and is not shown any more: {trace}")

    def _left(self) -> bool:
        while self.signals:
            number = self.signals.popleft()
            if not self.owned:
                return True
            if number != signal.SIGINT:
                _warn(f"{number.name} is passed on to the run")
                self.standing.send(number)
                continue
            self.interrupts += 1
            if self.interrupts > _INTERRUPTS - (not self.foreign):
                return True
            self._interrupt()
        return False

    def _interrupt(self) -> None:
        """Forward a Ctrl-C; for ftmon's own trainer through the hub, so that it saves a checkpoint before it ends."""
        own = ("stopping after this step; ctrl-c again kills the run", "killing the run; again leaves it")
        _warn((_INTERRUPT_WORDS if self.foreign else own)[self.interrupts - 1])
        if not self.foreign and self.source.can_command:
            self.source.send(control.Stop() if self.interrupts == 1 else control.Kill())
        else:
            self.standing.send(signal.SIGINT)


def _warn(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
