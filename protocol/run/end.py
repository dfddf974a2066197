"""The last lines of a job's log file, and the lines that ftmon itself writes to ``launcher.log``."""

import signal as signals
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import FtmonError, HubError, StartError, UsageError
from ..messages.control import Alert, AlertKind
from ..messages.hosts import KernelKill
from ..text import all_ranks
from .rundir import RunDir

if TYPE_CHECKING:
    from .rundir import ExitFile


# A request to end a run, kept in ``intent.json``: a job that ended on request has not failed.
#
# The hub writes it before it signals the job, and the launcher when it receives a signal itself. The process that
# records the job's end reads the reason from it, even if the others died in between.


_RANK_KILL_REACH_SECONDS = 180.0
"""A job that fails within this time after one of its ranks was killed on request ended because of it."""
LAUNCHER = "launcher"
"""``EndRequest.by`` if the launcher received a signal."""


class EndRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to end the run, or some ranks of it."""

    verb: str
    """``kill``, ``stop``, the name of a signal the launcher received, or the option by which ftmon itself ended the
    run: ``--on-hang`` or ``--exit-timeout``."""
    time: float
    by: str = ""
    ranks: list[int] = []
    """The ranks to end; empty for the whole run."""
    why: str = ""
    """The reason, as text, if ftmon ended the run."""
    cause: str = ""
    """``hang`` or ``hang-at-exit`` if ftmon ended the run."""

    @property
    def exit_cause(self) -> str:
        """The ``ExitFile.cause`` of a run that ended for this; empty for a signal, which the job itself handled."""
        return self.cause or ("request" if self.verb in ("kill", "stop") else "")

    @property
    def by_signal(self) -> bool:
        """Whether the launcher received a signal that ends a job, and forwarded it."""
        return self.by == LAUNCHER and self.verb in ("SIGINT", "SIGTERM")

    @property
    def state(self) -> Literal["failed", "stopped"]:
        """State of a run that ended for this request: ``failed`` for a hang in training, else ``stopped``."""
        return "failed" if self.cause == "hang" else "stopped"

    def explains(self, exit_code: int, ended: float) -> bool:
        """Return whether the request explains the job's end."""
        if self.verb == "SIGHUP" and exit_code == 0:
            return False  # some scripts reload their configuration on it
        if not self.ranks:
            return True
        return exit_code != 0 and ended - self.time < _RANK_KILL_REACH_SECONDS

    def text(self) -> str:
        """Return the request as text, such as ``killed on request``."""
        if self.cause:
            return f"ended by {self.verb}: {self.why}"
        if self.verb == "kill":
            if not self.ranks:
                return "killed on request"
            were = "was" if len(self.ranks) == 1 else "were"
            return f"ended after {all_ranks(self.ranks)} {were} killed on request"
        why = f": {self.why}" if self.why else ""
        return "stopped on request" if self.verb == "stop" else f"stopped by {self.verb}{why}"


def write_end_request(
    run: RunDir, verb: str, by: str = "", ranks: list[int] | None = None, why: str = "", cause: str = ""
) -> EndRequest:
    """Write a request to ``intent.json``; one for the whole run is never replaced by one for some ranks."""
    end_request = EndRequest(verb, time.time(), by, ranks or [], why, cause)
    before = read_end_request(run)
    if before is not None and not before.ranks and end_request.ranks:
        return before
    run.write_certain("intent.json", msgspec.json.encode(end_request) + b"\n")
    return end_request


