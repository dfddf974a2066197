"""A recording of schema 1, which the Writer of commit c144ba7 wrote (2 ranks, 40 steps), is read by today's code."""

import gzip
import json
import os
import re
import sqlite3
import time
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.errors import RecordingError
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.opening import Guard
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.schema import SCHEMA_VERSION, expected_tables
from ftmon.protocol.recording.writer import Writer
from ftmon.tui.cli.main import main
from places import DATA
from streams import Stream, write

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT"
HUGE = "printf('%.*c', 900000000, 'x')"
QUICK = 5.0
"""Seconds of processor time: no command may take longer on a small file."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "r.sqlite", list(Stream(ranks=2, steps=40).frames()))


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA legacy_alter_table=ON")
    for statement in statements:
        connection.execute(statement)
    connection.close()


def endless(table: str, value: str) -> str:
    columns = ", ".join(f'{value} AS "{name}"' for name, *_ in expected_tables(SCHEMA_VERSION)[table])
    return f"CREATE VIEW {table} AS {ENDLESS} {columns} FROM r"


def read_all(path: Path) -> None:
    with Reader(path) as reader:
        info = reader.info()
        reader.state_at(info.last_t)
        reader.frames(limit=10_000)
        reader.logs()
        reader.memory(info.first_t, info.last_t, 50)
        reader.marks()
        reader.alerts()


@pytest.mark.parametrize("table", ["meta", "steps", "logs", "events", "rollups", "clock", "gaps", "marks"])
@pytest.mark.parametrize("value", ["n", HUGE], ids=["endless", "huge"])
def test_a_view_in_the_place_of_a_table_is_refused_before_it_runs(path, table, value):
    change(path, f"DROP TABLE {table}", endless(table, value))
    begun = time.thread_time()
    with pytest.raises(RecordingError, match=f"refused: '{table}' in it is a view, not a table"):
        read_all(path)
    assert time.thread_time() - begun < 1


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["DROP TABLE logs", "CREATE VIRTUAL TABLE logs USING fts5(text)"], "is a virtual, not a table"),
        (
            ["DROP TABLE logs", f"CREATE TABLE logs(seq INTEGER PRIMARY KEY, t REAL, rank AS ({HUGE}))"],
            "its table 'logs' has other columns than a recording's",
        ),
        (["ALTER TABLE logs RENAME COLUMN text TO words"], "its table 'logs' has other columns"),
        (["DROP TABLE logs", "CREATE TABLE logs(seq, t, rank, time, stream, text)"], "'logs' has other columns"),
    ],
    ids=["virtual", "generated", "renamed", "untyped"],
)  # fmt: skip
def test_what_no_recording_has_is_named_in_one_line(path, statements, words):
    change(path, *statements)
    with pytest.raises(RecordingError, match=rf"^{re.escape(str(path))}: refused: [^\n]*{words}[^\n]*$"):
        read_all(path)


def test_a_view_called_a_table_is_not_read_and_what_is_not_read_is_no_obstacle(path):
    change(path, "CREATE INDEX by_step ON steps(step)", "CREATE VIEW mine AS SELECT step, loss FROM steps")
    change(path, "CREATE TRIGGER t AFTER INSERT ON logs BEGIN DELETE FROM logs; END")
    change(path, "DROP VIEW phases", f"CREATE VIEW phases AS {ENDLESS} n FROM r")
    change(path, "CREATE VIRTUAL TABLE words USING fts5(text)")
    before = path.read_bytes()
    read_all(path)
    assert path.read_bytes() == before
    view = endless("logs", "n").replace("'", "''")
    planted = f"UPDATE sqlite_schema SET sql = '{view}', rootpage = 0 WHERE name = 'logs'"
    change(path, "PRAGMA writable_schema=ON", planted)
    begun = time.thread_time()
    with Reader(path) as reader:
        assert reader.logs() == []
        assert "only the parts that are whole were read" in reader.info().missing
    assert time.thread_time() - begun < QUICK


def test_a_value_as_large_as_a_file_cannot_be_is_never_made(path):
    change(path, "UPDATE logs SET text = zeroblob(40000000) WHERE seq = (SELECT min(seq) FROM logs)")
    read_all(path)
    with Reader(path) as reader:
        assert reader.logs()
        assert "damaged" in reader.info().missing


@pytest.mark.parametrize("damage", ["repeated", "shifted"])
def test_pages_in_a_wrong_place_are_read_in_part_and_soon(path, damage):
    """Salvage went from a row back to one that it had passed, for ever."""
    whole = path.read_bytes()
    page = int.from_bytes(whole[16:18], "big")
    for at in range(2 * page, len(whole) - page, page):
        repeated = whole[:at] + whole[at - page : at] + whole[at + page :]
        path.write_bytes(repeated if damage == "repeated" else whole[: at + 100] + whole[at + 107 :])
        begun = time.thread_time()
        with Reader(path) as reader:
            frames = reader.frames(limit=10_000)
            reader.info()
        assert time.thread_time() - begun < QUICK
        assert [frame.seq for frame in frames] == sorted({frame.seq for frame in frames})


def test_an_index_out_of_order_does_not_lead_in_a_circle(path):
    """The ranks are found by hopping through an index: what it gives must ascend."""
    with Reader(path) as reader:
        page = reader._connection.execute("PRAGMA page_size").fetchone()[0]
        root = reader._connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'steps_rank'").fetchone()[0]
    data = bytearray(path.read_bytes())
    at = (root - 1) * page
    cells = int.from_bytes(data[at + 3 : at + 5], "big")
    first = at + 8 + (4 if data[at] == 2 else 0)
    pointers = [data[first + 2 * cell : first + 2 * cell + 2] for cell in range(cells)]
    data[first : first + 2 * cells] = b"".join(reversed(pointers))
    path.write_bytes(data)
    begun = time.thread_time()
    with Reader(path) as reader:
        assert reader.info().ranks == [0, 1]
    assert time.thread_time() - begun < QUICK


def test_a_query_ends_when_its_time_is_spent(tmp_path):
    guard = Guard(tmp_path / "r.sqlite", seconds=0.3)
    connection = guard.harden(sqlite3.connect(":memory:"))
    guard.begin()
    with pytest.raises(sqlite3.OperationalError) as ended:
        connection.execute(f"{ENDLESS} count(*) FROM r").fetchone()
    with pytest.raises(RecordingError, match=r"a question took more than 0\.3 s of processor time"):
        guard.raise_limit(ended.value)


@pytest.mark.parametrize("kind", ["fifo", "log"])
def test_a_pipe_is_refused_before_it_is_opened(path, kind):
    place = path if kind == "fifo" else Path(f"{path}-wal")
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with pytest.raises(RecordingError, match="is not a regular file"):
        Reader(path)


PACKED = DATA / "recording_before_0_2.sqlite.gz"
STEPS = "95ca67382197fe18dde48bce3ce6d9648c7de1a6e00d57d678bc80fa6d1b5a56"
"""SHA-256 of its steps in msgpack, as read by the code of schema 1."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "recording.sqlite"
    path.write_bytes(gzip.decompress(PACKED.read_bytes()))
    return path


