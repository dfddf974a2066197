"""What is rewritten for the terminal has the same effect as the original, with less output, and ASCII where asked."""

import random

import pytest
from ftmon.tui.widgets.screen_output import ScreenOutput
from terminal import Screen

STYLES = ["", "1", "38;2;1;2;3", "38;2;1;2;3;48;2;9;9;9", "1;38;2;4;5;6;48;2;9;9;9", "48;2;0;0;7", "7", "2;31;42"]


def piece(random_: random.Random, wide: bool) -> str:
    """Return a line as Textual writes it: a position, then styled pieces, each followed by a reset."""
    out = f"\x1b[{random_.randint(1, 6)};{random_.randint(1, 30)}H"
    for _ in range(random_.randint(1, 6)):
        text = "".join(random_.choices("  ab▂█é─漢" if wide else "  ab▂█é─", k=random_.randint(1, 8)))
        style = random_.choice(STYLES)
        out += f"\x1b[{style}m{text}\x1b[0m" if style else text
    return out


@pytest.mark.parametrize("seed", range(200))
def test_the_screen_is_the_same_after_rewriting(seed: int) -> None:
    random_, wide = random.Random(seed), seed % 4 == 0
    plain, thrifty, output = Screen(), Screen(), ScreenOutput()
    for _ in range(12):
        column = random_.randint(1, 40)
        frame = "\n".join(piece(random_, wide) for _ in range(4)) + f"\x1b[2;{column}H"
        if wide:  # halves of overwritten wide characters differ among terminals: start anew
            plain, thrifty, output = Screen(), Screen(), ScreenOutput()
            frame = "".join(f"\x1b[{y};1H{piece(random_, wide).partition('H')[2]}" for y in range(1, 5)) + "\x1b[1;1H"
        plain.write(frame.replace("\n", "\r\n"))
        thrifty.write(output.rewrite(frame))
        assert (thrifty.cells, thrifty.row, thrifty.column) == (plain.cells, plain.row, plain.column)


def test_what_is_shown_is_not_sent_again_and_other_sequences_keep_their_place_also_in_ascii():
    output = ScreenOutput()
    line = "\x1b[3;1H\x1b[1;38;2;1;2;3;48;2;4;5;6mloss 1.234\x1b[0m\x1b[1;1H"
    assert "loss 1.234" in output.rewrite(line)
    assert output.rewrite(line) == ""
    changed = output.rewrite(line.replace("1.234", "1.239"))
    assert changed == "\x1b[3;10H\x1b[1;38;2;1;2;3;48;2;4;5;6m9\x1b[0m\x1b[1;1H"
    output.forget()
    assert "loss 1.234" in (first := output.rewrite(line)), "the screen is unknown"
    assert output.rewrite("\x1b[?1049h" + line) == "\x1b[?1049h" + first, "the alternate screen is another one"
    output = ScreenOutput()
    assert output.rewrite("\x1b[?2026h") == "\x1b[?2026h"
    assert [output.rewrite("\x07"), output.rewrite("\x07")] == ["\x07", "\x07"], "a bell is no cell"
    assert output.rewrite("a\x1b]9;note\x07b\x1b[?25l").replace("\x1b[1;1H", "") == "a\x1b]9;note\x07b\x1b[?25l"
    # After a character of uncertain width the cursor is placed; what is beyond the terminal is not sent.
    output = ScreenOutput()
    assert output.rewrite("\x1b[1;1H漢b") == "\x1b[1;1H漢\x1b[1;3Hb"
    output.size = (4, 2)
    assert output.rewrite("\x1b[2;1Habcdef\x1b[3;1Hrow\x1b[1;1H") == "\x1b[2;1Habcd\x1b[1;1H"
    sent = ScreenOutput(ascii_only=True).rewrite("\x1b[1;1H╭─┤é漢→…±4 °C⣿🔎\x1b]9;né\x07")
    assert sent.isascii()
    assert "+-+e??>~~4 oC.??" in sent
