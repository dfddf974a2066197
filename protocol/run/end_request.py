"""A request to end a run, kept in ``intent.json``: a job that ended on request has not failed.

The hub writes it before it signals the job, and the launcher when it receives a signal itself. The process that records
the job's end reads the reason from it, even if the others died in between.
"""

import time
from typing import Literal

import msgspec

from ..text import all_ranks
from .rundir import RunDir

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
