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
    "of a script that shows little what is missing is named": picture("v", "v", "v", shows_little=True),
    "the help explains curves, marks and keys": picture("question_mark", sizes=(LARGE,)),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("whole") / "recording.sqlite", ranks=2)


@pytest.fixture(scope="module")
def little(tmp_path_factory: pytest.TempPathFactory) -> Path:
    frames = Stream(ranks=1, steps=40, cuda=False, devices=False, logs=False, finished=False).frames()
    return write(tmp_path_factory.mktemp("little") / "recording.sqlite", frames)


@pytest.fixture
def shows(plays: Callable[..., bool], whole: Path, little: Path) -> Callable[..., bool]:
    def compare(size: tuple[int, int], *keys: str, shows_little: bool = False, **options: Any) -> bool:
        return plays(little if shows_little else whole, size, "t", *keys, **options)

    return compare


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
