"""The monitor's own troubles, and a run that ends before it began: dropped telemetry, no recording, no first step.

- **dropped**: the loss counters of a HubStats rose. One alert, counted up with each rise, resolved after 60 s without.
- **disk**: HubStats says why nothing is recorded. Resolved when it no longer does.
- **exit**: the job ended without any rank having finished an optimizer step.

The last two are for streams whose hub did not say so itself: an alert that stands already is left as it is.
"""

from ....protocol.control import Alert, HubStats, RunState
from .book import RANKS_LISTED, AlertBook, Key

QUIET_S = 60.0
_DROPPED: Key = ("dropped", None, "", "lost")
_DISK: Key = ("disk", None, "", "recording")


class HealthDetector:
    """Raises alerts about lost telemetry, a failing recording and a run without steps."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._lost: dict[str, int] = {}
        self._rose_at = 0.0

    def stats(self, t: float, stats: HubStats) -> list[Alert]:
        """Take in the hub's own figures."""
        return [*self._losses(t, stats), *self._recording(t, stats)]

    def ended(self, t: float, state: RunState, stepped: bool, ranks: int) -> list[Alert]:
        """Take in the end of the run."""
        if stepped or state.state not in ("finished", "failed") or self._book.standing("exit"):
            return []
        code = "" if state.exit_code is None else f", exit code {state.exit_code}"
        if ranks:
            why = (
                f"{ranks} {'rank' if ranks == 1 else 'ranks'} started, and none finished an optimizer step. The last "
                "lines of the logs say where the script ended."
            )
        else:
            why = (
                "No rank was seen: the command ended, or failed, before it made a DeepSpeed engine or an optimizer. "
                "The launcher's log has its output."
            )
        return self._book.raise_alert(
            t,
            "exit",
            "warning" if state.state == "finished" else "error",
            f"the script ended before its first step{code}",
            rule="no-step",
            text=why,
            evidence={"exit_code": state.exit_code, "ranks": ranks},
            repeat=False,
        )

    def observe(self, stats: HubStats) -> None:
        """Take in the hub's figures from the recording: what was lost before is no news."""
        self._lost = dict(stats.lost)

    def _losses(self, t: float, stats: HubStats) -> list[Alert]:
        rose = {source: count for source, count in stats.lost.items() if count > self._lost.get(source, 0)}
        new = sum(count - self._lost.get(source, 0) for source, count in rose.items())
        self._lost = dict(stats.lost)
        if not new:
            return self._book.resolve(t, _DROPPED, "None lost since.") if t - self._rose_at > QUIET_S else []
        self._rose_at = t
        total = sum(stats.lost.values())
        names = ", ".join(sorted(_sender(source) for source in rose)[:4]) + (" ..." if len(rose) > 4 else "")
        return self._book.raise_alert(
            t,
            "dropped",
            "warning",
            f"{total} messages of telemetry lost, {new} just now from {names}",
            rule="lost",
            text=(
                "What is shown has gaps; the training itself is not touched. A probe drops rather than waits when the "
                "hub was away for long or cannot keep up."
            ),
            evidence={"total": total, "new": new, "by_sender": dict(list(stats.lost.items())[:RANKS_LISTED])},
        )

    def _recording(self, t: float, stats: HubStats) -> list[Alert]:
        if not stats.recording_error:
            return self._book.resolve(t, _DISK, "Recording again.")
        if self._book.standing("disk"):
            return []
        return self._book.raise_alert(
            t,
            "disk",
            "error",
            f"not recording: {stats.recording_error}"[:240],
            rule="recording",
            text=(
                "The training goes on and the live view too, but what happens now will be missing from the recording. "
                "Free space on that disk; recording resumes by itself."
            ),
            evidence={"error": stats.recording_error, "recorded": stats.recorded},
            repeat=False,
        )


def _sender(source: str) -> str:
    """Shorten a probe's identity, ``rank-3-4711-123456``, to ``rank 3``."""
    parts = source.split("-")
    return f"rank {parts[1]}" if len(parts) == 4 and parts[0] == "rank" else source
