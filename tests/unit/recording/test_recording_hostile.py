"""A recording in which somebody wrote what no hub writes: the rest of it is read."""

import sqlite3
import zlib
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol import wire
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.telemetry import Failure
from ftmon.protocol.wire import Frame
from streams import Stream, write

FAILURE = Failure(rank=0, step=1, phase="data", time=1.0, error="no", traceback="")
BOMB = zlib.compress(bytes(65 * 2**20))
IMPOSSIBLE = msgspec.msgpack.encode({**msgspec.msgpack.decode(wire.encode_body(FAILURE)), "rank": 2**40})


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", b"x" * 100, zlib.compress(b"\x91" * 1_000), BOMB, IMPOSSIBLE, "text", 7, None],
    ids=["nothing", "no msgpack", "text", "nested", "65 MiB of zeros", "rank 2^40", "a string", "a number", "null"],
)  # fmt: skip
def test_one_message_that_cannot_be_costs_that_message(tmp_path: Path, body: object) -> None:
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    broken = Frame(frames[-1].seq + 1, frames[-1].t, FAILURE)
    write(tmp_path / "r.sqlite", [*frames, broken])
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        connection.execute("UPDATE events SET body = ? WHERE seq = ?", (body, broken.seq))
    with Reader(tmp_path / "r.sqlite") as reader:
        assert reader.frames(limit=100_000) == frames
        assert reader.state_at(frames[-1].t)
        assert reader.info().steps == 40


@pytest.mark.parametrize("column", ["loss", "host_us", "detail", "started"])
@pytest.mark.parametrize("value", ["text", b"\xff\xff", 9e999, -(2**63)])
def test_one_step_that_cannot_be_ends_nothing(tmp_path: Path, column: str, value: object) -> None:
    frames = list(Stream(ranks=2, steps=20, finished=False).frames())
    write(tmp_path / "r.sqlite", frames)
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        connection.execute(f"UPDATE steps SET {column} = ? WHERE step = 10", (value,))
    with Reader(tmp_path / "r.sqlite") as reader:
        assert len(reader.frames(limit=100_000)) >= len(frames) - 2
        reader.state_at(frames[-1].t)
