"""Exit statuses of the commands that start a run: the training's status, or one of ftmon's own codes, 193 to 199.

Other codes are in use: shells use 1, 2, 126, 127 and 128 + signal (at most 192), sysexits.h 64 to 78, timeout, env
and docker 124 to 127, Python 120, systemd 200 to 243, ssh 255, and scripts use small numbers. LSB reserves 150 to
199 for applications.
"""

from typing import TYPE_CHECKING

from ..errors import FtmonError, HubError, StartError, UsageError

if TYPE_CHECKING:
    from .rundir import ExitFile

WRONG_USAGE = 2  # wrong usage or configuration, of commands whose status cannot be mistaken for a training's
INTERRUPTED = 130  # ctrl-c ended a command; not of `run`, where ctrl-c goes to the training
HANG = 193
HANG_AT_EXIT = 194
RUN_USAGE = 195
NOT_STARTED = 196
LOST = 197
STOPPED = 198
LEFT = 199
OWN: dict[int, str] = {
    HANG: "the run hung, and --on-hang ended it",
    HANG_AT_EXIT: "its work was done, but it did not end, and --exit-timeout ended it",
    RUN_USAGE: "wrong usage of 'ftmon run'",
    NOT_STARTED: "the command or the run could not be started",
    LOST: "it is unknown how the training ended: the launcher was killed, or the machine went down",
    STOPPED: "ended on request before it was done: 'ftmon stop', 'ftmon kill', or S or k in the app",
    LEFT: "ctrl-c left a run that did not end; it keeps running",
}
"""Meaning of each code; ``ftmon run --help`` and docs/guide.md print these texts."""
CAUSES = {"hang": HANG, "hang-at-exit": HANG_AT_EXIT, "not-started": NOT_STARTED, "lost": LOST, "request": STOPPED}
"""The status for each value of ``ExitFile.cause``."""


def of_training(code: int) -> int:
    """Return a job's status as a shell reports it: 128 + N for a job killed by signal N (``code`` is -N then)."""
    return 128 - code if code < 0 else code & 0xFF


def of_run(end: "ExitFile") -> int:
    """Return the exit status of the command for the end of its run: the training's status, or one of ``OWN``."""
    return CAUSES.get(end.cause) or of_training(end.exit_code)


def of_error(error: FtmonError, usage: int = RUN_USAGE) -> int:
    """Return the status of a command that starts a run if ftmon itself could not go on; ``usage`` for wrong usage."""
    if isinstance(error, HubError):
        return LOST
    wrong = isinstance(error, UsageError) and not isinstance(error, StartError)
    return usage if wrong else NOT_STARTED
