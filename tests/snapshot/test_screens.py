"""Every screen as it looks: recordings played through the real app, held at a moment, compared as SVG."""

from collections.abc import Callable
from pathlib import Path

import pytest

SMALL, LARGE = (80, 24), (200, 60)


@pytest.fixture
def shows(plays: Callable[..., bool], recording: Callable[[str], Path]) -> Callable[..., bool]:
    return lambda scene, *how, **options: plays(recording(scene), *how, **options)


@pytest.mark.parametrize("ranks", ["1", "2", "8", "64", "512"])
def test_the_overview_in_a_small_terminal(shows: Callable[..., bool], ranks: str) -> None:
    assert shows(ranks, SMALL)


@pytest.mark.parametrize("ranks", ["1", "2", "8", "64", "512"])
def test_the_overview_in_a_large_terminal(shows: Callable[..., bool], ranks: str) -> None:
    assert shows(ranks, LARGE)


def test_the_overview_of_ranks_on_a_cpu_says_so(shows: Callable[..., bool]) -> None:
    assert shows("cpu", SMALL)


def test_a_hung_rank_says_what_it_is_doing(shows: Callable[..., bool]) -> None:
    assert shows("hang", SMALL)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_screen_of_a_rank(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("hang", size, "enter")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_alerts(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("hang", size, "a")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_logs(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("8", size, "l")


def test_logs_filtered_by_text(shows: Callable[..., bool]) -> None:
    assert shows("8", SMALL, "l", "slash", "5", "0", "enter")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_help(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("8", size, "question_mark")


def test_a_replay_held_at_an_alert(shows: Callable[..., bool]) -> None:
    assert shows("8", SMALL, "N", "left_square_bracket")


def test_the_light_theme(shows: Callable[..., bool]) -> None:
    assert shows("hang", SMALL, light=True)


def test_the_light_theme_of_a_heat_map(shows: Callable[..., bool]) -> None:
    assert shows("64", SMALL, light=True)


def test_plain_ascii(shows: Callable[..., bool]) -> None:
    assert shows("hang", SMALL, ascii=True)


def test_plain_ascii_of_a_rank(shows: Callable[..., bool]) -> None:
    assert shows("hang", SMALL, "enter", ascii=True)


def test_no_colour(shows: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert shows("hang", SMALL)


def test_a_terminal_too_small(shows: Callable[..., bool]) -> None:
    assert shows("8", (50, 10))
