"""The specification names everything the code has: a field cannot be added in silence."""

import re
import sqlite3
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol import blocks, control, hosts, join, keys, memory, oom, process, rundir, sockets, telemetry, wire
from ftmon.protocol.recording import results, schema
from streams import Stream, write

DOCS = Path(__file__).parents[3] / "docs"
PROTOCOL = (DOCS / "protocol.md").read_text()
RECORDING = (DOCS / "recording.md").read_text()

PARTS = (
    telemetry.DeviceInfo,
    telemetry.SelfDump,
    telemetry.PhaseRecord,
    telemetry.AllocatorPhase,
    telemetry.ProcessMemory,
    memory.PhaseComposition,
    memory.StackGroup,
    blocks.SegmentUse,
    oom.OomVerdict,
    oom.Mend,
    oom.RankMoment,
    rundir.RunFile,
    rundir.HubFile,
    rundir.ExitFile,
    process.ProcessId,
    hosts.KernelKill,
    hosts.ProcessState,
    join.JoinFile,
    results.RecordingInfo,
    results.MemoryColumn,
    results.StepPoint,
)


def section(heading: str) -> str:
    """Give the text under one heading, down to the next one."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", PROTOCOL, re.M | re.S)
    assert found, f"docs/protocol.md has no heading {heading!r}"
    return found[1]


def rows(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \|", text, re.M)


@pytest.mark.parametrize("struct", wire.MESSAGE_TYPES, ids=lambda struct: struct.__name__)
def test_every_message_has_a_table_with_exactly_its_fields(struct: type[msgspec.Struct]) -> None:
    heading = f"`{struct.__struct_config__.tag}` ({struct.__name__})"
    assert rows(section(heading)) == list(struct.__struct_fields__)


@pytest.mark.parametrize("struct", PARTS, ids=lambda struct: struct.__name__)
def test_every_part_has_a_table_with_exactly_its_fields(struct: type[msgspec.Struct]) -> None:
    assert rows(section(struct.__name__)) == list(struct.__struct_fields__)


def test_the_header_the_span_and_the_version_are_there() -> None:
    assert rows(section("The envelope")) == list(wire.Header.__struct_fields__)
    assert all(f"`{name}`" in section("Span") for name in telemetry.Span.__struct_fields__)
    assert f"Version **{wire.VERSION[0]}.{wire.VERSION[1]}**" in PROTOCOL
    assert f"| {wire.VERSION[0]}.{wire.VERSION[1]} |" in section("Change notes")


def test_every_required_field_and_default_is_told() -> None:
    for struct in (*wire.MESSAGE_TYPES, *PARTS):
        tag = struct.__struct_config__.tag
        text = section(f"`{tag}` ({struct.__name__})" if tag else struct.__name__)
        for field in msgspec.structs.fields(struct):
            cells = next(line for line in text.splitlines() if line.startswith(f"| `{field.name}` |"))
            assert (re.split(r"(?<!\\)\|", cells)[3].strip() == "required") == field.required, field.name


def test_every_channel_verb_and_query_has_its_row() -> None:
    assert tuple(rows(section("Parties and channels"))) == sockets.CHANNELS
    assert tuple(rows(section("Verbs"))) == control.VERBS
    assert rows(section("Queries")) == list(results.RESULTS)


def test_every_word_of_a_fixed_list_is_explained() -> None:
    words = section("Words")
    for kind in (control.RankStateName, control.RunStateName, control.Severity, control.AlertKind):
        assert all(f"`{name}`" in words for name in kind.__args__)
    assert all(f"`{name}`" in words for name in telemetry.PHASES)


def test_the_limits_are_those_of_the_sockets() -> None:
    text = section("Parties and channels")
    assert f"`SNDHWM` {sockets.SEND_HIGH_WATER:,}" in text
    assert f"`RCVHWM` {sockets.RECEIVE_HIGH_WATER:,}" in text
    assert f"`MAXMSGSIZE` {sockets.MAX_MESSAGE_BYTES // 2**20} MiB" in text
    assert f"{wire.RESTART_LEAP:,}" in PROTOCOL
    assert keys.ZAP_DOMAIN


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


def test_the_examples_for_a_recording_run(tmp_path: Path) -> None:
    connection = sqlite3.connect(write(tmp_path / "r.sqlite", Stream(ranks=2, steps=50).frames()))
    examples = re.findall(r"```sql\n(.*?)```", RECORDING, re.S)
    assert len(examples) >= 4
    for statement in (part for example in examples for part in example.split(";") if part.strip()):
        assert connection.execute(statement).fetchall(), statement
    connection.close()


def test_the_pandas_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    write(tmp_path / "recording.sqlite", Stream(ranks=2, steps=50).frames())
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", RECORDING, re.S):
        exec(compile(code, "docs/recording.md", "exec"), {})
