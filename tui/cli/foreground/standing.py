"""State of a run for the command that follows it, from the connection to the launcher or from the run directory.

A removed, moved or unreadable run directory raises no error here: the run continues without it.
"""

import contextlib
import os
import signal
import time

from ....protocol.errors import HubError, RunDirError
from ....protocol.host.process import ProcessId, is_alive
from ....protocol.run.rundir import ExitFile, HubFile, RunDir, RunFile
from ....protocol.run.starter import CommandEnd
from ...model.run import RunModel

_LAUNCHER_SECONDS = 30.0
"""Time limit within which a launcher records itself in the run's file."""


class Standing:
    """A run's launcher and end.

    Args:
        run: the run's directory.
        line: the connection to its launcher, if this command started it.

    Raises:
        RunDirError: there is no ``run.json``.
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
            with contextlib.suppress(RunDirError):
                self._content = self._run.read_run()
        return self._content

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
        return _unless_unreadable(self._run)

    def end_without_launcher(self, model: RunModel) -> ExitFile | None:
        """Return the end of a run without a launcher, from its hub; None while launcher or hub is alive.

        Raises:
            HubError: both are gone.
        """
        content = self.content
        starting = self.launcher is None and time.time() - content.created < _LAUNCHER_SECONDS
        if self.launcher_lives or (self._line is None and starting):
            return None
        if model.ended:
            code = model.exit_code if model.exit_code is not None else int(model.state != "finished")
            return ExitFile(code, model.state_time, model.state, model.state_text, "lost" if code else "")
        if self.living_hub() is None and self.end() is None:
            raise HubError(
                f"{self._run.id}: its launcher and its hub are gone; 'ftmon attach {self._run.id}' looks for its ranks"
            )
        return None

    def living_hub(self) -> HubFile | None:
        """Return the connection file of the run's living hub."""
        try:
            return self._run.living_hub()
        except RunDirError:
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
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(launcher.pid, number)

    def let_go(self) -> None:
        """Close the connection such that the run outlives this command."""
        if self._line is not None:
            self._line.untie()


def _unless_unreadable(run: RunDir) -> ExitFile | None:
    try:
        return run.read_exit()
    except RunDirError:
        return None
