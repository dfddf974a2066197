"""Parses positions in a recording as typed by a user: ``812``, ``12:03:10``, ``+90s``, ``50%``."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

from ...protocol.errors import UsageError

_CLOCK = re.compile(r"(?:(\d{4})-(\d{1,2})-(\d{1,2})[ T])?(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?")
_JUMP = re.compile(r"([+-])((?:\d+(?:\.\d+)?[dhms]?\s*)+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms]?)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

FIX = "type a step (812), a time (12:03:10), a jump (-2m) or a share (50%)"


@dataclass(frozen=True, slots=True)
class Position:
    """A position to seek to: a step, or a time in seconds since the epoch."""

    step: int | None = None
    time: float = 0.0


def parse(text: str, position: float, first: float, last: float) -> Position:
    """Parse a position from the "go to" dialog.

    Args:
        text: the typed text; ``step 812`` and ``#812`` are steps too. A time of day is local, on the day within the
            recording that is nearest to the position.
        position: the displayed time, seconds since the epoch.
        first: the recording's first time.
        last: the recording's last time.

    Raises:
        UsageError: the text has none of these forms; the message lists them.
    """
    typed = text.strip().lower()
    step = re.fullmatch(r"(?:step|#)?\s*(\d[\d,_]*)", typed)
    if step:
        return Position(step=int(re.sub("[,_]", "", step[1])))
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", typed)
    if share:
        return Position(time=first + (last - first) * min(float(share[1]), 100.0) / 100.0)
    jump = _JUMP.fullmatch(typed)
    if jump:
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(jump[2]))
        return Position(time=_within(position + (seconds if jump[1] == "+" else -seconds), first, last))
    clock = _CLOCK.fullmatch(text.strip())
    if clock:
        return Position(time=_within(_time_of_day(clock, text, position, first, last), first, last))
    raise UsageError(f"cannot go to {text!r}: {FIX}")


def _time_of_day(clock: re.Match[str], text: str, position: float, first: float, last: float) -> float:
    year, month, day, hour, minute, second = clock.groups()
    base = datetime.fromtimestamp(position)
    try:
        whole = float(second or 0)
        if year:
            base = datetime(int(year), int(month), int(day))
        at = base.replace(hour=int(hour), minute=int(minute), second=int(whole), microsecond=round(whole % 1 * 1e6))
    except ValueError:
        raise UsageError(f"cannot go to {text!r}: there is no such time; {FIX}") from None
    if year:
        return at.timestamp()
    days = [(at + timedelta(days=offset)).timestamp() for offset in (0, -1, 1)]
    inside = [candidate for candidate in days if first <= candidate <= last]
    return min(inside or days, key=lambda candidate: abs(candidate - position))


def _within(time_: float, first: float, last: float) -> float:
    return min(max(time_, first), last)