def read_end_request(run: RunDir) -> EndRequest | None:
    """Return the last request; None if there is none, or it cannot be read."""
    try:
        return msgspec.json.decode((run.path / "intent.json").read_bytes(), type=EndRequest)
    except (OSError, msgspec.MsgspecError):
        return None


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9; ``signal 77`` for one without a name."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ending_in_words(exit_code: int | None, signal: int | None) -> str:
    """Return how a process ended: ``killed by SIGKILL``, ``exit code 1``, ``exit status unknown``.

    A negative exit code is a signal, as in ``subprocess``; 129 to 159 is 128 plus a signal, as in a shell.
    """
    if signal is None and exit_code is not None and exit_code < 0:
        signal = -exit_code
    if signal:
        return f"killed by {signal_name(signal)}"
    if exit_code is None:
        return "exit status unknown"
    if 128 < exit_code < 160:
        return f"exit code {exit_code}, {signal_name(exit_code - 128)}"
    return f"exit code {exit_code}"


def exhausted_memory(kill: KernelKill) -> str:
    """Return which memory ran out; empty if the evidence is against a kill by the kernel."""
    return {"": "", "group": "its control group's limit was exhausted", "host": "the host's memory was exhausted"}[
        kill.exhausted
    ]


# Exit statuses of the commands that start a run: the training's status, or one of ftmon's own codes, 193 to 199.
#
# Other codes are in use: shells use 1, 2, 126, 127 and 128 + signal (at most 192), sysexits.h 64 to 78, timeout, env
# and docker 124 to 127, Python 120, systemd 200 to 243, ssh 255, and scripts use small numbers. LSB reserves 150 to
# 199 for applications.


WRONG_USAGE = 2
"""Wrong usage or configuration, of commands whose status cannot be mistaken for a training's."""
INTERRUPTED = 130
"""ctrl-c ended a command; not of ``run``, where ctrl-c goes to the training."""

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

CAUSES = {
    "hang": HANG,
    "hang-at-exit": HANG_AT_EXIT,
    "not-started": NOT_STARTED,
    "lost": LOST,
    "request": STOPPED,
}
"""The status for each value of ``ExitFile.cause``."""


def of_training(code: int) -> int:
    """Return a job's status as a shell reports it: 128 + N for a job killed by signal N (``code`` is -N then)."""
    return 128 - code if code < 0 else code & 0xFF


def of_run(end: "ExitFile") -> int:
    """Return the exit status of the command for the end of its run: the training's status, or one of ``OWN``."""
    return CAUSES.get(end.cause) or of_training(end.exit_code)


def of_error(error: FtmonError, usage: int = RUN_USAGE) -> int:
    """Return the status of a command that starts a run where ftmon itself could not go on.

    Args:
        usage: the command's status for wrong usage.
    """
    if isinstance(error, HubError):
        return LOST
    wrong = isinstance(error, UsageError) and not isinstance(error, StartError)
    return usage if wrong else NOT_STARTED


FATAL: tuple[AlertKind, ...] = ("failure", "died", "oom")
"""Kinds of alerts that a rank ends with."""


def standing(alerts: Iterable[Alert], *kinds: AlertKind) -> list[Alert]:
    """Return the unresolved errors of these kinds."""
    return [each for each in alerts if each.kind in kinds and each.severity == "error" and each.resolved is None]


def first_failure(alerts: Iterable[Alert]) -> Alert | None:
    """Return the alert that explains why a run failed: a port in use, else the first alert; None if there is none.

    Resolved alerts do not count, such as those of an earlier job, which are resolved when a later job trains.
    """
    return min(
        standing(alerts, *FATAL, "exit"),
        key=lambda alert: ("port" not in alert.evidence, alert.time, alert.id),
        default=None,
    )


_OWN = "ftmon: "
_TAIL_BYTES = 32_768


def print_own(text: str) -> None:
    """Print a line of ftmon's own to the output of the job."""
    print(f"{_OWN}{text}", flush=True)


def last_lines(log: Path, limit: int, *, own: bool = False) -> list[str]:
    """Return the last lines that are not blank, at most ``limit``; none if the file cannot be read.

    Args:
        log: the file, of which the last 32 KiB are read.
        limit: maximum number of lines.
        own: include ftmon's own lines.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and (own or not line.startswith(_OWN))][-limit:]
