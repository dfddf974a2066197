"""Renderers on plain values: what they say, and that they keep their width."""

from dataclasses import replace
from typing import Any

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import DeviceSample
from ftmon.tui.model.alerts import LogEntry
from ftmon.tui.widgets import ranks as heat
from ftmon.tui.widgets.alerts import alert_detail, alert_line, evidence_lines, log_line
from ftmon.tui.widgets.drawing import (
    ASCII,
    DARK,
    LIGHT,
    UNICODE,
    Line,
    Theme,
    choose,
    count,
    cut,
    gib,
    gib_signed,
    loss,
    milliseconds,
    spread,
    step_time,
    tail,
    width_of,
    wrap,
)
from ftmon.tui.widgets.header import Summary, summary_lines, time_of_day
from ftmon.tui.widgets.plots import Scale, cells_of, phase_bar, spark
from ftmon.tui.widgets.ranks import card, health_words, label, title
from ftmon.tui.widgets.state import RankView, nice_top, throttle_of
from ftmon.tui.widgets.training import Course, course_lines, grouped
from hypothesis import given
from hypothesis import strategies as st

GIB = 2**30
THEME = Theme()
SHARES = (("data", 0.02), ("forward", 0.31), ("backward", 0.50), ("optimizer", 0.15), ("other", 0.02))
VIEW = RankView(
    rank=3, device="GPU 3", state="training", capacity=80 * GIB, allocated=34 * GIB, peak=40 * GIB, behind=44 * GIB,
    shares=SHARES, step_seconds=0.74, utilization=98.0, power=612.0, temperature=64.0,
)  # fmt: skip
HUNG = RankView(rank=3, device="GPU 3", state="hung", text="not in all_gather #8841, in data loading", state_seconds=34)


@pytest.mark.parametrize(
    ("rank", "stream", "shown"),
    [
        (-1, "launcher", "launcher usage: t.py"),
        (2, "out", "rank 2   usage: t.py"),
        (2, "err", "rank 2   err  usage: t.py"),
    ],
)
def test_a_log_line_has_its_source_once_and_marks_standard_error(rank: int, stream: str, shown: str) -> None:
    line = log_line(LogEntry(1, 0.0, rank, stream, "usage: t.py"), 60, THEME)
    assert line.plain.split(" ", 2)[2].rstrip() == shown
    assert line.width == 60


@pytest.mark.parametrize("width", [36, 40, 80, 200])
@pytest.mark.parametrize("height", [6, 9, 20])
@pytest.mark.parametrize("theme", [THEME, Theme(LIGHT), Theme(DARK, ASCII), Theme(color=False)])
def test_a_card_keeps_its_size(width: int, height: int, theme: Theme) -> None:
    lines = card(VIEW, [], width, height, Scale(80 * GIB, 40 * GIB), theme, selected=True)
    assert len(lines) == height
    assert {line.width for line in lines} == {width}


def test_a_card_and_a_row_have_state_spikes_host_and_of_the_health_what_fits_whole() -> None:
    text = " ".join(line.plain for line in card(HUNG, [], 38, 8, Scale(80 * GIB), THEME, selected=False))
    assert "hung 34 s" in text
    assert "in data loading" in " ".join(text.split()), "in two lines"
    line = title(replace(HUNG, host="ip-10-0-112-34", spikes=3), 36, THEME, selected=False)
    assert line.width == 36
    assert line.plain.endswith("3  hung 34 s ─")
    (line,) = label(replace(VIEW, host="node7", spikes=3), 20, 1, THEME, selected=False)
    assert " 3 node7" in line.plain
    assert [health_words(VIEW, width, THEME) for width in (24, 22)] == ["util 98 %  612 W  64 °C", "util 98 %  612 W"]


def test_every_ascii_card_and_row_is_ascii_which_is_chosen_where_the_locale_cannot_print_blocks(monkeypatch):
    theme = Theme(DARK, ASCII)
    for view in (VIEW, HUNG, replace(HUNG, state="unreachable")):
        lines = card(view, [], 60, 9, Scale(80 * GIB, 40 * GIB), theme, selected=True)
        lines += label(view, 12, 1, theme, selected=False)
        assert all(line.plain.isascii() for line in lines)
    assert set(ASCII.states) == set(UNICODE.states)
    assert len(ASCII.eighths) == len(UNICODE.eighths) == 9
    assert all(value.isascii() for value in (*ASCII.states.values(), *ASCII.keys.values()))
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "ANSI_X3.4-1968")
    assert choose(False) is ASCII
    monkeypatch.setattr("locale.getpreferredencoding", lambda _: "UTF-8")
    assert choose(False) is UNICODE


@pytest.mark.parametrize("width", range(5, 120, 7))
def test_the_phase_bar_divides_its_width_by_the_shares(width: int) -> None:
    cells = cells_of([share for _, share in SHARES], width)
    assert sum(cells) == width
    assert phase_bar(SHARES, width, THEME).width == width
    assert max(cells) == cells[2]
    assert cells_of([0.006, 0.994], 20) == [1, 19], "a small share still shows"


