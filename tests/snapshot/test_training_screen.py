"""The training screen as a person sees it, at its smallest and at a large size, in a replay of a recorded run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streams import Stream, write
from trainscenes import trained

SMALL, LARGE = (80, 24), (200, 60)


@pytest.fixture
def shows(plays: Callable[..., bool], tmp_path: Path) -> Callable[..., bool]:
    def compare(size: tuple[int, int], *keys: str, path: Path | None = None, **options: Any) -> bool:
        return plays(path or trained(tmp_path / "recording.sqlite", ranks=2), size, "t", *keys, **options)

    return compare


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_loss_evaluations_marks_and_a_second_figure(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows(size)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_window_with_a_cursor_over_time(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows(size, "x", "x", "v", "v", "v", "pageup", *["left"] * 8, "up", "up")


def test_a_cursor_at_a_mark_names_it(shows: Callable[..., bool]) -> None:
    assert shows(SMALL, "x", *["left"] * 2)


def test_without_colour_the_curves_differ_in_shape(shows: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert shows(SMALL, "v", *["left"] * 20)


def test_in_ascii(shows: Callable[..., bool]) -> None:
    assert shows(SMALL, "v", *["left"] * 20, ascii=True)


def test_a_replay_held_earlier_shows_the_course_up_to_there(shows: Callable[..., bool]) -> None:
    assert shows(SMALL, "N", "N")


def test_of_a_script_that_shows_little_what_is_missing_is_named(shows: Callable[..., bool], tmp_path: Path) -> None:
    frames = Stream(ranks=1, steps=40, cuda=False, devices=False, logs=False, finished=False).frames()
    assert shows(SMALL, "v", "v", "v", path=write(tmp_path / "little.sqlite", frames))


def test_the_help_explains_curves_marks_and_keys(shows: Callable[..., bool]) -> None:
    assert shows(LARGE, "question_mark")
