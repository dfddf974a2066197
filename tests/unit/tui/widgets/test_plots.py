"""The memory graph: scaled to what it is told, boundaries to an eighth of a row, spikes never lost."""

import pytest
from ftmon.tui.widgets.drawing import ASCII, DARK, UNICODE, Theme
from ftmon.tui.widgets.plots import Column, Scale, eighths, memory_graph

GIB = 2**30
THEME = Theme()


def cells(lines, x):
    """Give character and style of column ``x``, from the top."""
    found = []
    for line in lines:
        position = 0
        for text, style in line.parts:
            if position <= x < position + len(text):
                found.append((text[x - position], style))
            position += len(text)
    return found


@pytest.mark.parametrize(("size", "shown"), [(80 * GIB, 32), (100 * GIB, 32), (1, 1), (0, 0)])
def test_a_graph_is_as_high_as_its_device_and_shows_what_is_not_zero(size, shown) -> None:
    assert eighths(size, 80 * GIB, 4) == shown


def test_boundaries_are_drawn_to_an_eighth_over_the_tone_of_reserved_and_of_the_background() -> None:
    # 5 of 16 GiB in 4 rows are a row and two eighths; 16 GiB reserved lie behind all of it.
    column = cells(memory_graph([Column(5 * GIB, 16 * GIB)], 1, 4, Scale(16 * GIB), THEME), 0)
    assert column[3][1].bgcolor.name == DARK.allocated
    assert column[2][0] == "▂"
    assert column[2][1].color.name == DARK.allocated
    assert column[2][1].bgcolor.name == DARK.reserved
    assert column[0][1].bgcolor.name == DARK.reserved
    column = cells(memory_graph([Column(0, 6 * GIB)], 1, 4, Scale(16 * GIB), THEME), 0)
    assert column[2][0] == "▄"
    assert column[2][1].color.name == DARK.reserved
    assert column[2][1].bgcolor.name == DARK.background


def test_a_spike_colours_its_column_with_a_mark_above_and_the_run_s_peak_is_a_line() -> None:
    columns = [Column(4 * GIB, 4 * GIB), Column(4 * GIB, 4 * GIB, "warning", spike=True)]
    lines = memory_graph(columns, 2, 4, Scale(16 * GIB), THEME)
    assert cells(lines, 1)[3][1].bgcolor.name == DARK.warning
    assert cells(lines, 1)[2][0] == UNICODE.spike
    assert cells(lines, 0)[3][1].bgcolor.name == DARK.allocated
    lines = memory_graph([None, Column(4 * GIB, 4 * GIB)], 2, 4, Scale(16 * GIB, 10 * GIB), THEME)
    assert [cells(lines, column)[1][0] for column in (0, 1)] == [UNICODE.peak] * 2, "where nothing hides it"
    lines = memory_graph([Column(16 * GIB, 16 * GIB)], 5, 1, Scale(16 * GIB), THEME)
    assert cells(lines, 4)[0][1].bgcolor.name == DARK.allocated, "the newest column is at the right"
    assert cells(lines, 3)[0] == (" ", THEME.base)


def test_without_colour_reserved_memory_has_a_character_of_its_own() -> None:
    lines = memory_graph([Column(4 * GIB, 12 * GIB)], 1, 4, Scale(16 * GIB), Theme(color=False))
    assert [char for char, _ in cells(lines, 0)] == [" ", "░", "░", "█"]
    lines = memory_graph([Column(4 * GIB, 12 * GIB)], 1, 4, Scale(16 * GIB), Theme(DARK, ASCII))
    assert [char for char, _ in cells(lines, 0)] == [" ", "-", "-", "#"]
