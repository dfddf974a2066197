import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.errors import RecordingError, UsageError
from ftmon.protocol.messages import control
from ftmon.protocol.messages.control import Alert, RunState
from ftmon.protocol.messages.telemetry import Hello
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from ftmon.tui.source import replay as playback
from ftmon.tui.source.base import Source
from ftmon.tui.source.load import Overview, read_overview
from ftmon.tui.source.replay import Position, ReplaySource, parse
from models import folded
from streams import Stream, write

FIRST = datetime(2026, 3, 1, 22, 0, 0).timestamp()
LAST = datetime(2026, 3, 2, 4, 0, 0).timestamp()
NOW = datetime(2026, 3, 1, 23, 30, 0).timestamp()


def at(text: str) -> Position:
    return parse(text, NOW, FIRST, LAST)


@pytest.mark.parametrize("text", ["812", " 812 ", "step 812", "#812", "8_12", "8,12"])
def test_a_bare_number_is_a_step(text):
    assert at(text) == Position(step=812)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("+90s", NOW + 90), ("-2m", NOW - 120), ("+1h30m", NOW + 5400), ("+10", NOW + 10)),  # from the position
        *(("-9d", FIRST), ("+9d", LAST)),  # but not outside the recording
        *(("50%", (FIRST + LAST) / 2), ("100%", LAST)),
        ("23:45", datetime(2026, 3, 1, 23, 45).timestamp()),  # of the day that puts it inside
        ("03:10:20", datetime(2026, 3, 2, 3, 10, 20).timestamp()),
        ("2026-03-02 01:00", datetime(2026, 3, 2, 1).timestamp()),
    ],
)
def test_a_jump_a_share_and_a_time_are_a_place_in_the_recording(text, expected):
    assert at(text).time == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "soon", "25:00", "12:61", "+", "%", "-", "1.5", "12:03:10:4"])
def test_anything_else_is_refused_with_what_can_be_typed(text):
    with pytest.raises(UsageError, match=r"type 812"):
        at(text)


FRAMES = list(Stream(ranks=2, steps=300).frames())
RAISED: dict[int, float] = {}
for _frame in FRAMES:
    if isinstance(_frame.message, Alert):
        RAISED.setdefault(_frame.message.id, _frame.t)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("replay") / "run.sqlite", FRAMES)


@pytest.fixture
def opened() -> Iterator[Callable[..., ReplaySource]]:
    """Open replays of frames or recordings, which are closed after the test."""
    made: list[ReplaySource] = []

    def replay(path: Path, start: bool = True) -> ReplaySource:
        made.append(ReplaySource(path))
        if start:
            made[-1].start()
        return made[-1]

    yield replay
    for each in made:
        each.close()


@pytest.fixture
def source(recording: Path, opened: Callable[..., ReplaySource]) -> ReplaySource:
    replay = opened(recording)
    pump(replay, lambda: replay.model.last_seq > 0)
    return replay


def pump(source: Source, until: Callable[[], bool]) -> None:
    eventually(until, "what was to be shown", each=source.pump, every=0.002)


def wait(until: Callable[[], bool]) -> None:
    """Wait for the playback's thread, and take nothing of what it hands over."""
    eventually(until, "the playback's thread", every=0.002)


def speed(source: ReplaySource, levels: int) -> None:
    """Play faster, or slower if negative, by levels of twice the speed."""
    for _ in range(abs(levels)):
        source.transport.faster() if levels > 0 else source.transport.slower()


def settle(source: Source) -> None:
    pump(source, lambda: not source.transport.seeking)


def go(source: ReplaySource, place: str) -> None:
    source.transport.goto(place)
    settle(source)


def folded_until(t: float, frames: list[Frame] = FRAMES) -> RunModel:
    """Fold up to the last message of a time; what came before it may be of a moment later."""
    return folded(frames[: max((frame.seq for frame in frames if frame.t <= t), default=0)])


