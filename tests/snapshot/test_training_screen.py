"""The training screen as a person sees it, at its smallest and at a large size, in a replay of a recorded run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scenes import LARGE, both, picture
from streams import Stream, write
from trainscenes import trained

PICTURES = {
    "loss, evaluations, marks and a second figure": both(),
    "a window with a cursor over time": both("x", "x", "v", "v", "v", "pageup", *["left"] * 8, "up", "up"),
    "a cursor at a mark names it": picture("x", *["left"] * 2),
    "without colour the curves differ in shape": picture("v", *["left"] * 20, color=False),
    "in ASCII": picture("v", *["left"] * 20, ascii=True),
    "a replay held earlier shows the course up to there": picture("N", "N"),
    "of a script that shows little what is missing is named": picture("v", "v", "v", little=True),
    "the help explains curves, marks and keys": picture("question_mark", sizes=(LARGE,)),
}


@pytest.fixture
def shows(plays: Callable[..., bool], tmp_path: Path) -> Callable[..., bool]:
    def compare(size: tuple[int, int], *keys: str, little: bool = False, **options: Any) -> bool:
        path = tmp_path / "recording.sqlite"
        if little:
            write(path, Stream(ranks=1, steps=40, cuda=False, devices=False, logs=False, finished=False).frames())
        else:
            trained(path, ranks=2)
        return plays(path, size, "t", *keys, **options)

    return compare


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
