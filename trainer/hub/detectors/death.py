"""Failures and deaths: the first one is the alert, what follows from it is its evidence.

- An exception that left the script's main thread raises ``failure`` with its traceback (``oom`` takes those for want of
  memory). One that only tells of a lost peer ("connection closed by peer", a broken communicator) waits 3 s for the
  peer's own death or failure, and becomes part of that when it comes.
- A process that is gone without a goodbye raises ``died``, with its exit code or signal in words and the last lines of
  its log (those that arrive within 3 s too). After a failure of the same rank it only adds the exit status to that.
- Within 60 s of the first trouble other ranks that end by SIGTERM, SIGINT, SIGKILL or SIGABRT, or for a lost peer, are
  counted as what followed: DeepSpeed's and torchrun's launchers end all ranks of a node when one exits non-zero.
- A launcher that ended before its ranks is an alert of its own, and what becomes of them follows from it: ftmon ends
  what a job leaves behind. The line in which ftmon's launcher says so tells the hub.
- A death that a person asked for (kill) is information about that rank, and so is the lost peer of the others; of a
  whole run it is no alert at all.
"""

import re
import signal as signals
from collections import deque

from ....protocol.control import Alert, RankState
from ....protocol.hosts import KernelKill
from ....protocol.telemetry import Failure, LogLine
from ....protocol.text import duration
from .book import RANKS_LISTED, AlertBook, Key
from .oom import TRACEBACK_LIMIT, OomDetector
from .words import ending_in_words, first_line, library_hint, signal_hint

LOG_LINES = 12
HELD_S = 3.0
CONSEQUENCE_S = 60.0

_LOST_PEER = (
    "connection closed by peer",
    "connection was likely closed",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "nccl communicator was aborted",
    "ncclremoteerror",
    "remote process exited",
    "socket closed",
    "connectionreseterror",
)
_FOLLOWING_SIGNALS = {2, 6, 9, 15}
_FOLLOWING_CODES = {128 + number for number in _FOLLOWING_SIGNALS}
_LEFT_BEHIND = re.compile(r"ftmon: the job ended \(([\w ]+)\) and left (\d+) processes, ending them: ")
_LAUNCHER: Key = ("died", None, "", "launcher")


def _by_kernel(kill: KernelKill | None) -> bool:
    return kill is not None and bool(kill.text)


def _killer(how: str, hint: str, kill: KernelKill | None, pressure: str) -> tuple[str, str]:
    """Say who sent a SIGKILL, as far as the evidence goes: for the title, and in a sentence."""
    mend = "Give it more memory (the limit, the host), or hold less: fewer workers, smaller batches, no offload."
    if kill is not None and kill.text:
        why = "; ".join(kill.evidence)
        if kill.sure:
            return f"{how} by the kernel for want of memory", f"{kill.text.capitalize()}: {why}. {mend}"
        return f"{how}, probably by the kernel for want of memory", f"{kill.text.capitalize()}: {why}. {mend}"
    if kill is not None:
        return how, f"Not by the kernel for memory: {'; '.join(kill.evidence)}. Somebody or a job scheduler sent it."
    if pressure:
        return (
            f"{how}, probably by the kernel for want of memory",
            f"Neither log nor counter could be read; {pressure}.",
        )
    return how, hint


def _kernel_evidence(kill: KernelKill | None, pressure: str) -> dict[str, object]:
    found: dict[str, object] = {}
    if kill is not None:
        found["kernel_kill"] = {"sure": kill.sure, "text": kill.text, "why": kill.evidence}
    if pressure:
        found["memory_before"] = pressure
    return found


def _lost_peer(error: str) -> bool:
    lowered = error.lower()
    return any(words in lowered for words in _LOST_PEER)