def same(source: Source, frames: list[Frame] = FRAMES) -> None:
    """What is shown is what folding everything up to the position shows."""
    expected = folded_until(source.transport.position, frames)
    model = source.model
    assert model.last_seq == expected.last_seq
    for name in ("step", "loss", "state", "peak"):
        assert getattr(model, name) == getattr(expected, name)
    assert list(model.alerts) == list(expected.alerts)


def test_a_replay_begins_when_the_ranks_are_there_and_holds_and_takes_no_commands(source):
    hellos = [frame for frame in FRAMES if isinstance(frame.message, Hello)]
    transport = source.transport
    assert (transport.mode, source.connection.state, transport.playing) == ("replay", "replay", False)
    assert (transport.first, transport.position, transport.last) == (FRAMES[0].t, hellos[-1].t, FRAMES[-1].t)
    assert len(source.model.ranks) == len(hellos)
    record = source.commands[source.send(control.Kill())]
    assert record.done
    assert not record.accepted.ok
    assert not source.can_command


def test_a_seek_before_the_marks_were_taken_does_not_lose_them(recording, opened):
    source = opened(recording)
    playback = source._playback
    wait(lambda: bool(playback._marks))
    source.transport.goto("50%")
    wait(lambda: playback._handled == 1)
    settle(source)
    assert [mark.alert_id for mark in source.transport.marks] == sorted(RAISED)
    assert (source.transport.first, source.transport.last) == (FRAMES[0].t, FRAMES[-1].t)


def test_every_press_of_a_speed_key_counts_however_quick_and_does_not_end_the_wait_for_a_place(source):
    source.transport.goto("50%")
    speed(source, 4)
    assert source.transport.seeking
    pump(source, lambda: source.transport.speed > 8)
    assert source.transport.speed == 16
    speed(source, -20)
    pump(source, lambda: source.transport.speed < 0.5)
    assert source.transport.speed == 0.25


def test_playing_at_64x_moves_64_seconds_a_second(tmp_path, opened):
    # Long enough that a stalled machine does not play it to the end.
    frames = list(Stream(ranks=1, steps=1500).frames())
    source = opened(write(tmp_path / "run.sqlite", frames))
    transport = source.transport
    pump(source, lambda: source.model.last_seq > 0)
    begun = time.monotonic()
    speed(source, 6)
    transport.play()
    pump(source, lambda: transport.position > transport.first + 40)
    moved, took = transport.position - transport.first, time.monotonic() - begun
    assert transport.playing
    assert moved < 64 * (took + 1)
    transport.pause()
    pump(source, lambda: not transport.playing)
    same(source, frames)


def test_playing_to_the_end_holds_there_and_shows_what_was_seen_live(source):
    source.transport.goto("90%")
    speed(source, 6)
    source.transport.play()
    settle(source)
    pump(source, lambda: source.transport.at_end and not source.transport.playing)
    pump(source, lambda: source.model.last_seq == FRAMES[-1].seq)  # the last frames come in parts where it is slow
    live = folded_until(FRAMES[-1].t)
    assert source.model.state == live.state == "finished"
    assert source.model.ranks[1].timeline.window(60, live.now) == live.ranks[1].timeline.window(60, live.now)
    same(source)


def test_an_overview_that_comes_while_it_plays_adds_the_past_and_changes_nothing_shown(tmp_path, opened, monkeypatch):
    reading = threading.Event()

    def read_late(*args: Any) -> Overview:
        assert reading.wait(200)
        return read_overview(*args)

    monkeypatch.setattr(playback, "read_overview", read_late)
    # Long enough that a stalled machine does not play it to the end.
    source = opened(write(tmp_path / "run.sqlite", Stream(ranks=2, steps=1000).frames()))
    transport = source.transport
    go(source, "70%")
    begun = transport.position
    speed(source, 3)
    transport.play()
    pump(source, lambda: transport.position > begun + 60)
    speed(source, -5)
    pump(source, lambda: transport.speed == 0.25)
    # What the steps under way will add to the last seconds is not shown yet.
    rank, end = source.model.ranks[1], transport.position - 5
    shown, first = rank.timeline.window(110, end), source.model.moments[0].first_step
    assert (rank.timeline.start or 0) > transport.first
    assert first > 1
    reading.set()
    pump(source, lambda: source.model.moments[0].first_step < first)
    rank = source.model.ranks[1]
    assert rank.timeline.window(110, end) == shown
    assert rank.timeline.start == transport.first
    points = source.model.moments
    assert points[0].first_step <= 2, "the past comes two steps to a point"
    assert rank.last.step - 2 <= sum(point.steps for point in points) <= rank.last.step, "no step counts twice"


