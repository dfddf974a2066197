"""The output of a run: a line that a terminal cuts can be read in full."""

from ftmon.protocol.messages.telemetry import LogLine
from ftmon.tui.screens.lists import LogList
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.state import AppState

LONG = " ".join(f"word{number}" for number in range(30))


def drawn(*texts: str, follow: bool = False, selected: int = 0) -> list[str]:
    state = AppState(None, Theme())
    for number, text in enumerate(texts):
        state.model.logs.put(number, LogLine(1_780_000_000.0, 0, "out", text))
    lines = LogList(state)
    lines.follow, lines.selected = follow, selected
    shown = lines.draw(80, 12)
    assert len(shown) <= 12
    assert max(line.width for line in shown) <= 80
    return [line.plain.rstrip() for line in shown]


def test_the_selected_line_is_below_the_list_in_full_if_its_end_is_cut_and_leaves_it_half_of_the_screen():
    shown = drawn("short", LONG, selected=1)
    assert " ".join(shown[shown.index("─" * 80) + 1 :]).split() == LONG.split()
    assert sum("word" in line for line in drawn("short", LONG)) == 1
    assert sum("word" in line for line in drawn("short", LONG, follow=True)) == 1
    shown = drawn("short", " ".join([LONG] * 9), selected=1)
    assert "short" in shown[1]
    assert len(shown) == 1 + 2 + 1 + 6
