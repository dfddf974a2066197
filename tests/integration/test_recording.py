"""A recording written and read through real SQLite: exact, small, found by time, shared while it grows."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections import defaultdict
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.messages.control import Alert, Answer, Query
from ftmon.protocol.messages.telemetry import DeviceSample, Heartbeat, LogLine, Step
from ftmon.protocol.messages.wire import RESTART_LEAP, Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from messages import EXAMPLES
from streams import RUN, STARTED, Stream, append, write

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return list(Stream(ranks=4, steps=700, heartbeats=True, spike_every=50).frames())


@pytest.fixture(scope="module")
def recorded(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if not isinstance(frame.message, Heartbeat)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, frames: list[Frame]) -> Path:
    return write(tmp_path_factory.mktemp("recording") / "recording.sqlite", frames)


@pytest.fixture
def reader(path: Path):
    with Reader(path) as opened:
        yield opened


def read_all(reader: Reader) -> list[Frame]:
    found: list[Frame] = []
    while batch := reader.frames(found[-1].seq if found else 0, 777):
        found += batch
    return found


def rank_steps(frames: list[Frame], rank: int) -> list[Frame]:
    return [frame for frame in frames if isinstance(frame.message, Step) and frame.message.rank == rank]


def test_the_stream_comes_back_exactly_and_in_order_also_until_a_time(reader, recorded):
    assert read_all(reader) == recorded
    until = recorded[len(recorded) // 3].t
    expected = [frame for frame in recorded if frame.seq > 100 and frame.t <= until]
    assert reader.frames(100, 10**6, until) == expected


def test_ranks_on_the_cpu_and_every_type_of_message_are_recorded_exactly_but_heartbeats_and_history(tmp_path):
    frames = list(Stream(ranks=2, steps=40, cuda=False).frames())
    with Reader(write(tmp_path / "cpu.sqlite", frames)) as reader:
        assert read_all(reader) == frames
    frames = [Frame(seq, STARTED + seq, message) for seq, message in enumerate(EXAMPLES, 1)]
    with Reader(write(tmp_path / "r.sqlite", frames)) as reader:
        kept = [frame for frame in frames if not isinstance(frame.message, Heartbeat | Query | Answer)]
        assert read_all(reader) == kept


def test_a_rank_step_takes_less_than_570_bytes_with_all_that_goes_with_it(tmp_path):
    path = write(tmp_path / "r.sqlite", Stream(ranks=8, steps=2500, step_s=0.5).frames(), commit_every=20)
    assert path.stat().st_size / 20_000 < 570


def test_info_tells_what_there_is_and_the_command_is_kept_as_json_for_everybody(reader, recorded, path):
    info = reader.info()
    assert (info.run_id, info.name, info.command, info.started) == (RUN.id, RUN.name, RUN.command, RUN.created)
    assert (info.first_seq, info.last_seq) == (recorded[0].seq, recorded[-1].seq)
    assert (info.first_t, info.last_t) == (recorded[0].t, recorded[-1].t)
    assert (info.steps, info.last_step, info.ranks) == (2800, 700, [0, 1, 2, 3])
    assert (info.state, info.exit_code) == ("finished", 0)
    assert (info.complete, info.missing, info.live) == (True, "", False)
    connection = sqlite3.connect(path)
    assert json.loads(dict(connection.execute("SELECT key, value FROM meta"))["command"]) == RUN.command
    assert os.fspath(path)
    connection.close()


def test_a_closed_recording_is_one_file_with_a_view_of_phases_in_plain_units(path, recorded):
    assert not list(path.parent.glob("*-wal"))
    assert not list(path.parent.glob("*-shm"))
    connection = sqlite3.connect(path)
    for frame in random.Random(5).sample(rank_steps(recorded, 3), 20):
        assert isinstance(frame.message, Step)
        rows = connection.execute("SELECT * FROM phases WHERE seq = ?", (frame.seq,)).fetchall()
        assert rows == [
            (
                *(frame.seq, frame.t, 3, frame.message.step, p.name, p.host_us / 1e3, p.device_us / 1e3),
                *(p.allocated.start, p.allocated.end, p.allocated.peak),
                *(p.reserved.start, p.reserved.end, p.reserved.peak),
            )
            for p in frame.message.phases
        ]
    connection.close()


def key_of(frame: Frame) -> object:
    message = frame.message
    if isinstance(message, DeviceSample):
        return (DeviceSample, message.host, message.kind, message.index)
    if isinstance(message, Alert):
        return (Alert, message.id)
    return (type(message), getattr(message, "rank", None))


def test_the_state_at_a_time_is_the_last_of_everything_and_each_ranks_highest_step(reader, recorded):
    draw = random.Random(4)
    for _ in range(25):
        t = draw.uniform(recorded[0].t, recorded[-1].t)
        last: dict[object, Frame] = {}
        highest: dict[int, Frame] = {}
        for frame in recorded:
            if frame.t > t:
                break
            if isinstance(frame.message, LogLine):
                continue
            last[key_of(frame)] = frame
            if isinstance(frame.message, Step):
                best = highest.get(frame.message.rank)
                if best is None or peak(frame) > peak(best):
                    highest[frame.message.rank] = frame
        expected = {frame.seq: frame for frame in (*last.values(), *highest.values())}
        assert reader.state_at(t) == [expected[seq] for seq in sorted(expected)]


def peak(frame: Frame) -> int:
    assert isinstance(frame.message, Step)
    return max(record.peak_span.peak for record in frame.message.phases)


@pytest.mark.parametrize("columns", [1, 7, 60, 400])
def test_memory_is_pooled_by_maximum_and_never_loses_a_spike(reader, recorded, columns):
    draw = random.Random(columns)
    first, last = recorded[0].t, recorded[-1].t
    for t0, t1 in [(first, last), *(sorted(draw.uniform(first, last) for _ in range(2)) for _ in range(6))]:
        width = (t1 - t0) / columns
        expected: dict[tuple[int, int], int] = defaultdict(int)
        spikes: set[tuple[int, int]] = set()
        for frame in recorded:
            if not t0 <= frame.t <= t1:
                continue
            column = min(int((frame.t - t0) / width), columns - 1)
            if isinstance(frame.message, Step):
                key = (frame.message.rank, column)
                expected[key] = max(expected[key], peak(frame))
            elif isinstance(frame.message, Alert) and frame.message.rank is not None:
                spikes.add((frame.message.rank, column))
        found = reader.memory(t0, t1, columns)
        assert {(column.rank, column.index): column.allocated_peak for column in found} == expected
        assert {(column.rank, column.index) for column in found if column.spike} == spikes & set(expected)


def test_a_long_window_is_pooled_from_rollups_and_each_peak_stays_in_its_column(tmp_path):
    frames = list(Stream(ranks=1, steps=10_000, step_s=0.05, devices=False).frames())
    with Reader(write(tmp_path / "r.sqlite", frames)) as reader:
        t0, t1 = frames[0].t, frames[-1].t
        found = {column.index: column.allocated_peak for column in reader.memory(t0, t1, 50)}
    true: dict[int, list[int]] = defaultdict(list)
    for frame in rank_steps(frames, 0):
        true[min(int((frame.t - t0) / ((t1 - t0) / 50)), 49)].append(peak(frame))
    assert set(found) == set(range(50))
    assert all(found[index] in true[index] for index in found)
    highest = max(true, key=lambda index: max(true[index]))
    assert found[highest] == max(true[highest])
    # A pooled row at a column's edge counts once, where its highest step was: nearly every column has its own maximum.
    assert sum(found[index] == max(true[index]) for index in found) >= 45


def test_a_series_has_every_step_when_they_are_few(reader, recorded):
    t0, t1 = recorded[0].t + 20, recorded[0].t + 60
    expected = [f for f in rank_steps(recorded, 2) if t0 <= f.t <= t1]
    points = reader.series(2, t0, t1, 500)
    assert [(point.t, point.step, point.count) for point in points] == [(f.t, f.message.step, 1) for f in expected]
    for point, frame in zip(points, expected, strict=True):
        assert isinstance(frame.message, Step)
        assert (point.host_ms, point.allocated_peak) == (frame.message.host_us / 1e3, peak(frame))


@pytest.mark.parametrize("limit", [1, 10, 100])
def test_a_pooled_series_keeps_the_sums_and_the_maxima(reader, recorded, limit):
    steps = rank_steps(recorded, 1)
    points = reader.series(1, recorded[0].t, recorded[-1].t, limit)
    assert len(points) <= limit
    assert sum(point.count for point in points) == len(steps)
    assert max(point.allocated_peak for point in points) == max(peak(frame) for frame in steps)
    total = sum(frame.message.host_us for frame in steps) / 1e3
    assert sum(point.host_ms * point.count for point in points) == pytest.approx(total)
    assert points[-1].step == 700


def test_a_step_is_found_by_number_and_seq_at_is_the_last_message_there_was(reader, recorded):
    for number in (1, 2, 16, 17, 128, 399, 689, 700):
        expected = max(f.t for f in recorded if isinstance(f.message, Step) and f.message.step == number)
        assert reader.step_time(number) == expected
    assert reader.step_time(701) is None
    assert reader.step_time(0) is None
    draw = random.Random(3)
    times = [draw.uniform(recorded[0].t - 1, recorded[-1].t + 1) for _ in range(100)]
    for t in [*times, *(frame.t for frame in draw.sample(recorded, 100)), float("inf")]:
        seq = reader.seq_at(t)
        last = max((frame.seq for frame in recorded if frame.t <= t), default=0)
        # Heartbeats are numbered and not recorded: the answer may lie among those that follow.
        assert last <= seq < min((frame.seq for frame in recorded if frame.t > t), default=1 << 60)
    assert (reader.seq_at(recorded[0].t - 1), reader.seq_at(float("-inf"))) == (0, 0)


def test_alerts_stand_as_they_did(tmp_path):
    writer = Writer(tmp_path / "r.sqlite")
    raised = Alert(id=1, kind="hang", severity="error", time=100.0, title="rank 1 hung 34 s")
    other = Alert(id=2, kind="spike", severity="warning", time=105.0, title="spike")
    resolved = msgspec.structs.replace(raised, resolved=110.0, count=2)
    for seq, (t, alert) in enumerate([(100.0, raised), (105.0, other), (110.0, resolved)], 1):
        writer.append(seq, t, alert)
    writer.close()
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.alerts() == [resolved, other]
        assert reader.alerts(t1=107.0) == [raised, other]
        assert reader.alerts(t0=101.0) == [other]


def test_logs_are_found_backwards_by_rank_and_text(tmp_path):
    writer = Writer(tmp_path / "r.sqlite")
    lines = [LogLine(rank=n % 3, time=float(n), stream="out", text=f"Line {n} is 100%_done") for n in range(30)]
    for seq, line in enumerate(lines, 1):
        writer.append(seq, line.time, line)
    writer.close()
    with Reader(tmp_path / "r.sqlite") as reader:
        assert [f.message for f in reader.logs()] == lines
        assert [f.message for f in reader.logs(limit=4)] == lines[-4:]
        assert [f.message for f in reader.logs(before_seq=11, limit=3)] == lines[7:10]
        assert [f.message for f in reader.logs(rank=1)] == lines[1::3]
        assert [f.message for f in reader.logs(text="line 7")] == [lines[7]]
        assert len(reader.logs(text="0%_d")) == 30
        assert reader.logs(text="0%d") == []


def test_an_empty_recording_answers_everything(tmp_path):
    Writer(tmp_path / "r.sqlite").close()
    with Reader(tmp_path / "r.sqlite") as reader:
        assert (reader.info().steps, reader.info().first_t, reader.info().ranks) == (0, 0.0, [])
        assert reader.frames() == reader.state_at(1.0) == reader.memory(0, 1, 5) == reader.series(0, 0, 1) == []
        assert (reader.seq_at(5.0), reader.step_time(1), reader.alerts(), reader.logs()) == (0, None, [], [])


def test_a_second_writer_continues_where_the_first_ended_and_leaves_out_numbers_of_heartbeats(tmp_path, frames, path):
    target = tmp_path / "r.sqlite"
    for part in (frames[:4001], frames[4001:9000], frames[9000:]):
        write(target, part)
    with Reader(target) as reader:
        assert read_all(reader) == [frame for frame in frames if not isinstance(frame.message, Heartbeat)]
        assert reader.info().complete
    query = "SELECT * FROM rollups"
    whole, parts = (sqlite3.connect(file).execute(query).fetchall() for file in (path, target))
    assert parts == whole, "pooled rows do not depend on how often the hub was restarted"
    write(tmp_path / "r.sqlite", Stream(ranks=1, steps=3).frames())
    writer = Writer(tmp_path / "r.sqlite")
    assert writer.next_seq == writer.last_seq + RESTART_LEAP
    writer.close()


CHILD = f"""
import sys; sys.path.insert(0, {str(SUPPORT)!r})
from streams import RUN, Stream
from ftmon.protocol.recording.writer import Writer
writer = Writer(sys.argv[1], RUN)
for count, frame in enumerate(Stream(ranks=2, steps=10**6).frames(), 1):
    writer.append(frame.seq, frame.t, frame.message)
    if count % 50 == 0:
        writer.commit()
        print(frame.seq, flush=True)
        sys.stdin.readline()