class DeathDetector:
    """Turns failures and deaths of ranks into alerts (rules: this module's docstring)."""

    def __init__(self, book: AlertBook, oom: OomDetector) -> None:
        self._book = book
        self._oom = oom
        self._logs: dict[int, deque[str]] = {}
        self._held: list[tuple[float, Failure, bool]] = []
        """Since when, what, and whether somebody had asked for another rank's end."""
        self._failed: dict[int, Key] = {}
        self._first: tuple[float, Key] | None = None
        """When trouble began, and the alert that says so."""
        self._followers: dict[str, str] = {}
        self._awaiting_logs: dict[int, tuple[float, Key]] = {}

    def log(self, line: LogLine) -> None:
        """Keep a rank's last lines; -1 is the launcher."""
        lines = self._logs.get(line.rank)
        if lines is None:
            lines = self._logs[line.rank] = deque(maxlen=LOG_LINES)
        lines.append(line.text)

    def launcher_ended(self, t: float, line: LogLine) -> list[Alert]:
        """Take in a line of the launcher's output: it may say that the job ended before its ranks did."""
        found = _LEFT_BEHIND.match(line.text) if line.rank == -1 else None
        if found is None or self._recent(t):
            return []
        how, count = found.groups()
        self.trouble(t, _LAUNCHER)
        alerts = self._book.raise_alert(
            t,
            "died",
            "warning" if how == "exit code 0" else "error",
            f"the job's command ended ({how}) before its ranks",
            rule="launcher",
            text=(
                f"The command that was started ({how}) left {count} processes behind. Nobody would have looked after "
                "them, so ftmon ended them; no rank is to blame."
            ),
            evidence={"ended": how, "left": int(count), "processes": line.text[found.end() :]},
        )
        return alerts + self._release(t)

    def trouble(self, t: float, key: Key) -> None:
        """Note that an alert of another detector (out of memory) may be where the trouble began."""
        if self._first is None or t - self._first[0] > CONSEQUENCE_S:
            self._first = (t, key)
            self._followers = {}
        if key[1] is not None:
            self._failed[key[1]] = key

    def failure(self, t: float, failure: Failure, kill_asked: set[int]) -> list[Alert]:
        """Take in an exception that ended a rank's script."""
        if -1 in kill_asked and (
            _lost_peer(failure.error) or failure.error.startswith(("KeyboardInterrupt", "SystemExit"))
        ):
            return []
        if _lost_peer(failure.error):
            if self._recent(t):
                return self._followed(t, failure.rank, failure.error)
            self._held.append((t, failure, bool(kill_asked - {failure.rank})))
            return []
        return self._raise_failure(t, failure)

    def gone(
        self,
        t: float,
        state: RankState,
        kill_asked: set[int],
        kill: KernelKill | None = None,
        pressure: str = "",
    ) -> list[Alert]:
        """Take in that a rank's process is gone.

        Args:
            t: seconds since the epoch.
            state: the rank's state.
            kill_asked: ranks whose end was asked for.
            kill: what is known of the kernel's part in it.
            pressure: how full the host's memory was just before, in words; empty: not full, or not known.
        """
        rank = state.rank
        ending = ending_in_words(state.exit_code, state.signal)
        known = self._failed.get(rank)
        if known is not None:
            return self._book.annotate(
                t, known, {"ended": ending}, "" if ending.endswith("unknown") else f"It ended: {ending}."
            )
        if -1 in kill_asked or any(failure.rank == rank for _, failure, _ in self._held):
            # Its own failure, of a lost peer, is still held back: it will tell, or become part of the peer's.
            return []
        asked = rank in kill_asked
        died: Key = ("died", rank, "", "process")
        if (
            self._book.get(died) is None
            and not asked
            and not _by_kernel(kill)
            and self._recent(t)
            and self._follows(state)
        ):
            return self._followed(t, rank, ending)
        if self._first is None or t - self._first[0] > CONSEQUENCE_S:
            self._first = (t, died)
            self._followers = {}
        signal = state.signal or (-state.exit_code if state.exit_code is not None and state.exit_code < 0 else None)
        hint = f"Possibly: {signal_hint(signal)}." if signal and signal_hint(signal) else ""
        how = ending if ending.startswith("killed") else f"ended: {ending}"
        if signal == signals.SIGKILL and not asked:
            how, hint = _killer(how, hint, kill, pressure)
        self._awaiting_logs[rank] = (t, died)
        alerts = self._book.raise_alert(
            t,
            "died",
            "info" if asked else "error",
            f"rank {rank} {how}{', as asked' if asked else ''}",
            rule="process",
            rank=rank,
            text=(
                f"The process of rank {rank} (pid {state.pid}) is gone: {state.text or ending}."
                f"{f' {hint}' if hint and not asked else ''} The other ranks cannot go on without it; "
                "DeepSpeed's launcher ends them too."
            ),
            evidence={
                "pid": state.pid,
                "exit_code": state.exit_code,
                "signal": state.signal,
                "log": list(self._logs.get(rank, ())),
                **_kernel_evidence(kill, pressure),
            },
            repeat=False,
        )
        return alerts + self._release(t)

    def tick(self, now: float) -> list[Alert]:
        """Let go of what was held back for long enough."""
        alerts: list[Alert] = []
        if self._held and now - self._held[0][0] > HELD_S:
            first, *rest = self._held
            self._held = rest
            _, failure, asked = first
            alerts += self._raise_failure(now, failure, asked)
        for rank, (since, key) in list(self._awaiting_logs.items()):
            if now - since > HELD_S:
                del self._awaiting_logs[rank]
                log = list(self._logs.get(rank, ()))
                hint = library_hint("\n".join(log))
                alerts += self._book.annotate(now, key, {"log": log}, f"{hint[0].upper()}{hint[1:]}." if hint else "")
        return alerts

    def restore(self, alert: Alert) -> None:
        """Take in a failure's or death's alert of the recording."""
        key: Key = (alert.kind, alert.rank, alert.phase, str(alert.evidence.get("rule", "")))
        if alert.kind in ("failure", "oom") and alert.rank is not None and alert.resolved is None:
            self._failed[alert.rank] = key
        self._first = (alert.time, key)

    def _raise_failure(self, t: float, failure: Failure, asked: bool = False) -> list[Alert]:
        taken = self._oom.failure(t, failure)
        if taken is not None:
            key = self._oom.standing(failure.rank)
            if key is not None:
                self.trouble(t, key)
            return taken + self._release(t)
        key = ("failure", failure.rank, failure.phase, "exception")
        self.trouble(t, key)
        where = f" in {failure.phase}" if failure.phase else ""
        why = ", its peer killed as asked" if asked else ""
        alerts = self._book.raise_alert(
            t,
            "failure",
            "info" if asked else "error",
            f"rank {failure.rank} failed{where}{why}: {first_line(failure.error)}",
            rule="exception",
            rank=failure.rank,
            step=failure.step,
            phase=failure.phase,
            text=f"An exception left the script in step {failure.step}: {first_line(failure.error, 1000)}."
            + (f" {hint[0].upper()}{hint[1:]}." if (hint := library_hint(failure.error)) else ""),
            evidence={
                "error": failure.error,
                "traceback": failure.traceback[-TRACEBACK_LIMIT:],
                "log": list(self._logs.get(failure.rank, ())),
            },
        )
        return alerts + self._release(t)

    def _recent(self, t: float) -> bool:
        return self._first is not None and t - self._first[0] <= CONSEQUENCE_S

    @staticmethod
    def _follows(state: RankState) -> bool:
        code = state.exit_code
        if state.signal is not None:
            return state.signal in _FOLLOWING_SIGNALS
        return code is None or code in _FOLLOWING_CODES or -code in _FOLLOWING_SIGNALS or code == 1

    def _followed(self, t: float, rank: int, how: str) -> list[Alert]:
        if self._first is None:
            return []
        since, key = self._first
        known = self._followers.get(str(rank))
        if known is None and len(self._followers) < RANKS_LISTED:
            self._followers[str(rank)] = f"{first_line(how)} after {duration(max(0.0, t - since))}"
        elif known is not None and not how.endswith("unknown"):
            self._followers[str(rank)] = f"{known}, then {first_line(how)}"
        return self._book.annotate(t, key, {"then": dict(self._followers)})

    def _release(self, t: float) -> list[Alert]:
        """Something primary has come up: what was held back followed from it."""
        held, self._held = self._held, []
        return [alert for _, failure, _ in held for alert in self._followed(t, failure.rank, failure.error)]