def test_commands_show_its_state_steps_alerts_and_the_cause_of_a_spike(old, capsys):
    def printed(*words: str) -> str:
        assert main([words[0], str(old), *words[1:]]) == 0
        return capsys.readouterr().out

    found = json.loads(printed("status", "--json"))
    assert (found["state"], found["exit_code"], found["world_size"]) == ("finished", 0, 2)
    assert (found["step"], found["total_steps"]) == (40, 40)
    assert printed("status").count("warning: rank 1 optimizer +0.9 GiB for 4 ms") == 4
    memory = printed("memory")
    assert "highest peak: 37.20 GiB in backward, step 10" in memory
    assert "1.00 GiB  x2      _multi_tensor_adamw  adamw.py:500" in memory
    lines = printed("replay", "--plain").splitlines()
    assert "step 40/40  loss 2.8328" in lines[-3]
    assert sum("spike: rank 1 optimizer" in line for line in lines) == 4
    assert lines[-1].endswith("finished")


def test_every_step_of_it_is_read_exactly_and_it_is_neither_changed_nor_continued(old):
    before = old.read_bytes()
    with Reader(old) as reader:
        assert reader.marks()
        assert not reader.jobs()  # a table that it lacks counts as empty
        info, frames = reader.info(), reader.frames(limit=10_000)
    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
    assert (info.schema, info.missing, len(steps)) == (1, "", 80)
    assert sha256(msgspec.msgpack.encode(steps)).hexdigest() == STEPS
    with pytest.raises(RecordingError, match="has recording schema 1, this ftmon writes 3; move it out of the way"):
        Writer(old)
    assert old.read_bytes() == before
    os.truncate(old, len(before) * 9 // 10)
    with Reader(old) as reader:
        left = reader.frames(limit=10_000)
        assert reader.info().missing.startswith("the file is cut short: ")
    assert left
    assert all(frame in frames for frame in left)
