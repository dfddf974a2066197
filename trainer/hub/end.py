"""``EndDetector`` finds whether and how a run ended, and ``RunEnd`` decides when its hub may exit.

The launcher writes ``exit.json`` once the job has ended and none of its processes is left. If the launcher died, or
never existed (a bare ``ftmon.watch()``), the hub writes it once no process of the run is left.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ...protocol.analysis.deaths.detector import is_nearer_cause
from ...protocol.analysis.deaths.logs import RaisedException, last_exception
from ...protocol.analysis.findings.finding import Finding
from ...protocol.analysis.hub_facts import NoStepFacts, UnhookedFacts
from ...protocol.host.process import is_alive, write_private
from ...protocol.messages.memory import OomReport
from ...protocol.messages.telemetry import Failure, Goodbye, Heartbeat, Hello, Step
from ...protocol.messages.wire import Message
from ...protocol.run.end import last_lines, read_end_request
from ...protocol.run.rundir import ExitFile, RunDir, RunFile
from ..host import processes
from .agents import BACK_SECONDS, Agents

_ORPHAN_POLL_SECONDS = 2.0
_ORPHAN_POLLS = 2  # Consecutive polls without any process before the hub itself records that the run is over
_LAUNCHER_START_SECONDS = 15.0
_WATCH_START_SECONDS = 60.0  # Time for which a run without a launcher may have no rank
_SILENCE_SECONDS = 30.0  # Ranks on other hosts without an agent count as ended after this many seconds of silence
_LOG_TAIL_LINES = 20
_LINE_LENGTH = 300
_TRACEBACK_LINES = 400


class EndDetector:
    """Detects the end of a run. ``note`` gets every message of the stream."""

    def __init__(self, run: RunDir, run_file: RunFile) -> None:
        self._run = run
        self._kind = run_file.kind
        self._is_foreign = run_file.foreign is not None
        self._begun = time.monotonic()
        self._next_poll = 0.0
        self._empty_polls = 0
        self._received = 0
        self._last_message_at = self._begun
        self._hellos: set[int] = set()
        self._goodbyes: dict[int, str] = {}
        self._failure: Failure | None = None
        """The first failure that a rank reported; failures other than a lost peer take precedence."""
        self.stepped = False  # Whether some rank has finished a step
        self._resumed = False  # Whether some rank resumed after steps of an earlier run

    def note(self, message: Message) -> None:
        """Record a message of the stream (for speed, the caller records steps itself)."""
        if isinstance(message, Hello):
            self._hellos.add(message.rank)
            self._goodbyes.pop(message.rank, None)
        elif isinstance(message, Goodbye):
            self._goodbyes[message.rank] = message.reason
        elif isinstance(message, Failure):
            known = self._failure
            if known is None or is_nearer_cause(message.error, known.error):
                self._failure = message
        elif isinstance(message, Step):
            self.stepped = True
        elif isinstance(message, Heartbeat):
            self._resumed |= message.step > 1

    def begin_job(self) -> None:
        """Forget the ranks of the previous job."""
        self._hellos.clear()
        self._goodbyes.clear()
        self._failure = None

    def poll(self, ranks_alive: int, ranks_elsewhere: bool, received: int) -> ExitFile | None:
        """Return the run's end, or None while it is running.

        ``ranks_elsewhere``: some ranks have no visible process; they live while ``received`` (messages) grows.
        """
        found = self._run.read_exit()
        if found is not None:
            return found
        now = time.monotonic()
        if received != self._received:
            self._received, self._last_message_at = received, now
        all_ended = bool(self._hellos) and self._hellos <= self._goodbyes.keys()
        heard = ranks_elsewhere and now - self._last_message_at < _SILENCE_SECONDS and not all_ended
        if ranks_alive or heard:
            self._empty_polls = 0
            return None
        if now < self._next_poll:
            return None
        self._next_poll = now + _ORPHAN_POLL_SECONDS
        launcher = self._run.read_run().launcher
        if launcher is not None and is_alive(launcher):
            return None
        start_seconds = _WATCH_START_SECONDS if self._kind == "watch" else _LAUNCHER_START_SECONDS
        if not self._hellos and now - self._begun < start_seconds:
            return None
        marked = processes.marked(self._run.path, processes.table().values()) if self._kind != "watch" else []
        self._empty_polls = 0 if marked else self._empty_polls + 1
        return self._write() if self._empty_polls >= _ORPHAN_POLLS else None

    def _write(self) -> ExitFile:
        now = time.time()
        reasons = set(self._goodbyes.values())
        clean = bool(reasons) and "failed" not in reasons
        end_request = read_end_request(self._run)
        cause = ""
        if end_request is not None and end_request.explains(int(not clean), now):
            state, text, cause = end_request.state, end_request.text(), end_request.exit_cause
        elif clean:
            state = "finished" if reasons == {"finished"} else "stopped"
            text = "every rank ended in order"
        else:
            state, text, cause = "failed", "its processes are gone", "lost"
        if self._kind != "watch":
            text += "; the launcher died before it wrote the exit status"
        # Only a goodbye proves that a rank's script ended; killed ranks send none.
        killed = end_request is not None and (end_request.verb == "kill" or bool(end_request.cause))
        found = ExitFile(0 if clean and not killed else 1, now, state, text, cause)
        with contextlib.suppress(OSError):  # on a full disk only the apps receive the end
            self._run.write_exit(found)
        return found

    def no_step(self, end: ExitFile, unhooked: UnhookedFacts | None = None) -> Finding | None:
        """Return the finding that a run ended without a step.

        None if there were steps, if an earlier run had completed them all, or if the run was ended: on request, or
        because it hung, or if its ranks are watched from outside. ``unhooked``: a process that was not monitored.
        """
        if (
            self._is_foreign
            or end.state == "stopped"
            or end.cause == "hang"
            or self.stepped
            or (self._resumed and end.state == "finished")
        ):
            return None
        last = [line[:_LINE_LENGTH] for line in last_lines(self._run.logs / "launcher.log", _LOG_TAIL_LINES)]
        facts = NoStepFacts(end.text, end.exit_code, len(self._hellos), last_lines=last)
        raised, failed = self._errors()
        if raised is not None:
            facts = replace(facts, error=raised.words, error_rank=raised.rank, error_place=raised.place)
        elif failed is not None:
            facts = replace(facts, error=failed.error, error_rank=failed.rank)
        elif unhooked is not None and not self._hellos:
            facts = replace(facts, unhooked=unhooked)
        elif end.state == "failed" and not self._hellos:
            rank, line = self._last_line()
            facts = replace(facts, last_line=line, last_line_rank=rank)
        return Finding("no_step", facts, severity="error" if end.state == "failed" else "warning")

    def _logs(self) -> list[Path]:
        """Return the ranks' output, of the one that ended first in front, and the command's."""
        return [*sorted(self._run.logs.glob("rank-*.err"), key=_changed), self._run.logs / "launcher.log"]

    def _last_line(self) -> tuple[int | None, str]:
        """Return the last line of the rank whose output ended first, or of the command if no rank wrote any."""
        for path in self._logs():
            others = ("ftmon: ", "[") if path.stem == "launcher" else ("ftmon: ",)  # "[": of DeepSpeed's launcher
            lines = last_lines(path, _LOG_TAIL_LINES)
            written = [line.strip() for line in lines if any(map(str.isalnum, line)) and not line.startswith(others)]
            if written:
                return _rank_of(path), written[-1][:_LINE_LENGTH]
        return None, ""

    def _errors(self) -> tuple[RaisedException | None, Failure | None]:
        """Return the exception in the output that ended the job, and the failure that a rank reported."""
        raised, failed = self._raised(), self._failure
        if raised is not None and raised.is_of_launcher:
            raised = None
        if raised is not None and failed is not None and is_nearer_cause(failed.error, raised.words):
            raised = None  # a configuration error is reported in one line, without a traceback
        return raised, failed

    def _raised(self) -> RaisedException | None:
        """Return the exception that ended the job, from the output of ranks and launcher; None if there is none.

        If several ranks raised one, the rank whose output ended first counts: the others fail because it is gone.
        """
        for path in self._logs():
            found = last_exception([line[:1000] for line in last_lines(path, _TRACEBACK_LINES)])
            if found is not None:
                rank = _rank_of(path)
                return found if rank is None else replace(found, rank=rank)
        return None


def _rank_of(log: Path) -> int | None:
    """Return the rank that wrote a log file; None for the launcher's."""
    rank = log.stem.removeprefix("rank-")
    return int(rank) if rank.isdigit() else None


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def keeper(run: RunDir) -> Callable[[OomReport], OomReport]:
    """Return a function that writes a report into the run's ``oom/`` and returns its path; empty on a full disk."""

    def keep(report: OomReport) -> OomReport:
        stamp = time.strftime("%H%M%S", time.localtime(report.time))
        path = run.path / "oom" / f"rank-{report.rank}-step-{report.step}-{stamp}.json"
        found = replace(report, path=str(path.relative_to(run.path)))
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_private(path, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
        except OSError as error:
            print(f"{path}: cannot be written: {error.strerror or error}", file=sys.stderr)
            return report
        return found

    return keep


LINGER_SECONDS = 3.0  # Seconds that the hub stays after the end, so that apps receive it and can query the rest
SETTLE_SECONDS = 1.25  # Delay after a failure, so that the ranks' deaths are judged in their order before the end
AGENTS_END_SECONDS = 10.0  # Limit for agents to end processes and send their last messages, if a run did not finish
AGENTS_FINISH_SECONDS = 45.0  # The same if the run finished: another host's part of the job may still be saving


class RunEnd:
    """Ends a run in steps. Main loop only.

    ``poll`` returns the job's end, or None while it is running. ``finish`` receives the messages in flight, then
    appends the end; called once. ``busy`` returns whether the hub should stay, at a ``time.monotonic``.
    """

    def __init__(
        self,
        agents: Agents,
        poll: Callable[[], ExitFile | None],
        finish: Callable[[ExitFile], None],
        busy: Callable[[float], bool],
    ) -> None:
        self._agents = agents
        self._poll = poll
        self._finish = finish
        self._busy = busy
        self._end: ExitFile | None = None
        self._finish_at = 0.0
        self._agents_until = 0.0
        self._missed_until = 0.0
        self._finished = False
        self._leave_at: float | None = None

    def tick(self, now: float) -> bool:
        """Advance the sequence once the run has ended; True if the hub may exit. ``now`` is ``time.monotonic``."""
        if self._end is None:
            self._end = self._poll()
            if self._end is not None:
                self._begin(self._end, now)
        if self._end is None or now < self._finish_at or (now < self._agents_until and self._agents.reachable()):
            return False
        if not self._finished:
            self._finished = True
            self._finish(self._end)
            return False
        if self._leave_at is None:  # from now on: to finish may have taken longer than that
            self._leave_at = now + LINGER_SECONDS
            return False
        if now < self._leave_at or self._busy(now):
            return False
        return now >= self._missed_until or not self._agents.missed()

    def _begin(self, end: ExitFile, now: float) -> None:
        clean = end.state == "finished"
        self._finish_at = now + (SETTLE_SECONDS if end.state == "failed" else 0.0)
        self._agents_until = now + (AGENTS_FINISH_SECONDS if clean else AGENTS_END_SECONDS)
        self._missed_until = now + BACK_SECONDS
        self._agents.run_is_over(AGENTS_FINISH_SECONDS - AGENTS_END_SECONDS if clean else SETTLE_SECONDS)
