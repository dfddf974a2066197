"""Summary of a recording: its ``meta`` table, its first and last messages, its gaps and missing parts."""

import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from ..host.process import ProcessId, is_alive
from ..messages.bounds import LAST_TIME
from ..messages.control import RunState
from ..messages.wire import UNREADABLE
from ..text import sanitize
from .curves import mean_loss
from .opening import OpenedRecording
from .results import RecordingInfo
from .rows import Row
from .schema import STREAM_TABLES


def read_info(
    path: Path,
    opened: OpenedRecording,
    every: Callable[[str], list[Row]],
    one: Callable[[str], Any],
    ranks: list[int],
    state: RunState | None,
    left_out: Callable[[], str],
) -> RecordingInfo:
    """Return the summary of a recording.

    Args:
        path: the recording.
        opened: the open recording.
        every: returns all rows of a query.
        one: returns the first value of a query.
        ranks: the ranks in it.
        state: the run's last state in it.
        left_out: returns what was left out of the answers so far, as text.

    Raises:
        sqlite3.Error, TypeError, ValueError: the file is damaged.
    """
    rows = every("SELECT key, value FROM meta")
    meta = {key: value for key, value in rows if isinstance(key, str) and isinstance(value, str)}
    firsts: list[tuple[int, float]] = []
    lasts: list[tuple[int, float]] = []
    for table in STREAM_TABLES:
        firsts += every(f"SELECT seq, t FROM {table} ORDER BY seq LIMIT 1")
        lasts += every(f"SELECT seq, t FROM {table} ORDER BY seq DESC LIMIT 1")
    first, last = _moment(min(firsts, default=(0, 0.0))), _moment(max(lasts, default=(0, 0.0)))
    # If the clock was set back, the last message has an earlier time, which occurs elsewhere in the stream as well.
    newest = _moment((0, one("SELECT max(second) FROM clock") or 0))[1] if last[1] else 0.0
    process = ProcessId(_number(meta.get("writer_pid")), _number(meta.get("writer_start_ticks")))
    closed = bool(meta.get("closed"))
    live = not closed and not opened.missing and is_alive(process)
    gaps = every("SELECT first_t, last_t, messages, reason FROM gaps")
    missing = "; ".join(filter(None, (_missing(opened, closed, live, last[1], gaps), left_out())))
    return RecordingInfo(
        run_id=meta.get("run_id", ""),
        name=meta.get("name", path.parent.name),
        command=_command(meta.get("command", "[]")),
        started=_time(meta.get("created")) or first[1],
        first_t=first[1],
        last_t=max(last[1], float(newest)),
        first_seq=first[0],
        last_seq=last[0],
        steps=one("SELECT count(seq) FROM steps"),
        ranks=ranks,
        schema=opened.schema,
        complete=closed and not missing,
        missing=missing,
        state=state.state if state else "",
        exit_code=state.exit_code if state else None,
        last_step=one("SELECT max(step) FROM (SELECT step FROM steps ORDER BY seq DESC LIMIT 4096)") or 0,
        host=meta.get("host", ""),
        kind=meta.get("kind", ""),
        live=live,
        model=_text(one("SELECT model FROM ranks WHERE model != '' ORDER BY seq DESC LIMIT 1")),
        loss=_last_loss(every(_LOSSES.format(min(4096, 8 * len(ranks)))), len(ranks)),
        evaluation_loss=_real(one(_EVALUATION_LOSS)),
        state_text=state.text if state else "",
    )


_LOSSES = """
    SELECT step, loss, label_tokens FROM steps LEFT JOIN training_steps USING(seq)
    WHERE seq IN (SELECT seq FROM steps ORDER BY seq DESC LIMIT {})"""
_EVALUATION_LOSS = """
    SELECT loss FROM evaluations WHERE loss IS NOT NULL
    AND name = (SELECT name FROM evaluations WHERE loss IS NOT NULL ORDER BY step, seq LIMIT 1)
    ORDER BY step DESC, seq DESC LIMIT 1"""


def _last_loss(rows: list[Row], ranks: int) -> float | None:
    """Return the loss of the last step that all ranks recorded, mean over ranks; of the last step if there is none.

    Args:
        rows: step, loss and label tokens of the latest rank-steps.
        ranks: number of ranks.
    """
    steps: dict[int, list[tuple[float, int]]] = {}
    recorded: dict[int, int] = {}
    for step, loss, tokens in rows:
        if isinstance(step, int):
            recorded[step] = recorded.get(step, 0) + 1
            if isinstance(loss, float) and isfinite(loss):
                steps.setdefault(step, []).append((loss, tokens if isinstance(tokens, int) else 0))
    common = max((step for step in steps if recorded[step] >= ranks), default=max(steps, default=0))
    return mean_loss(steps.get(common, []))


def _real(value: object) -> float | None:
    return value if isinstance(value, float) and isfinite(value) else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _missing(opened: OpenedRecording, closed: bool, live: bool, last_t: float, gaps: list[Row]) -> str:
    """Return what is missing of a recording, as text; empty: nothing."""
    until = f"; it ends at {_clock(last_t)}" if last_t else ""
    found = [f"{opened.missing}{until}"] if opened.missing else []
    if not closed and not live and not found:
        found.append(f"it was not closed properly: the last second, or more, may be missing{until}")
    for first_t, gap_t, messages, reason in gaps:
        count = messages if isinstance(messages, int) else "some"
        words = sanitize(reason, 300) if isinstance(reason, str) and reason else "the reason is not known"
        noun = "message" if count == 1 else "messages"
        found.append(f"{count} {noun} between {_clock(first_t)} and {_clock(gap_t)}: {words}")
    return "; ".join(found)


def _clock(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    except (OSError, OverflowError, TypeError, ValueError):
        return "a time that is none"


def _number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 18 else 0


def _time(text: str | None) -> float:
    """Return a time that was written as text; 0 if it is invalid."""
    try:
        t = float(text or 0)
    except ValueError:
        return 0.0
    return _moment((0, t))[1]


def _moment(row: tuple[int, float]) -> tuple[int, float]:
    """Return the number and time; the time is 0 if it is out of range."""
    return (row[0], row[1]) if 0 <= row[1] < LAST_TIME else (row[0], 0.0)


def _command(text: str) -> list[str]:
    try:
        return msgspec.json.decode(text, type=list[str])
    except UNREADABLE:
        return []
