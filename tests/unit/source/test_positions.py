from datetime import datetime

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.tui.source.replay import Position, parse

FIRST = datetime(2026, 3, 1, 22, 0, 0).timestamp()
LAST = datetime(2026, 3, 2, 4, 0, 0).timestamp()
NOW = datetime(2026, 3, 1, 23, 30, 0).timestamp()


def at(text: str) -> Position:
    return parse(text, NOW, FIRST, LAST)


@pytest.mark.parametrize("text", ["812", " 812 ", "step 812", "#812", "8_12"])
def test_a_bare_number_is_a_step(text: str) -> None:
    assert at(text) == Position(step=812)


def test_a_thousands_comma_is_understood() -> None:
    assert at("1,204") == Position(step=1204)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("+90s", NOW + 90), ("-2m", NOW - 120), ("+1h30m", NOW + 5400), ("+10", NOW + 10), ("-9d", FIRST), ("+9d", LAST)],
)
def test_a_sign_is_a_jump_from_here_that_stays_inside(text: str, expected: float) -> None:
    assert at(text).time == pytest.approx(expected)


def test_a_share_is_of_the_whole_recording() -> None:
    assert at("50%").time == pytest.approx((FIRST + LAST) / 2)
    assert at("100%").time == LAST


def test_a_time_of_day_is_of_the_day_that_puts_it_inside() -> None:
    assert at("23:45").time == datetime(2026, 3, 1, 23, 45).timestamp()
    assert at("03:10:20").time == datetime(2026, 3, 2, 3, 10, 20).timestamp()


def test_a_date_is_understood() -> None:
    assert at("2026-03-02 01:00").time == datetime(2026, 3, 2, 1).timestamp()


@pytest.mark.parametrize("text", ["", "soon", "25:00", "12:61", "+", "%", "-", "1.5", "12:03:10:4"])
def test_anything_else_is_refused_with_what_can_be_typed(text: str) -> None:
    with pytest.raises(UsageError, match=r"type a step \(812\)"):
        at(text)
