"""Untrusted text is safe to print; figures keep their units."""

import os
import termios
from pathlib import Path

import pytest
from ftmon.protocol.text import (
    all_ranks,
    counted,
    duration,
    gib,
    names_c_locale,
    ranks_counted,
    sanitize,
    terminal_width,
    wrapped,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07after", "after"),
     ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"), ("a\tb", "a    b"), ("progress\rdone", "progress�done"),
     ("\x9b31mred", "�31mred"), ("\u202egnp.exe", "�gnp.exe"), ("one\u2028two", "one�two"),
     ("bytes \udcff that were no text", "bytes � that were no text"), ("äö 漢字 🙂", "äö 漢字 🙂"),
     ("ad\u200bmin\ufeff", "ad�min�"), ("\U000e0041tag\u2060", "�tag�"),
     ("\u0646\u200c\u0647 👩\u200d💻", "\u0646\u0647 👩💻")],
)  # fmt: skip
def test_what_a_terminal_would_obey_is_taken_out(text: str, shown: str) -> None:
    assert sanitize(text) == shown


@given(st.text(st.characters(), max_size=200))
def test_nothing_that_is_left_moves_the_cursor_or_breaks_the_line(text: str) -> None:
    left = sanitize(text)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 for char in left)
    assert len(left.splitlines()) <= 1
    left.encode("utf-8")


def test_a_long_line_is_cut_and_things_are_counted_and_named():
    assert len(sanitize("x" * 10**6)) == 4096
    assert sanitize("abcdef", limit=3) == "abc"
    assert ranks_counted([4]) == "rank 4"
    assert ranks_counted([0, 1, 2, 5, 7, 8]) == "6 ranks (0-2, 5, 7-8)"
    assert [counted(number, "step") for number in (0, 1, 1204)] == ["0 steps", "1 step", "1,204 steps"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (37.4 * 2**30, "37.40 GiB"), (911 * 2**20, "0.89 GiB"), (50 * 2**20, "50.0 MiB"), (512, "0.5 KiB"),
        (0, "0.0 KiB"),
    ],
)  # fmt: skip
def test_bytes_are_told_in_the_unit_that_fits(count: float, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4e-6, "4 us"), (0.00099951, "1 ms"), (0.004, "4 ms"), (0.9996, "1.0 s"), (3.14159, "3.1 s"), (9.96, "10 s"),
     (34.2, "34 s"), (134, "2 m 14 s"), (8040, "2 h 14 m"), (277_200, "3 d 5 h"), (-34, "-34 s"),
     (float("inf"), "? s"), (float("nan"), "? s")],
)  # fmt: skip
def test_durations_are_told_in_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("ranks", "words"),
    [([], "no ranks"), ([3], "rank 3"), ([1, 0], "ranks 0-1"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_every_rank_is_named(ranks: list[int], words: str) -> None:
    assert all_ranks(ranks) == words


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"LC_ALL": "C", "LANG": "de_DE.UTF-8"}, True), ({"LANG": "POSIX"}, True),
     ({"LC_CTYPE": "C", "LANG": "C.UTF-8"}, True), ({"LC_ALL": "C.UTF-8", "LANG": "C"}, False),
     ({"LC_CTYPE": "en_US.UTF-8", "LANG": "C"}, False), ({}, False)],
)  # fmt: skip
def test_the_c_locale_is_drawn_in_ascii_although_python_writes_utf_8(environ: dict[str, str], expected: bool) -> None:
    assert names_c_locale(environ) is expected


def test_a_line_continues_below_its_last_column_as_wide_as_the_terminal(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    try:
        termios.tcsetwinsize(terminal, (24, 40))
        expected = "  lora.rank=0  all the weights fit a GPU\n               of this kind"
        assert wrapped("  lora.rank=0  all the weights fit a GPU of this kind", terminal) == expected
        wanted = "predicted: 64.80 of 76.7 GiB, 70,201\n  tokens/s"
        assert wrapped("predicted: 64.80 of 76.7 GiB, 70,201 tokens/s", terminal) == wanted
        assert terminal_width(terminal) == 40
        for whole in ("it has room", "a row of figures  1,024  2,048  fits here"):
            assert wrapped(whole, terminal) == whole
        termios.tcsetwinsize(terminal, (0, 0))  # as docker exec -t leaves it
        assert terminal_width(terminal) is None
    finally:
        os.close(ours)
        os.close(terminal)
    with (tmp_path / "file").open("wb") as file:
        assert wrapped("no terminal " * 9, file.fileno()) == "no terminal " * 9
