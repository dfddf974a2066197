"""How a run ends: requests to end it, texts for how a process ended, the first failure, the last lines of a log."""

import signal as signals
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from ..messages.control import Alert, AlertKind
from ..messages.hosts import KernelKill
from ..text import all_ranks
from .rundir import RunDir

_RANK_KILL_REACH_SECONDS = 180.0
"""A job that fails within this time after one of its ranks was killed on request ended because of it."""
LAUNCHER = "launcher"  # `EndRequest.by` if the launcher received a signal


class EndRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request to end the run, or some ranks of it, kept in ``intent.json``: such a job has not failed.

    The hub writes it before it signals the job, and the launcher when it receives a signal itself. The process that
    records the job's end reads the reason from it, even if the others died in between.
    """

    verb: str
    """``kill``, ``stop``, the name of a signal the launcher received, or the option by which ftmon itself ended the
    run: ``--on-hang`` or ``--exit-timeout``."""
    time: float
    by: str = ""
    ranks: list[int] = []  # the ranks to end; empty for the whole run
    why: str = ""  # the reason, as text, if ftmon ended the run
    cause: str = ""  # `hang` or `hang-at-exit` if ftmon ended the run

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


FATAL: tuple[AlertKind, ...] = ("failure", "died", "oom")  # kinds of alerts that a rank ends with


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
    """Return at most ``limit`` lines from the last 32 KiB of a log that are not blank; none if it cannot be read.

    ftmon's own lines are included with ``own``.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and (own or not line.startswith(_OWN))][-limit:]
