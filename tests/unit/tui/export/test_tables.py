"""A table has the figures of the recorded messages, one row each; figures that are not numbers stay visible."""

import csv
import gzip
import math
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Closing, DeviceSample, Evaluation, PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.protocol.recording.reader import Reader, RecordedRun
from ftmon.protocol.recording.series import SERIES
from ftmon.tui.cli import arguments
from ftmon.tui.cli.main import main
from msgspec.structs import replace
from places import DATA, ROOT
from streams import STARTED, Stream, write

NAN = float("nan")
Rows = list[dict[str, Any]]


def odd_step(step: Step) -> Step:
    """Return a step with what few steps have: a NaN, an infinite norm, phases without columns, coarse phases."""
    first, *others = step.phases
    resident = Span(3, 4, 5)
    twice = PhaseRecord("forward", 900, 7, Span(1, 2, 3), Span(4, 5, 6), 8, resident=resident, waited_us=9, coarse=True)
    evaluation = PhaseRecord("eval", 2_000_000, 70, Span(1, 2, 3), Span(4, 5, 6))
    phases = [first, *[replace(phase, coarse=True) for phase in others], twice, evaluation]
    return replace(step, phases=phases, loss=NAN, grad_norm=math.inf, loss_scale=2.0, overflow=True, fetch_us=4)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two ranks; the last step of rank 1 is odd, and evaluations and closing phases follow."""
    frames = list(Stream(ranks=2, steps=90, spike_every=40).frames())
    at = max(place for place, frame in enumerate(frames) if isinstance(frame.message, Step))
    frames[at] = replace(frames[at], message=odd_step(frames[at].message))
    t, seq = frames[-1].t, frames[-1].seq
    more = [
        Evaluation(0, 90, t, "test", 1.5, 4.5, 1000, 2.5, True, {"accuracy": 0.5}),
        Evaluation(0, 90, t, "test", NAN),
        Closing(1, 90, t, 5_000, [PhaseRecord("checkpoint", 100, 4_000, Span(1, 2, 3), Span(4, 5, 6))]),
    ]
    frames += [Frame(seq + number, t, message) for number, message in enumerate(more, 1)]
    return write(tmp_path_factory.mktemp("recorded") / "r.sqlite", frames)


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Rows]:
    """Export a series of a recording to Parquet; return its rows."""
    parquet = pytest.importorskip("pyarrow.parquet")

    def export(path: Path, series: str) -> Rows:
        out = tmp_path / f"{series}.parquet"
        assert main(["export", str(path), "parquet", "-o", str(out), "--series", series]) == 0
        table = parquet.read_table(out)
        assert table.column_names == list(SERIES[series])
        return table.to_pylist()

    return export


def messages(path: Path, kind: type) -> Iterator[tuple[Frame, Any]]:
    with Reader(path) as reader:
        yield from ((frame, frame.message) for frame in reader.frames(limit=10_000) if isinstance(frame.message, kind))


def same(rows: Rows, expected: Rows) -> None:
    """Check rows, where NaN equals NaN, and times agree to a microsecond."""
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        numbers = {name: int(value) if isinstance(value, bool) else value for name, value in wanted.items()}
        assert row == {name: pytest.approx(value, nan_ok=True, abs=1e-6) for name, value in numbers.items()}


def finite(value: float | None) -> int | None:
    return None if value is None else int(math.isfinite(value))


def step_row(frame: Frame, step: Step) -> dict[str, Any]:
    own = ("host_us", "device_us", "training_us", "loss", "lr", "grad_norm", "loss_scale", "overflow", "micro_steps")
    counts = ("samples", "tokens", "padded_tokens", "probe_us", "fetch_us")
    resident = [phase.resident.peak for phase in step.phases if phase.resident is not None]
    return {
        "seq": frame.seq,
        "time_s": frame.t,
        "rank": step.rank,
        "step": step.step,
        "job": 1,
        "started_s": step.started,
        **{name: getattr(step, name) for name in (*own, *counts)},
        "loss_finite": finite(step.loss),
        "grad_norm_finite": finite(step.grad_norm),
        "label_tokens": step.label_tokens or None,
        "flops": step.flops or None,
        "cpu_us": step.cpu_us or None,
        "mfu": None,
        "allocated_peak_bytes": max(phase.allocated.peak for phase in step.phases),
        "reserved_peak_bytes": max(phase.reserved.peak for phase in step.phases),
        "resident_peak_bytes": max(resident, default=None),
    }


def phase_rows(frame: Frame, of: Step | Closing) -> Iterator[dict[str, Any]]:
    own = ("host_us", "device_us", "waited_us", "collective_us", "collectives", "count", "allocations", "coarse")
    for phase in of.phases:
        spans = {"allocated": phase.allocated, "reserved": phase.reserved, "resident": phase.resident}
        yield {
            "seq": frame.seq,
            "time_s": frame.t,
            "rank": of.rank,
            "step": of.step,
            "job": 1,
            "phase": phase.name,
            "started_s": of.started + phase.start_us / 1e6,
            **{name: getattr(phase, name) for name in own},
            **{
                f"{name}_{part}_bytes": None if span is None else getattr(span, part)
                for name, span in spans.items()
                for part in ("start", "end", "peak")
            },
        }


def test_each_step_and_each_phase_is_a_row_and_a_nan_loss_stays_one(path, exported):
    rows = exported(path, "steps")
    same(rows, [step_row(frame, step) for frame, step in messages(path, Step)])
    assert (rows[-1]["loss_finite"], rows[-1]["grad_norm"], rows[-1]["grad_norm_finite"]) == (0, math.inf, 0)
    assert math.isnan(rows[-1]["loss"])
    assert rows[0]["loss_finite"] == 1
    rows = exported(path, "phases")
    same(rows, [row for frame, of in messages(path, Step | Closing) for row in phase_rows(frame, of)])
    assert [row["phase"] for row in rows[-2:]] == ["eval", "checkpoint"]
    assert [row["coarse"] for row in rows[-7:]] == [0, 1, 1, 1, 1, 0, 0]


def test_a_recording_of_schema_1_has_the_same_columns(tmp_path, exported):
    path = tmp_path / "v1.sqlite"
    path.write_bytes(gzip.decompress((DATA / "recording_before_0_2.sqlite.gz").read_bytes()))
    same(exported(path, "steps"), [step_row(frame, step) for frame, step in messages(path, Step)])
    expected = [row for frame, of in messages(path, Step | Closing) for row in phase_rows(frame, of)]
    same(exported(path, "phases"), expected)
    assert expected


def test_rows_name_their_job_and_a_training_that_was_started_again_has_one_curve(tmp_path, exported):
    steps = {step.step: step for step in (frame.message for frame in Stream(1, 8).frames()) if isinstance(step, Step)}
    made: list[Message] = []
    for number, restart, of_job in ((1, 0, range(1, 5)), (2, 1, range(3, 9)), (3, 0, range(1, 3))):
        made.append(Job(number=number, time=STARTED, state="training", started=STARTED, restart=restart))
        made += [replace(steps[step], loss=float(number)) for step in of_job]
    made.append(Job(number=2, time=STARTED, state="failed", started=STARTED, restart=1))  # late: its end was awaited
    path = write(tmp_path / "r.sqlite", [Frame(seq, STARTED + seq, one) for seq, one in enumerate(made, 1)])
    expected = [(1, step) for step in range(1, 5)] + [(2, step) for step in range(3, 9)] + [(3, 1), (3, 2)]
    for series in ("steps", "phases"):
        found = [(row["job"], row["step"]) for row in exported(path, series)]
        assert list(dict.fromkeys(found)) == expected
    connection = sqlite3.connect(path)
    curve = connection.execute("SELECT job, step, loss FROM loss_curve ORDER BY job, step").fetchall()
    connection.close()
    assert curve == [(1, 1, 1.0), (1, 2, 1.0), *((1, step, 2.0) for step in range(3, 9)), (3, 1, 3.0), (3, 2, 3.0)]
    assert RecordedRun(path).steps_seen(0) == 12
    last = RecordedRun(path, last=True)
    assert (last.trainings, last.began, last.info.last_step) == (2, STARTED + 13, 2)
    assert [(step.step, step.loss) for step in last.steps(0)] == [(1, 3.0), (2, 3.0)]


def test_evaluations_alerts_and_devices_are_tables_too(path, exported):
    first, second = exported(path, "evaluations")
    assert (first["name"], first["loss"], first["best"], first["metrics_json"]) == ("test", 1.5, 1, '{"accuracy":0.5}')
    assert (math.isnan(second["loss"]), second["loss_finite"], second["label_tokens"]) == (True, 0, None)
    alerts = exported(path, "alerts")
    assert [(row["kind"], row["rank"], row["step"]) for row in alerts] == [("spike", 1, 40), ("spike", 1, 80)]
    devices = exported(path, "devices")
    samples = [sample for _, sample in messages(path, DeviceSample)]
    assert [row["used_bytes"] for row in devices] == [sample.used_bytes for sample in samples]
    assert {row["throttle_reasons"] for row in devices} == {None, "power cap"}


def test_a_parquet_file_has_no_bounds_by_which_a_reader_would_skip_a_nan(tmp_path, path, exported):
    parquet = pytest.importorskip("pyarrow.parquet")
    exported(path, "steps")
    group = parquet.ParquetFile(tmp_path / "steps.parquet").metadata.row_group(0)
    bounded = {one.path_in_schema for one in map(group.column, range(group.num_columns)) if one.is_stats_set}
    assert bounded == {name for name, kind in SERIES["steps"].items() if kind is not float}


def test_all_series_in_a_folder_as_csv_and_arrow(tmp_path, path, capsys):
    arrow = pytest.importorskip("pyarrow.ipc")
    for kind in ("csv", "arrow"):
        assert main(["export", str(path), kind, "-o", str(tmp_path / kind), "--series", "all"]) == 0
        assert {file.stem for file in (tmp_path / kind).iterdir()} == set(SERIES)
    assert f"written: {tmp_path}/csv/steps.csv: 180 rows\n" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "csv" / "steps.csv").open()))
    expected = ("nan", "0", "inf", "")
    assert (rows[-1]["loss"], rows[-1]["loss_finite"], rows[-1]["grad_norm"], rows[-1]["mfu"]) == expected
    table = arrow.open_file(str(tmp_path / "arrow" / "steps.arrow")).read_all()
    assert table.column("host_us").to_pylist() == [int(row["host_us"]) for row in rows]


def test_values_of_a_foreign_type_are_missing_and_a_damaged_step_has_no_phases_from_there_on(tmp_path, path, exported):
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(path.read_bytes())
    connection = sqlite3.connect(damaged, isolation_level=None)
    steps = connection.execute("SELECT seq, rest FROM steps ORDER BY seq LIMIT 3").fetchall()
    (one, _), (two, packed), (three, _) = steps
    connection.execute("UPDATE steps SET lr = 'fast', tokens = x'00', rest = x'c1' WHERE seq = ?", (one,))
    rest = msgspec.msgpack.decode(packed)
    rest[1], rest[10] = 2**64 - 1, [None]  # samples, and a phase that is not there
    connection.execute("UPDATE steps SET rest = ? WHERE seq = ?", (msgspec.msgpack.encode(rest), two))
    connection.execute("UPDATE steps SET forward_host_us = NULL WHERE seq = ?", (three,))
    connection.close()
    first, second, *_ = exported(damaged, "steps")
    assert (first["lr"], first["tokens"], first["padded_tokens"], first["loss"] > 0) == (None, None, None, True)
    assert (second["samples"], second["tokens"] > 0) == (None, True)
    assert len(exported(path, "phases")) - len(exported(damaged, "phases")) == 4 + 4 + 3


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["parquet", "-o", "{out}"], "parquet needs pyarrow; run: pip install pyarrow, or export csv"),
        (["csv", "-o", "{path}"], "would replace a file that is read or written too: name another"),
        (["csv", "-o", "{out}/none/steps.csv"], "cannot be written: no such folder"),
        (["csv", "-o", "{path}", "--series", "all"], "no folder for the files: File exists"),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(tmp_path, path, capsys, monkeypatch, words, line):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    out = tmp_path / "out"
    assert main(["export", str(path), *(word.format(out=out, path=path) for word in words)]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_recipes_of_the_documentation_find_the_nan(tmp_path, path, capsys, monkeypatch):
    for name in ("pyarrow", "pandas", "duckdb", "polars"):
        pytest.importorskip(name)
    (tmp_path / "recording.sqlite").write_bytes(path.read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main(["export", "recording.sqlite", "parquet", "--series", "all", "-o", "."]) == 0
    assert main(["export", "recording.sqlite", "csv", "-o", "steps.csv"]) == 0
    printed: dict[str, list[str]] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/recording.md").read_text(), re.S):
        capsys.readouterr()
        exec(compile(code, "docs/recording.md", "exec"), {})
        for library in re.findall(r"^import (pandas|polars|duckdb)", code, re.M):
            printed.setdefault(library, []).append(capsys.readouterr().out)
    assert {library: len(out) for library, out in printed.items()} == {"pandas": 2, "polars": 3, "duckdb": 1}
    assert "not finite in the steps [90]" in printed["pandas"][0]
    for out in (printed["pandas"][1], printed["polars"][0], printed["polars"][2], printed["duckdb"][0]):
        assert re.search(r"\b90\b", out), out
    assert re.search(r"\b1\b.*\b90\b.*nan", printed["duckdb"][0])


def test_the_documentation_has_every_column() -> None:
    text = (ROOT / "docs/recording.md").read_text().split("## Export")[1].split("\n## ")[0]
    for series, columns in SERIES.items():
        named = re.findall(r"`(\w+)`", "".join(re.findall(rf"^\| (?:`{series}`|all) \|.*", text, re.M)))
        assert [name for name in columns if name not in named] == []
    assert tuple(SERIES) == arguments.SERIES
