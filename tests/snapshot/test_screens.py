"""Every screen as it looks: recordings played through the real app, held at a moment, compared as SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenes import both, picture

PICTURES = {
    **{f"the overview of {ranks} ranks": both(ranks) for ranks in ("1", "2", "8", "64", "512")},
    "the overview of ranks on a CPU says so": picture("cpu"),
    "a hung rank says what it is doing": picture("hang"),
    "the screen of a rank": both("hang", "enter"),
    "the alerts": both("hang", "a"),
    "the logs": both("8", "l"),
    "logs filtered by text": picture("8", "l", "slash", "5", "0", "enter"),
    "help": both("8", "question_mark"),
    "a replay held at an alert": picture("8", "N", "left_square_bracket"),
    "the light theme": picture("hang", light=True),
    "the light theme of a heat map": picture("64", light=True),
    "plain ASCII": picture("hang", ascii=True),
    "plain ASCII of a rank": picture("hang", "enter", ascii=True),
    "no colour": picture("hang", color=False),
    "a terminal too small": picture("8", sizes=((50, 10),)),
}


@pytest.fixture
def shows(plays: Callable[..., bool], recording: Callable[[str], Path]) -> Callable[..., bool]:
    return lambda size, scene, *keys, **options: plays(recording(scene), size, *keys, **options)


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
