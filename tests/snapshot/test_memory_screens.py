"""Where the memory goes, what allocators do, and what a spike came from, as they look; compared as SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peaks import explained

SMALL, LARGE = (80, 24), (200, 60)
# So few steps that a replay holds all of them at once: what it fetches later, when it rests, changes no picture.
SCENES: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "steps": 48},
    "eight": {"ranks": 8, "steps": 16},
    "many": {"ranks": 512, "steps": 2},
    "cpu": {"ranks": 2, "steps": 24, "cuda": False},
    "plain": {"ranks": 1, "steps": 24, "taken_apart": False},
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("explained")
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            made[name] = explained(folder / f"{name}.sqlite", **SCENES[name])
        return made[name]

    return give


@pytest.fixture
def shows(plays: Callable[..., bool], scene: Callable[[str], Path]) -> Callable[..., bool]:
    return lambda name, *how, **options: plays(scene(name), *how, **options)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_the_waterfall_of_a_rank(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("one", size, "m")


def test_the_waterfall_of_another_phase_in_the_light_theme(shows: Callable[..., bool]) -> None:
    assert shows("one", SMALL, "m", "tab", light=True)


def test_the_cause_below_the_waterfall_in_ascii(shows: Callable[..., bool]) -> None:
    assert shows("one", SMALL, "m", "enter", "pagedown", ascii=True)


def test_the_waterfall_without_colour(shows: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert shows("one", SMALL, "m")


def test_the_waterfall_of_a_rank_on_a_cpu_says_so(shows: Callable[..., bool]) -> None:
    assert shows("cpu", SMALL, "m")


def test_before_anything_was_taken_apart(shows: Callable[..., bool]) -> None:
    assert shows("plain", SMALL, "m")


def test_the_bars_of_eight_ranks(shows: Callable[..., bool]) -> None:
    assert shows("eight", LARGE, "m", "v", "down")


def test_the_bars_of_512_ranks(shows: Callable[..., bool]) -> None:
    assert shows("many", SMALL, "m", "v")


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_what_the_allocators_do(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows("eight", size, "e")


def test_the_cause_of_a_spike_where_its_alert_is_read(shows: Callable[..., bool]) -> None:
    assert shows("one", SMALL, "a", "enter")
