"""A recording in which somebody wrote what no hub writes: the rest of it is read."""

import contextlib
import random
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from eventually import eventually
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.memory import Cause, Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, Failure, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording import opening, salvage
from ftmon.protocol.recording.curves import peak_seq
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.results import PeakMark, PhasePeaks, answer_query, decode_answer
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.cli.main import main
from ftmon.tui.model.rank import highest_bytes
from ftmon.tui.source.replay import ReplaySource
from peaks import Explained
from streams import Stream, write

RANKS, STEPS = 2, 40


@pytest.fixture(scope="module")
def frames() -> list[Frame]:
    return list(Explained(RANKS, STEPS).frames())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, frames: list[Frame]) -> Path:
    return write(tmp_path_factory.mktemp("marks") / "recording.sqlite", frames)


@pytest.fixture
def reader(path: Path) -> Iterator[Reader]:
    with Reader(path) as opened:
        yield opened


def stream(tmp_path: Path) -> tuple[Path, list[Frame]]:
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    return write(tmp_path / "r.sqlite", frames), frames


def expected(frames: list[Frame]) -> list[PeakMark]:
    peaks = {rank: PhasePeaks() for rank in range(RANKS)}
    for frame in frames:
        if isinstance(frame.message, Step):
            peaks[frame.message.rank].see(frame.message)
    found = [mark for rank in range(RANKS) for mark in peaks[rank].marks]
    return sorted(found, key=lambda mark: (mark.rank, mark.step, mark.phase))


def test_the_marks_read_are_those_the_steps_set_one_for_each_size_of_batch_where_a_phase_stays(reader, frames):
    assert reader.marks() == expected(frames)
    assert decode_answer("marks", answer_query(reader, "marks", {})) == reader.marks()
    optimizer = [mark for mark in reader.marks() if mark.rank == 0 and mark.phase == "optimizer"]
    assert len({mark.bytes for mark in optimizer}) == 1
    assert len(optimizer) <= STEPS
    assert len({mark.shape[-1] // 4 for mark in optimizer}) == len(optimizer)


def test_marks_go_on_where_an_earlier_writer_left_off(tmp_path, frames):
    path = tmp_path / "recording.sqlite"
    half = len(frames) // 2
    write(path, frames[:half])
    writer = Writer(path)
    first = writer.next_seq
    for frame in frames[half:]:
        writer.append(first + frame.seq, frame.t, frame.message)
    writer.close()
    with Reader(path) as reader:
        assert reader.marks() == expected(frames)


def test_the_state_at_a_time_explains_the_highest_peak_and_samples_are_spread_to_the_last(reader, frames):
    for t in (frames[len(frames) // 2].t, frames[-1].t):
        so_far = [f.message for f in frames if f.t <= t and isinstance(f.message, Composition) and f.message.rank == 1]
        found = [f.message for f in reader.state_at(t) if isinstance(f.message, Composition) and f.message.rank == 1]
        assert so_far[-1] in found
        assert max(map(highest_bytes, found)) == max(map(highest_bytes, so_far))
        assert len(found) <= 2
    state = [frame.message for frame in reader.state_at(frames[-1].t)]
    assert [message.phase for message in state if isinstance(message, Cause)] == ["optimizer"]
    assert {message.rank: message.step for message in state if isinstance(message, AllocatorEvents)} == {0: 40, 1: 40}
    sampled = reader.sampled("events", 0, 3)
    answer = answer_query(reader, "sampled", {"kind": "events", "rank": 0, "limit": 3})
    assert decode_answer("sampled", answer) == sampled
    steps = [frame.message.step for frame in sampled if isinstance(frame.message, AllocatorEvents)]
    assert (len(steps), steps[-1]) == (3, 40)
    assert steps[0] < 20
    assert reader.sampled("events", 7) == []


def test_marks_are_made_again_for_what_is_left_of_a_damaged_recording(tmp_path, frames):
    path = write(tmp_path / "recording.sqlite", Explained(RANKS, 400).frames())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.8)])
    with Reader(path) as reader:
        assert reader.info().missing
        assert len(reader.marks()) > 20
        assert any(isinstance(frame.message, Composition) for frame in reader.state_at(reader.info().last_t))


def highest(frames: list[Frame], rank: int) -> int | None:
    steps = [
        (each.seq, each.message) for each in frames if isinstance(each.message, Step) and each.message.rank == rank
    ]
    peaks = [(max(phase.peak_span.peak for phase in step.phases), -seq) for seq, step in steps]
    return -max(peaks)[1] if peaks else None


@pytest.mark.parametrize("cuda", [True, False])
def test_the_step_of_the_highest_peak_is_found_at_any_place_of_the_stream(tmp_path, cuda):
    frames = list(Stream(ranks=3, steps=400, cuda=cuda).frames())
    write(tmp_path / "run.sqlite", frames)
    chosen = random.Random(7)
    with Reader(tmp_path / "run.sqlite") as reader:
        for _ in range(60):
            seq, rank = chosen.randrange(len(frames) + 1), chosen.randrange(3)
            assert peak_seq(reader._connection, rank, seq) == highest(frames[:seq], rank)
        assert {highest(frames, rank) for rank in range(3)} <= {each.seq for each in reader.state_at(frames[-1].t)}


FAILURE = Failure(rank=0, step=1, phase="data", time=1.0, error="no", traceback="")


def bomb() -> bytes:
    return zlib.compress(bytes(65 * 2**20))


def many(value: bytes) -> Callable[[], bytes]:
    head = msgspec.msgpack.encode({"type": "command", "id": "x", "verb": "v", "args": {"a": []}})[:-1]
    return lambda: zlib.compress(head + b"\xdd" + (2**21).to_bytes(4, "big") + value * 2**21)


IMPOSSIBLE = msgspec.msgpack.encode({**msgspec.msgpack.decode(wire.encode_body(FAILURE)), "rank": 2**40})


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"x" * 100, zlib.compress(b"\x91" * 1_000), bomb, IMPOSSIBLE, "text", 7, None,
     many(b"\x90"), many(b"\xdc\0\0"), many(b"\xd4\x05\0")],
    ids=["nothing", "no msgpack", "text", "nested", "zeros", "rank 2^40", "a string", "a number", "null",
         "lists", "long lists", "extensions"],
)  # fmt: skip
def test_one_message_that_cannot_be_costs_that_message(tmp_path, body):
    if callable(body):
        body = body()
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    broken = Frame(frames[-1].seq + 1, frames[-1].t, FAILURE)
    write(tmp_path / "r.sqlite", [*frames, broken])
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        connection.execute("UPDATE events SET body = ? WHERE seq = ?", (body, broken.seq))
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=100_000) == frames
        assert reader.state_at(frames[-1].t)
        assert reader.info().steps == 40


