"""Lines that are typed into: the cursor stays on the screen, also after letters that take two cells."""

import pytest
from ftmon.tui.widgets.base import Prompt
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.oom import ConsoleInput
from ftmon.tui.widgets.state import AppState

WIDTH = 40
TEXTS = ("x" * 100, "日本語" * 30, "ab日" * 30)


@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_shows_the_end_of_its_text_and_the_cursor(text: str) -> None:
    prompt = Prompt(AppState(None, Theme()), "filter")
    prompt.set_reactive(Prompt.has_focus, True)
    prompt.text = text
    (line,) = prompt.draw(WIDTH, 1)
    assert line.width <= WIDTH
    assert line.plain.endswith(text[-5:] + " ")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cursor", [0, 10, 45, 90])
def test_a_console_shows_the_text_around_its_cursor(text: str, cursor: int) -> None:
    console = ConsoleInput(AppState(None, Theme()), "console")
    console.set_reactive(ConsoleInput.has_focus, True)
    console.text, console.cursor = text, cursor
    (line,) = console.draw(WIDTH, 1)
    assert line.width <= WIDTH
    assert text[max(0, cursor - 5) : cursor + 1] in line.plain