def test_a_jump_lands_there_one_to_nowhere_moves_nothing_and_play_at_the_end_begins_again(source):
    transport = source.transport
    middle = (transport.first + transport.last) / 2
    for text, place in (("50%", middle), ("+5s", middle + 5), ("0%", transport.first)):
        go(source, text)
        assert transport.position == pytest.approx(place, abs=1e-3)
        same(source)
    for text in ("99999", "tomorrow"):
        go(source, text)
        assert transport.message
        assert transport.position == pytest.approx(transport.first, abs=1e-3)
    go(source, "100%")
    transport.play()
    settle(source)
    assert transport.playing
    assert transport.position - transport.first < 0.1 * (transport.last - transport.first)


def test_steps_forward_and_back_move_by_one_step_and_a_held_key_counts_every_press(source):
    source.transport.goto("100")
    for count, step in ((0, 100), (1, 101), (-1, 100)):
        if count:
            source.transport.step(count)
        settle(source)
        assert source.model.step == step
    same(source)
    source.transport.goto("100")
    for _ in range(5):
        source.transport.step(-1)
    for _ in range(3):
        source.transport.skip(10)
    settle(source)
    expected = next(frame.t for frame in FRAMES if getattr(frame.message, "step", 0) == 95)
    assert source.transport.position == pytest.approx(expected + 30, abs=0.1)
    same(source)


def test_alerts_are_visited_in_order_each_as_it_was_raised(source):
    transport = source.transport
    pump(source, lambda: bool(transport.marks))
    assert [mark.alert_id for mark in transport.marks] == sorted(RAISED)
    seen: list[float] = []
    for _ in RAISED:
        transport.next_alert()
        settle(source)
        seen.append(transport.position)
        assert len(source.model.alerts) == len(seen)
        same(source)
    assert seen == [RAISED[number] for number in sorted(RAISED)]
    transport.next_alert()
    settle(source)
    assert transport.message == "no alert after this"
    transport.previous_alert()
    settle(source)
    assert transport.position == seen[-2]
    first = transport.first_alert("spike")
    transport.to_alert(first.alert_id)
    settle(source)
    assert transport.position == RAISED[first.alert_id]
    assert transport.first_alert("oom") is None


def test_an_empty_recording_opens_and_a_file_that_is_none_is_refused_at_once(tmp_path, opened):
    source = opened(write(tmp_path / "empty.sqlite", []))
    go(source, "50%")
    assert source.model.ranks == {}
    (tmp_path / "notes.txt").write_text("not a recording, and long enough to be looked at as one would be looked at")
    for name in ("notes.txt", "missing.sqlite"):
        with pytest.raises(RecordingError):
            ReplaySource(tmp_path / name)


def test_a_replay_of_a_failed_run_begins_at_its_end_and_says_so(tmp_path):
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    end = RunState("failed", frames[-1].t + 2, "rank 1 was killed by SIGKILL", 137)
    path = write(tmp_path / "failed.sqlite", [*frames, Frame(frames[-1].seq + 1, end.time, end)])
    replay = ReplaySource(path)
    assert replay.transport.at_end
    assert "failed" in replay.transport.message
    assert not ReplaySource(path, start=frames[0].t).transport.message