@pytest.mark.parametrize("column", ["loss", "host_us", "rest", "started"])
@pytest.mark.parametrize("value", ["text", b"\xff\xff", 9e999, -(2**63)])
def test_one_step_that_cannot_be_ends_nothing(tmp_path, column, value):
    path, frames = stream(tmp_path)
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE steps SET {column} = ? WHERE step = 10", (value,))
    with Reader(path) as reader:
        assert len(reader.frames(limit=100_000)) >= len(frames) - 2
        reader.state_at(frames[-1].t)


AS_ANY_TYPE = """
    PRAGMA writable_schema = ON;
    UPDATE sqlite_master SET sql = replace(sql, 'throttle_reasons TEXT', 'throttle_reasons');
"""
AS_TEXT = AS_ANY_TYPE.replace("reasons TEXT'", "reasons,'").replace("reasons')", "reasons TEXT,')")


@pytest.mark.parametrize(
    "damage",
    [(AS_ANY_TYPE, "UPDATE device_samples SET throttle_reasons = 7", AS_TEXT), ("UPDATE clock SET seq = 9e999",)],
    ids=["a number as a text", "infinite numbers of messages"],
)
def test_samples_and_a_clock_that_cannot_be_end_no_command(tmp_path, damage, capsys):
    path, _ = stream(tmp_path)
    for statements in damage:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.executescript(statements)
            connection.commit()
    assert main(["status", str(path)]) == 0
    assert "step" in capsys.readouterr().out


