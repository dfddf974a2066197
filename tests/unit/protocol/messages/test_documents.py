"""The specification names everything the code has: a field cannot be added in silence."""

import math
import re
import sqlite3
from pathlib import Path

import field_tables
import pytest
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import control, hosts, telemetry, wire
from ftmon.protocol.recording import results, schema
from messages import EXAMPLES
from msgspec.structs import replace
from places import DOCS
from streams import Stream, write

PROTOCOL = (DOCS / "protocol.md").read_text()
RECORDING = (DOCS / "recording.md").read_text().split("## Export")[0]  # ``tests/unit/tui/export`` has the rest


def section(heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PROTOCOL, re.M | re.S)
    assert found, f"docs/protocol.md has no heading {heading!r}"
    return found[1]


def rows(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text, re.M)


def test_the_field_tables_are_those_of_the_types() -> None:
    lines, current = PROTOCOL.splitlines(), field_tables.rewritten(PROTOCOL).splitlines()
    stale = [f"- {line}" for line in lines if line not in current] + [
        f"+ {line}" for line in current if line not in lines
    ]
    assert lines == current, "\n".join(["run: python tests/support/field_tables.py", *stale])


def test_it_has_the_header_every_channel_verb_query_and_word_and_the_limits() -> None:
    assert rows(section("The envelope")) == list(wire.Header.__struct_fields__)
    assert all(f"`{name}`" in section("Span") for name in telemetry.Span.__struct_fields__)
    assert f"Version **{wire.VERSION[0]}.{wire.VERSION[1]}**" in PROTOCOL
    assert f"| {wire.VERSION[0]}.{wire.VERSION[1]} |" in section("Change notes")
    channels = section("Parties and channels")
    assert tuple(rows(channels)) == sockets.CHANNELS
    assert rows(section("Verbs")) == [control.name_of(verb) for verb in control.ALL]
    assert rows(section("Queries")) == list(results.RESULTS)
    words = section("Words")
    for kind in (control.RankStateName, control.RunStateName, control.Severity, control.AlertKind):
        assert all(f"`{name}`" in words for name in kind.__args__)
    assert all(f"`{name}`" in words for name in telemetry.PHASES)
    assert f"`SNDHWM` {sockets.SEND_HIGH_WATER:,}" in channels
    assert f"`RCVHWM` {sockets.RECEIVE_HIGH_WATER:,}" in channels
    assert f"`MAXMSGSIZE` {sockets.MAX_MESSAGE_BYTES // 2**20} MiB" in channels
    assert f"{wire.RESTART_LEAP:,}" in PROTOCOL


def test_every_table_and_view_of_a_recording_is_described(tmp_path: Path) -> None:
    connection = sqlite3.connect(write(tmp_path / "r.sqlite", Stream(ranks=2, steps=30).frames()))
    names = connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')").fetchall()
    assert rows(RECORDING) == [name for (name,) in names]
    for (name,) in names:
        row = next(line for line in RECORDING.splitlines() if line.startswith(f"| `{name}` |"))
        for column in connection.execute(f"PRAGMA table_info({name})"):
            general = re.sub(r"^(data|forward|backward|optimizer)_", "PHASE_", column[1])
            assert f"`{column[1]}`" in row or f"`{general}`" in row, f"{name}.{column[1]}"
    assert f"schema {schema.SCHEMA_VERSION}" in RECORDING
    connection.close()


def test_the_examples_for_a_recording_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = list(Stream(ranks=2, steps=50).frames())
    at = max(place for place, frame in enumerate(frames) if isinstance(frame.message, telemetry.Step))
    frames[at] = replace(frames[at], message=replace(frames[at].message, loss=math.nan))
    job = next(message for message in EXAMPLES if isinstance(message, hosts.Job))
    frames.append(wire.Frame(frames[-1].seq + 1, frames[-1].t, job))
    connection = sqlite3.connect(write(tmp_path / "r.sqlite", frames))
    examples = re.findall(r"```sql\n(.*?)```", RECORDING, re.S)
    assert len(examples) >= 4
    for statement in (part for example in examples for part in example.split(";") if part.strip()):
        assert connection.execute(statement).fetchall(), statement
    connection.close()
    for package in ("pandas", "duckdb", "polars"):
        pytest.importorskip(package)
    (tmp_path / "r.sqlite").rename(tmp_path / "recording.sqlite")
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", RECORDING, re.S):
        exec(compile(code, "docs/recording.md", "exec"), {})
