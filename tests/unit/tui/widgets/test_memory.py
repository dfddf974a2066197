"""The views of memory as lines: never wider than asked, bars that add up, nothing a peer sent reaches the terminal."""

from collections.abc import Iterator

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.memory import Cause, Composition, PhaseComposition
from ftmon.protocol.messages.telemetry import AllocatorEvents, AllocatorPhase, StackGroup
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.cli.memory import event_lines
from ftmon.tui.cli.memory import rank_lines as text_lines
from ftmon.tui.model import RunModel
from ftmon.tui.model.oom import SpikeVerdict
from ftmon.tui.model.waterfall import rank_bars
from ftmon.tui.source.base import Connection
from ftmon.tui.widgets import memory
from ftmon.tui.widgets.alerts import alert_detail
from ftmon.tui.widgets.drawing import ASCII, DARK, LIGHT, UNICODE, Line, Theme
from ftmon.tui.widgets.header import Summary, second_line
from ftmon.tui.widgets.plots import bar
from ftmon.tui.widgets.state import summary_of
from models import folded
from peaks import Explained

MIB = 2**20
EVIL = "\x1b[2J\x07\x9bevil\r\n\u202e" + "x" * 300
THEMES = [Theme(), Theme(LIGHT), Theme(DARK, ASCII), Theme(DARK, UNICODE, color=False)]


def model_of(**options: object) -> RunModel:
    return folded(Explained(**options).frames())  # type: ignore[arg-type]


def hostile() -> RunModel:
    model = model_of(ranks=1, steps=4)
    t, seq = model.last_t, model.last_seq
    phase = PhaseComposition(EVIL, 20 * MIB, {"parameters": 15 * MIB, EVIL: 5 * MIB}, -5, -5)
    messages = [
        Composition(0, 99, t, "cuda", [phase], reason="asked", note=EVIL),
        Cause(0, 99, EVIL, t, "spike", 5, [StackGroup(5, 1, [EVIL, f"{EVIL}:3 {EVIL}"])], note=EVIL),
        AllocatorEvents(0, 99, t, [AllocatorPhase(EVIL, 5, host_us=3)], retries=1, reserved_bytes=9),
    ]
    for number, message in enumerate(messages, 1):
        model.apply(Frame(seq + number, t, message))
    return model


def every_line(model: RunModel, width: int, theme: Theme) -> Iterator[Line]:
    for rank in model.ranks.values():
        for phase in ("", "forward", "optimizer"):
            choice = memory.MemoryChoice(phase, unfolded=True)
            fall = memory.fall_of(rank, choice, model.device_of(rank))
            assert fall is not None
            yield memory.memory_title_line(rank, "GPU 0", width, theme)
            yield from memory.head_lines(rank, fall, choice, width, theme)
            yield from memory.body_lines(rank, fall, choice, SpikeVerdict(EVIL[8:], "", "try", 5), "why", width, theme)
        yield memory.title_line(rank, "GPU 0", width, theme)
        yield from memory.phase_lines(rank, width, theme)
        yield from memory.course_lines(rank, width, 2, theme)
        yield from memory.unused_lines(rank, width, 1, theme)
        yield memory.retry_line(rank, width, theme)
    yield from memory.peak_bars(rank_bars(model.ranks.values(), ""), EVIL, 0, 2**37, width, 20, theme)


def is_safe(text: str) -> bool:
    return not any(ord(char) < 32 or 127 <= ord(char) < 160 or char == "\u202e" for char in text)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", [60, 80, 200])
def test_nothing_that_a_rank_sends_is_control_and_no_row_is_wider_than_the_screen(theme, width):
    lines = list(every_line(hostile(), width, theme))
    assert any("evil" in line.plain for line in lines)
    assert all(is_safe(line.plain) for line in lines)
    rank = model_of(ranks=1, steps=8).ranks[0]
    fall = memory.fall_of(rank, memory.MemoryChoice(), None)
    assert fall is not None
    lines = memory.body_lines(rank, fall, memory.MemoryChoice(), None, "", width, theme)
    assert max(line.width for line in lines) <= width


def test_nor_on_the_command_line_or_in_an_alert() -> None:
    model = hostile()
    assert all(is_safe(line) for line in text_lines(model, model.ranks[0]))
    last = model.ranks[0].allocator.last
    assert last is not None
    assert all(is_safe(line) for line in event_lines(last))
    alert = Alert(
        1, "spike", "warning", 1.0, EVIL, rank=0, phase=EVIL, evidence={"remedy": EVIL, "cause_pattern": EVIL}
    )
    cause = model.ranks[0].memory.causes[EVIL]
    assert all(is_safe(line.plain) for line in alert_detail(alert, 80, Theme(), cause, unfolded=True))


