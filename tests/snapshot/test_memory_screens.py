"""Where the memory goes, what allocators do, and what a spike came from, as they look; compared as SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peaks import explained
from scenes import LARGE, both, picture

# So few steps that a replay holds all of them at once: what it fetches later, when it rests, changes no picture.
SCENES: dict[str, dict[str, Any]] = {
    "one": {"ranks": 1, "steps": 48},
    "eight": {"ranks": 8, "steps": 16},
    "many": {"ranks": 512, "steps": 2},
    "cpu": {"ranks": 2, "steps": 24, "cuda": False},
    "plain": {"ranks": 1, "steps": 24, "taken_apart": False},
}


PICTURES = {
    "the waterfall of a rank": both("one", "m"),
    "the waterfall of another phase in the light theme": picture("one", "m", "tab", light=True),
    "the cause below the waterfall in ASCII": picture("one", "m", "enter", "pagedown", ascii=True),
    "the waterfall without colour": picture("one", "m", color=False),
    "the waterfall of a rank on a CPU says so": picture("cpu", "m"),
    "before anything was taken apart": picture("plain", "m"),
    "the bars of eight ranks": picture("eight", "m", "v", "down", sizes=(LARGE,)),
    "the bars of 512 ranks": picture("many", "m", "v"),
    "what the allocators do": both("eight", "e"),
    "the cause of a spike where its alert is read": picture("one", "a", "enter"),
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
    return lambda size, name, *keys, **options: plays(scene(name), size, *keys, **options)


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
