"""Recordings that the screens play, made once for all snapshots, and a clock in one time zone."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ftmon.tui.app import FtmonApp
from scenes import hanging, recorded, settled

# So few that a replay holds all of them at once: what it fetches later, when it rests, changes no picture.
STEPS = {"1": 60, "2": 60, "8": 22, "64": 8, "512": 4}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Give a scene's recording by name: a number of ranks, ``cpu`` or ``hang``."""
    folder = tmp_path_factory.mktemp("scenes")
    made: dict[str, Path] = {}

    def give(name: str) -> Path:
        if name not in made:
            path = folder / f"{name}.sqlite"
            if name == "hang":
                made[name] = hanging(path)
            elif name == "cpu":
                made[name] = recorded(path, 2, cuda=False)
            else:
                made[name] = recorded(path, int(name), steps=STEPS[name], spike_every=10)
        return made[name]

    return give


@pytest.fixture
def plays(snap_compare: Any) -> Callable[..., bool]:
    """Compare an app's screen after some keys."""

    def compare(app: FtmonApp, size: tuple[int, int], *keys: str) -> bool:
        async def play(pilot: Any) -> None:
            await settled(pilot)
            for key in keys:
                await pilot.press(key)
                await settled(pilot)

        try:
            return snap_compare(app, terminal_size=size, run_before=play)
        finally:
            if app.app_state.source is not None:
                app.app_state.source.close()

    return compare