"""


def writing_child(path: Path) -> "subprocess.Popen[str]":
    arguments = [sys.executable, "-c", CHILD, str(path)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def next_commit(child: "subprocess.Popen[str]", *, go_on: bool = True) -> int:
    seq = int(child.stdout.readline())
    if go_on:
        child.stdin.write("\n")
        child.stdin.flush()
    return seq


def test_a_killed_writer_loses_nothing_it_committed_and_the_file_says_it_was_not_closed(tmp_path):
    path = tmp_path / "r.sqlite"
    child = writing_child(path)
    try:
        for _ in range(19):
            next_commit(child)
        committed = next_commit(child, go_on=False)
        with Reader(path) as reader:
            assert (reader.info().live, reader.info().complete, reader.info().missing) == (True, False, "")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(200)
    with Reader(path) as reader:
        assert read_all(reader)[-1].seq == committed
        info = reader.info()
        assert (info.live, info.complete) == (False, False)
        assert info.missing.startswith("it was not closed properly")
    writer = Writer(path)
    writer.append(writer.next_seq, STARTED + 9999, LogLine(rank=0, time=1.0, stream="out", text="again"))
    writer.close()
    with Reader(path) as reader:
        assert [frame.seq for frame in read_all(reader)[-2:]] == [committed, writer.next_seq]
        assert reader.info().complete


def test_an_answer_is_of_one_moment_though_a_commit_comes_between_its_reads(tmp_path):
    frames = list(Stream(ranks=2, steps=40).frames())
    writer = Writer(tmp_path / "r.sqlite", RUN)
    rest = iter(frames)

    def commit_some(_statement: str = "") -> None:
        append(writer, islice(rest, 7))
        writer.commit()

    commit_some()
    with Reader(writer.path) as reader:
        reader._connection.set_trace_callback(commit_some)
        seen = read_all(reader)
        reader._connection.set_trace_callback(None)
        seen += reader.frames(seen[-1].seq, 10**6)
    writer.close()
    assert [frame.seq for frame in seen] == [frame.seq for frame in frames]


def test_readers_in_other_threads_see_a_growing_recording(tmp_path):
    path = tmp_path / "r.sqlite"
    child = writing_child(path)
    try:
        next_commit(child)
        reader = Reader(path)
        errors: list[BaseException] = []
        done = threading.Event()

        def read() -> None:
            try:
                while not done.is_set():
                    info = reader.info()
                    reader.state_at(info.last_t)
                    reader.memory(info.first_t, info.last_t, 50)
                    reader.series(0, info.first_t, info.last_t, 50)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        seen = [0]
        for _ in range(40):
            seq = next_commit(child, go_on=False)
            seen += [frame.seq for frame in reader.frames(seen[-1], 10**6)]
            assert seen[-1] == seq, "what was committed is there at once"
            child.stdin.write("\n")
            child.stdin.flush()
        done.set()
        for thread in threads:
            thread.join(200)
        assert seen[1:] == list(range(1, seen[-1] + 1))
        assert errors == []
        reader.close()
    finally:
        child.kill()
        child.wait(200)


def test_columns_and_tables_of_a_later_minor_version_do_not_hurt(path, tmp_path, recorded):
    later = Path(shutil.copy(path, tmp_path / "later.sqlite"))
    connection = sqlite3.connect(later)
    for table in ("steps", "device_samples", "alerts", "logs", "ranks", "events", "rollups"):
        connection.execute(f"ALTER TABLE {table} ADD COLUMN colour TEXT DEFAULT 'blue'")
    connection.execute("CREATE TABLE holograms(seq INTEGER PRIMARY KEY)")
    connection.execute(
        "INSERT INTO events VALUES (10000000, 1.0, 'hologram', 0, x'81a474797065a8686f6c6f6772616d', '')"
    )
    connection.commit()
    connection.close()
    with Reader(path) as before, Reader(later) as after:
        assert read_all(after) == recorded
        t = recorded[-1].t
        assert after.state_at(t) == before.state_at(t)
        assert after.memory(t - 100, t, 20) == before.memory(t - 100, t, 20)
        assert after.series(0, t - 100, t) == before.series(0, t - 100, t)
        assert after.alerts() == before.alerts()