@pytest.mark.parametrize("theme", [Theme(), Theme(DARK, ASCII)])
def test_a_bar_is_as_wide_as_its_room_and_never_invisible(theme: Theme) -> None:
    for begin, length in ((0, 1), (0, 1000), (999, 1), (333, 5), (500, 250), (124, 2)):
        line = bar(begin, length, 1000, 40, theme, "accent")
        assert line.width == 40
        marked = any(style.bgcolor != theme.base.bgcolor or text.strip() for text, style in line.parts)
        assert marked, (begin, length)


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("size", [(80, 20), (200, 56)])
def test_bars_of_any_number_of_ranks_fit(ranks: int, size: tuple[int, int]) -> None:
    width, height = size
    bars = rank_bars(model_of(ranks=ranks, steps=2).ranks.values(), "")
    lines = memory.peak_bars(bars, "", ranks - 1, 2**37, width, height, Theme())
    assert len(lines) <= height
    assert all(line.width <= width for line in lines[1:-2])
    groups = memory.grouped(bars, 7)
    assert [bar.rank for group in groups for bar in group] == list(range(ranks))
    assert len(groups) <= 7


def shown(model: RunModel, phase: str, width: int = 80) -> list[str]:
    (rank,) = model.ranks.values()
    choice = memory.MemoryChoice(phase)
    fall = memory.fall_of(rank, choice, model.device_of(rank))
    assert fall is not None
    return [line.plain for line in memory.body_lines(rank, fall, choice, None, "why", width, Theme(), model.prediction)]


def test_a_prediction_stands_beside_each_part_and_one_that_holds_warns_of_nothing():
    lines = shown(model_of(ranks=1, predicted={"activations": 0.5}), "backward", 160)
    head, activations = lines[0], next(line for line in lines if line.startswith(" activations"))
    assert head.split()[:3] == ["GiB", "predicted", "difference"]
    measured, expected, difference = (float(figure) for figure in activations.split()[1:4])
    assert expected == pytest.approx(measured / 2, abs=0.011)
    assert difference == pytest.approx(measured - expected, abs=0.011)
    parameters = next(line for line in lines if line.startswith(" parameters"))
    assert parameters.split()[1:4] == ["0.86", "0.86", "0.00"]
    unused = next(line for line in lines if line.startswith(" unused"))
    assert len(unused[:55].split()) == 4, "of what is outside the peak nothing is predicted"
    (parted,) = [line for line in lines if "more than the expected error of 2 %" in line]
    assert "activations +" in parted
    model = model_of(ranks=1, predicted={})
    lines = " ".join(shown(model, "backward", 160))
    assert "backward 13.49 GiB (measured 0.0 %)" in lines
    assert "expected error" not in lines
    assert "+0.00" not in lines
    assert "\N{MINUS SIGN}0.00" not in lines
    summary = summary_of(model, Connection("live"))
    assert summary.predicted == pytest.approx(summary.peak, rel=0.005)
    assert not summary.parted
    assert "predicted" in second_line(summary, 160, Theme()).plain
    assert "predicted" not in second_line(summary, 80, Theme()).plain


def test_a_narrow_header_leaves_figures_out_whole() -> None:
    summary = Summary("run", loss=7.547, tokens_per_second=15_700.0, step_seconds=0.27, peak=1 << 30, capacity=24 << 30)
    text = second_line(summary, 60, Theme()).plain
    assert "tok/s" in text
    assert " peak 1.00 / 24.00 GiB" in text
    assert len(text) == 60
    assert "ms" not in text


def test_on_a_cpu_and_of_the_first_step_the_screen_says_why_there_is_nothing_to_compare() -> None:
    lines = " ".join(shown(model_of(ranks=1, cuda=False, refused="the ranks train on the CPU"), "backward", 160))
    assert "no prediction to compare: the ranks train on the CPU" in lines
    assert "difference" not in lines
    lines = " ".join(shown(model_of(ranks=1, steps=1, predicted={}), "backward", 160))
    assert "nothing to compare yet" in lines


@pytest.mark.parametrize("cuda", [True, False])
def test_not_attributed_is_grey_and_explained_on_a_cpu_only(cuda: bool) -> None:
    model = model_of(ranks=1, steps=4, cuda=cuda)
    phase = PhaseComposition("backward", 20 * MIB, {"parameters": 15 * MIB, "unattributed": 5 * MIB}, 0, 0)
    measure = "cuda" if cuda else "glibc"
    message = Composition(0, 99, model.last_t, measure, [phase], reason="asked")  # pyright: ignore[reportArgumentType]
    model.apply(Frame(model.last_seq + 1, model.last_t, message))
    rank, choice = model.ranks[0], memory.MemoryChoice("backward")
    fall = memory.fall_of(rank, choice, None)
    assert fall is not None
    lines = memory.body_lines(rank, fall, choice, None, "", 100, Theme())
    row = next(line for line in lines if line.plain.startswith(" not attributed"))
    colors = {one for _, style in row.parts for one in (style.color, style.bgcolor) if one is not None}
    grey = {color.name for color in colors} <= {DARK.background, DARK.text, DARK.parts["untraced"]}
    assert grey is not cuda
    assert any("glibc's malloc, whose allocations are not traced" in line.plain for line in lines) is not cuda
    [bar_of] = rank_bars([rank], "backward")
    assert dict(bar_of.parts)["unattributed" if cuda else "untraced"] == 5 * MIB
