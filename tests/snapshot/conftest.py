"""Pictures of screens compared with those kept; recordings that they play, made once; a clock in one time zone."""

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from ftmon.tui.app import FtmonApp
from ftmon.tui.widgets import state
from scenes import ReadyReplay, hanging, recorded, settled
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from textual.app import App

# So few that a replay holds all of them at once: what it fetches later, when it rests, changes no picture.
STEPS = {"1": 60, "2": 60, "8": 22, "64": 8, "512": 4}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each picture of a module in each of its sizes."""
    if "picture" in metafunc.fixturenames:
        rows = [(name, size, one) for name, one in metafunc.module.PICTURES.items() for size in one.sizes]
        ids = [f"{name} {size[0]}x{size[1]}" for name, size, _ in rows]
        metafunc.parametrize("picture", [((size, *one.how), one.options) for _, size, one in rows], ids=ids)


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    time.tzset()


@pytest.fixture(autouse=True)
def messages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what the key bar says for seconds until the picture is taken, however slow the machine."""
    monkeypatch.setattr(state, "MESSAGE_SECONDS", 600.0)


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


class Picture(SingleFileSnapshotExtension):
    """A screen in an SVG file of its own, without the number by which Rich tells pictures on one page apart."""

    file_extension = "svg"
    _write_mode = WriteMode.TEXT

    def serialize(self, data: Any, **options: Any) -> str:
        return re.sub(r"\bterminal-\d+-", "terminal-", str(super().serialize(data, **options)))


@pytest.fixture
def snap_compare(snapshot: SnapshotAssertion, tmp_path: Path) -> Callable[..., bool]:
    """Compare an app's screen with the picture kept of it; a screen that differs is left in a file."""
    kept = snapshot.use_extension(Picture)

    def compare(app: App[Any], terminal_size: tuple[int, int], run_before: Callable[[Any], Awaitable[None]]) -> bool:
        async def draw() -> str:
            async with app.run_test(size=terminal_size, notifications=True) as pilot:
                await run_before(pilot)
                await pilot.pause()
                await pilot.wait_for_scheduled_animations()
                await pilot.pause()
                return app.export_screenshot(simplify=True)

        shown = asyncio.run(draw())
        if kept == shown:
            return True
        left = tmp_path / "shown.svg"
        left.write_text(shown)
        print(f"the screen is not as in the picture kept of it: {left}")
        return False

    return compare


@pytest.fixture
def plays(snap_compare: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Compare the app's screen after some keys, a recording at its end; ``options`` are the app's."""

    def compare(
        source: Path | ReadyReplay, size: tuple[int, int], *keys: str, color: bool = True, **options: Any
    ) -> bool:
        if not color:
            monkeypatch.setenv("NO_COLOR", "1")
        source = ReadyReplay(source, at_end=True) if isinstance(source, Path) else source
        app = FtmonApp(source, **options)

        async def play(pilot: Any) -> None:
            await settled(pilot)
            for key, equal in groupby(keys):
                presses = list(equal)
                # Equal keys are waited for together, but that a second seek begins where the first has led to.
                for together in [[one] for one in presses] if key == "N" else [presses]:
                    await pilot.press(*together)
                    await settled(pilot)

        try:
            return snap_compare(app, terminal_size=size, run_before=play)
        finally:
            source.close()

    return compare
