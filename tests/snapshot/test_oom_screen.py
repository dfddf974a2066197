"""The out-of-memory screen as it looks: a held rank's report, its console, the question before it is let go."""

from pathlib import Path
from typing import Any

import pytest
from ftmon.tui.app import FtmonApp
from ftmon.tui.screens import oom
from ftmon.tui.screens.oom import OomScreen
from oomscenes import TENSORS, HeldRun
from scenes import both, picture, until

NAMES = {"(": "left_parenthesis", ")": "right_parenthesis", "'": "apostrophe", "\n": "enter"}
TYPED = [NAMES.get(each, each) for each in "tensors(2)\nfree('hidden')\nretry()"]
PICTURES = {
    "the report of a held rank": both(),
    "further down the report in ASCII": picture("pagedown", "pagedown", ascii=True),
    "the console": both("c", *TYPED),
    "letting go is asked first": picture("r"),
}


def unanswered(source: HeldRun) -> str | None:
    commands = source.commands.items()
    return next((number for number, it in commands if it.verb.name == "console" and it.result is None), None)


@pytest.fixture
def shows(snap_compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Compare the screen of a held rank after some keys; what is typed is answered."""
    # Where the run lies differs from machine to machine.
    monkeypatch.setattr(oom, "place_words", lambda *_: "~/ftmon/runs/llama3/snapshots/rank-1-oom.pickle")
    monkeypatch.setattr("ftmon.tui.screens.oom.place_words", oom.place_words)

    def compare(size: tuple[int, int], *keys: str, **options: Any) -> bool:
        source = HeldRun(tmp_path)
        app = FtmonApp(source, **options)

        async def play(pilot: Any) -> None:
            await until(pilot, lambda: isinstance(app.screen, OomScreen), "the screen of a held rank")
            waiting = [TENSORS, "freed 61.00 GiB"]
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
                if key == "enter":
                    number = await until(pilot, lambda: unanswered(source), "the typed line sent")
                    source.answer(number, waiting.pop(0), place="model.py:143 forward")
            await pilot.pause()
            app.pump()

        return snap_compare(app, terminal_size=size, run_before=play)

    return compare


def test_picture(shows: Any, picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