@pytest.fixture(scope="module")
def costly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with 1,500 messages, believable, of some 200 bytes in the file and ten megabytes in memory."""
    message = {"type": "command", "id": "x", "verb": "v", "args": {"a": [[]] * 190_000}}
    body = zlib.compress(msgspec.msgpack.encode(message))
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    last = frames[-1]
    failures = [Frame(last.seq + number, last.t, FAILURE) for number in range(1, 1_501)]
    path = write(tmp_path_factory.mktemp("costly") / "r.sqlite", [*frames, *failures])
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE events SET body = ? WHERE seq > ?", (body, last.seq))
    return path


@pytest.mark.parametrize("words", [["status"], ["memory"], ["replay", "--plain"], ["stacks"]], ids=" ".join)
def test_a_command_shows_part_of_a_recording_that_costs_too_much_and_says_so(costly, words, capsys, monkeypatch):
    monkeypatch.setattr(opening, "_MESSAGE_SECONDS", 0.05)
    status = main([*words, str(costly)])
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    if words != ["stacks"]:  # there are none in it
        assert status == 0
        assert printed.out
        assert "messages were left out" in printed.err


def test_all_questions_of_a_command_share_what_the_file_justifies(costly, monkeypatch):
    monkeypatch.setattr(opening, "_MESSAGE_SECONDS", 0.05)
    with Reader(costly, once=True) as reader:
        assert 40 < len(reader.frames(limit=100_000)) < 1_500
        begun = time.thread_time()
        answers = [reader.frames(limit=100_000) for _ in range(9)]
        steps = [sum(isinstance(frame.message, Step) for frame in answer) for answer in answers]
        assert time.thread_time() - begun < 5
        assert steps == [40] * 9, "what costs little is read all the same"
        assert "left out" in reader.left_out
    with Reader(costly) as reader:  # of one that stays open each question has its own
        assert min(len(reader.frames(limit=100_000)) for _ in range(2)) > 50


def test_a_recording_that_goes_away_while_it_is_opened_is_a_state(tmp_path, monkeypatch, capfd):
    """Between the look at its header and the next the file is removed, for the overview's thread."""
    path = write(tmp_path / "r.sqlite", list(Stream(ranks=2, steps=20).frames()))
    check, looks = salvage.read_header, list[Path]()

    def checked(name: Path) -> opening.Header:
        header = check(name)
        if name == path:  # another test's overview may still open its own
            looks.append(name)
            if len(looks) == 3:
                name.unlink()
        return header

    monkeypatch.setattr(salvage, "read_header", checked)
    source = ReplaySource(path)  # looks once, the playback's thread again, the overview's a third time
    source.start()
    try:
        transport = source.transport
        eventually(lambda: "removed" in transport.message, "what was removed", each=source.pump, every=0.002)
        assert source.transport.message == f"older history cannot be read: {path}: was removed while it was read"
        assert source.model.ranks
    finally:
        source.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("value", [9e999, -9e999, 1e300, -1.0])
def test_times_that_no_clock_has_are_shown_as_none(tmp_path, capsys, value):
    write(tmp_path / "r.sqlite", list(Stream(ranks=2, steps=5).frames()))
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            if any(row[1] == "t" for row in connection.execute(f"PRAGMA table_info({table})")):
                connection.execute(f"UPDATE {table} SET t = ?", (value,))
    with Reader(tmp_path / "r.sqlite") as reader:
        info = reader.info()
    assert (info.first_t, info.last_t) == (0.0, 0.0)
    for command in ("ls", "status", "memory"):
        assert main([command, str(tmp_path / "r.sqlite")]) in (0, 1, 2)
    assert capsys.readouterr().err.count("\n") <= 3


def test_the_end_is_found_by_its_time_after_the_clock_was_set_back(tmp_path):
    frames = list(Stream(ranks=3, steps=150).frames())
    half = len(frames) // 2
    frames[half:] = [Frame(frame.seq, frame.t - 3600, frame.message) for frame in frames[half:]]
    with Reader(write(tmp_path / "r.sqlite", frames)) as reader:
        info = reader.info()
        assert (info.last_seq, info.steps) == (frames[-1].seq, 450)
        assert reader.seq_at(info.last_t) == info.last_seq
        assert frames[-1] in reader.state_at(info.last_t)
        assert reader.frames(limit=10**6, until_t=info.last_t) == frames