def test_figures_are_short_with_units_and_the_zoomed_scale_is_a_calm_one_above_the_peak():
    sizes = [gib(139.8 * GIB), gib(37.4 * GIB), gib(37.4 * GIB, short=True), gib(GIB / 2)]
    assert sizes == ["139.8", "37.40", "37.4", "0.500"]
    assert [gib_signed(-5.1 * GIB), gib_signed(100)] == ["-5.10", "0"]
    assert [count(987), count(12_400), count(1_300_000), count(2.1e9)] == ["987", "12.4k", "1.3M", "2.1B"]
    assert [step_time(0.74), step_time(1.236)] == ["740 ms", "1.24 s"]
    assert [milliseconds(9_520), milliseconds(None), milliseconds(2_848_000)] == ["9.52", "", "2,848"]
    for peak in (1, GIB // 3, 3.98 * GIB, 40.2 * GIB, 777 * GIB):
        assert peak <= nice_top(int(peak))
        assert nice_top(int(peak)) <= max(2.01 * peak, GIB)
    assert nice_top(int(3.98 * GIB)) == 4 * GIB


def evidence_text(evidence: dict[str, Any]) -> list[str]:
    return [" ".join(line.plain.split()) for line in evidence_lines(evidence, 78, THEME)]


def test_evidence_is_in_words_with_units_also_inside_evidence():
    assert evidence_text({"transient_bytes": 911 * 2**20}) == ["allocated and freed 0.890 GiB"]
    assert evidence_text({"share_of_capacity": 0.042}) == ["share of capacity 4.2 %"]
    assert evidence_text({"read_us": 4000, "age_s": 34.2}) == ["reading the stacks 4 ms", "no progress for 34 s"]
    assert evidence_text({"held": False, "exit_code": None}) == ["held at the error no", "exit status not known"]
    assert evidence_text({"bytes_per_s": 50.0 * 2**20}) == ["written 0.049 GiB/s"]
    found = evidence_text({"ratio": 1.5, "temperature_c": 81, "latest_rank": 3, "window_steps": 20})
    assert found == ["relative to usual 1.5×", "temperature 81 °C", "latest on rank 3", "measured over 20 steps"]
    assert evidence_text({"rule": "recent", "first_ranks": ()}) == ["first on ranks none"]
    assert evidence_text({"batch_shape": [4, 2048], "wait_ms": 0}) == ["batch 4 × 2048", "waited for data 0 s"]
    assert evidence_text({"since": 1_780_000_000.25}) == [f"since {time_of_day(1_780_000_000.25)}"]
    assert evidence_text({"since": 12.5}) == ["since 12.5"]
    found = evidence_text({"spare_bytes": 2 * GIB, "host_us": 4000})
    assert found == ["spare 2.00 GiB", "host 4 ms"], "of another version: the unit of the suffix"
    assert evidence_text({"gpu_bytes": {4711: 32 * GIB}}) == ["GPU memory by process", "pid 4711 32.00 GiB"]
    assert evidence_text({"own_ms_by_phase": {"forward": 12.5}}) == ["own time by phase", "forward 12 ms"]
    found = evidence_text({"ranks": {"3": {"asleep_s": 31.0, "at": "a.py:3"}}})
    assert found == ["ranks", "rank 3", "asleep for 31 s", "at a.py:3"]
    remedy = {"kind": "fused", "setting": "fused=True", "frees_bytes": GIB, "bound": ""}
    assert evidence_text({"remedies": [remedy]}) == ["what to try set fused=True, frees 1.00 GiB"]
    assert evidence_text({"waiting": "bounded"}) == ["waiting time is bounded"]
    assert evidence_text({"waiting": [0, 2]}) == ["ranks that wait 0, 2"]


def test_what_to_try_is_shown_once_and_control_characters_of_an_alert_never_reach_the_terminal():
    alert = Alert(1, "health", "warning", 0.0, "no labels", text="All are ignored. Look.", evidence={"remedy": "Look."})
    lines = [line.plain.strip() for line in alert_detail(alert, 80, THEME)]
    assert [line for line in lines if "ignored" in line or "Look" in line] == ["All are ignored.", "try: Look."]
    over = Alert(1, "hang", "error", 1000.0, "rank 3 hangs", resolved=1034.0)
    assert "over after 34 s" in alert_line(over, 80, THEME).plain
    alert = Alert(1, "died", "error", 0.0, "rank \x1b[31m0\x07 died", text="bad\x1b]0;x\x07 text")
    text = "".join(line.plain for line in [alert_line(alert, 80, THEME), *alert_detail(alert, 80, THEME)])
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_summary_keeps_its_width_and_says_the_trouble(width: int) -> None:
    summary = Summary("a-very-long-name-of-a-run-that-never-ends", "training", trouble="1 hung, 3 waiting", step=1204,
                      total_steps=9600, seconds_left=8040.0, loss=1.231, losses=tuple(range(50)), peak=37 * GIB,
                      capacity=139 * GIB, tokens_per_second=12_400.0, step_seconds=0.74)  # fmt: skip
    lines = summary_lines(summary, width, THEME)
    assert {line.width for line in lines} == {width}
    assert "1 hung" in lines[0].plain
    assert "1,204" in lines[0].plain


def test_a_run_that_stands_says_so_in_place_of_the_time_left() -> None:
    summary = Summary("llama3", trouble="1 hung", step=44, seconds_left=90, stalled_seconds=34)
    first = summary_lines(summary, 100, THEME)[0]
    assert "stalled 34 s" in first.plain
    assert "left" not in first.plain
    trouble = "no connection: its SSH server does not forward UNIX sockets; it is tried again"
    first = summary_lines(Summary("llama3", step=18, total_steps=120, connection=trouble), 80, THEME)[0].plain
    assert "no connection: its SSH server does" in first
    assert first.rstrip().endswith("… step 18 / 120")


@pytest.mark.parametrize("ranks", [64, 100, 512])
@pytest.mark.parametrize("size", [(60, 12), (80, 16), (200, 51)])
def test_the_heat_map_fits_its_width(ranks: int, size: tuple[int, int]) -> None:
    views = [RankView(rank=rank, device="GPU", state="training", capacity=80, peak=rank % 80) for rank in range(ranks)]
    grid = heat.plan(ranks, *size)
    assert max(line.width for line in heat.heat_map(views, grid, 0, size[1], 0, THEME)) <= size[0]
    if size[0] >= 80:
        assert grid.rows(ranks) * grid.height <= size[1], "all ranks in view"
    hung = [RankView(rank=0, device="GPU", state="hung", capacity=80, peak=40)]
    assert UNICODE.states["hung"] in heat.heat_map(hung, heat.Grid(2, 1, 8), 0, 1, 5, THEME)[0].plain


def test_lines_are_cut_and_padded_by_cells_and_text_is_wrapped_at_blanks_and_long_words_anywhere():
    base = THEME.base
    assert Line("日本語", base).fit(5, base).width == 5
    assert cut("日本語", 4) == "日…"
    assert [cut("1.23e+10", 8, ""), cut("1.23e+10!", 8, ""), cut("日本語", 5, "")] == ["1.23e+10", "1.23e+10", "日本"]
    assert [tail("abc", 2), tail("日本語", 5), tail("日本語", 0)] == ["bc", "本語", ""]
    assert spread(Line("left", base), Line("right", base), 12, base).plain == "left   right"
    assert wrap("one two three", 8) == ["one two", "three"]
    assert wrap("  x = 1", 20) == ["  x = 1"]
    assert wrap("in 日本語のファイル now", 10) == ["in 日本語", "のファイル", "now"]
    assert wrap("", 10) == [""]


@given(st.text("ab 日本\u0301-", max_size=60), st.integers(8, 20))
def test_wrapped_lines_fit_in_their_cells_and_lose_nothing_but_blanks(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert max(width_of(line) for line in lines) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("reasons", "shown"),
    [
        (["power cap"], ""),
        (["application clocks", "sync boost", "display clocks"], ""),
        (["power cap", "thermal (hardware)"], "thermal (hardware)"),
    ],
)
def test_only_what_slows_a_gpu_unintended_is_a_warning(reasons, shown: str) -> None:
    assert throttle_of(DeviceSample("n", "gpu", 0, "H", 0.0, 1, 2, throttle_reasons=reasons)) == shown


def test_a_sparkline_of_nothing_is_blank_of_one_value_level_and_a_figure_without_values_says_so():
    assert spark([], 5, THEME).plain == "     "
    assert spark([1.0, 1.0], 5, THEME).plain == "▄▄"
    assert spark([1.0, None, float("nan"), 2.0], 5, THEME).plain == "▁  █"
    assert "after the first step" in course_lines(Course("loss", "", [], loss, False), (0, 0), 40, 8, THEME)[1].plain
    unknown = course_lines(Course("tokens/s", "", [None, None], count, True), (1, 2), 40, 8, THEME)
    assert "not known" in unknown[1].plain
    assert len(unknown) == 8


@pytest.mark.parametrize("theme", [THEME, Theme(DARK, ASCII), Theme(DARK, color=False)])
def test_the_course_of_a_figure_has_its_present_value_its_scale_and_its_steps(theme: Theme) -> None:
    values = [4.0 - step / 100 for step in range(300)]
    lines = course_lines(Course("loss", "1.010", values, loss, False), (1, 300), 60, 8, theme)
    assert [line.width <= 60 for line in lines] == [True] * 8
    assert (lines[0].plain.split(), lines[1].plain.split()[0]) == (["loss", "1.010"], "4.250")
    assert (lines[6].plain.split()[0], lines[7].plain.split()) == ("0.750", ["1", "300"])
    assert all(line.plain.isascii() for line in lines) or not theme.glyphs.is_ascii


def test_a_new_value_changes_only_the_last_column_of_a_course() -> None:
    before = grouped([float(value) for value in range(130)], 50)
    after = grouped([float(value) for value in range(131)], 50)
    assert before[:-1] == after[: len(before) - 1]
    assert len(after) <= 50
