"""Rows for trackers: one for each step of all ranks, with names of the table, in the order of the run."""

import math
import sqlite3
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.errors import TargetError
from ftmon.protocol.messages.control import Alert, RankState, RunState
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import DeviceSample, Evaluation, PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame, Message
from ftmon.trainer.exporters import __main__
from ftmon.trainer.exporters.report import Sent
from ftmon.trainer.exporters.tracker_clients import TensorBoard, without_secrets
from ftmon.trainer.exporters.trackers import About, Note, Row, Rows, Tracker, Value
from streams import RUN, Stream, write

GIB = 2**30
NAN = math.nan


class Kept:
    where = ""
    float32 = False

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.notes: list[Note] = []
        self.facts: dict[str, Value] = {}
        self.about: About | None = None
        self.ended: tuple[str, float] | None = None

    def open(self, about: About) -> None:
        self.about = about

    def configure(self, facts: Mapping[str, Value]) -> None:
        self.facts = dict(facts)

    def log(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def alert(self, note: Note) -> None:
        self.notes.append(note)

    def close(self, state: str, ended: float) -> None:
        self.ended = (state, ended)


def hello(ranks: int) -> list[Message]:
    return [Stream(ranks=ranks).hello(rank, 0.0) for rank in range(ranks)]


def step(rank: int, number: int, loss: float | None = 1.0, tokens: int = 10, peak: int = GIB) -> Step:
    phases = [PhaseRecord("forward", 0, 500_000 + 1000 * rank, Span(0, 0, peak), Span(0, 0, peak))]
    return Step(rank, number, 1.0, 1_000_000, phases, loss=loss, tokens=tokens, label_tokens=tokens, grad_norm=2.0)


def rows(*messages: Message, float32: bool = False, every: float = 0.1) -> list[Row]:
    """Return the rows of messages that arrive ``every`` seconds, those at the end included."""
    made = Rows("node-1", 0.0, float32)
    found = [
        row for number, message in enumerate(messages) for row in made.apply(Frame(number, number * every, message))
    ]
    return [*found, *made.end(len(messages) * every)]


def test_a_step_of_all_ranks_is_one_row_and_waits_for_none_that_ended_or_is_ten_seconds_late():
    (row,) = rows(*hello(2), step(0, 1, loss=1.0, tokens=10, peak=GIB), step(1, 1, loss=4.0, tokens=20, peak=2 * GIB))
    assert row.step == 1
    assert row.values["train/loss"] == 3.0, "weighted by label tokens"
    assert row.values["train/tokens_per_second"] == 30
    assert row.values["system/memory_allocated_peak_bytes"] == 2 * GIB
    assert row.values["train/phase_duration_seconds/forward"] == 0.501
    assert row.values["train/global_step"] == 1
    assert row.time == row.values["system/timestamp_seconds"] == row.values["system/elapsed_seconds"] == 3 * 0.1
    ended = rows(*hello(2), RankState(1, "gone", 1.0), step(0, 1), step(0, 2))
    assert [row.step for row in ended] == [1, 2]
    late = Rows("", 0.0, False)
    for message in [*hello(2), step(0, 1)]:
        assert late.apply(Frame(1, 1.0, message)) == []
    assert late.apply(Frame(2, 10.0, step(0, 2))) == []
    assert [row.step for row in late.apply(Frame(3, 11.5, step(0, 3)))] == [1]


@pytest.mark.parametrize("loss", [NAN, math.inf])
def test_a_loss_of_one_rank_that_is_no_number_is_flagged(loss):
    (row,) = rows(*hello(2), step(0, 1), step(1, 1, loss=loss))
    assert not math.isfinite(row.values["train/loss"])
    assert (row.values["train/loss_finite"], row.values["train/grad_norm_finite"]) == (0.0, 1.0)


def test_a_client_with_seven_digits_gets_gib_and_steps_that_fall_after_a_restart_are_rows_again():
    row, devices = rows(step(0, 1, peak=3 * GIB), device("node-1", "gpu", 0, 5 * GIB), float32=True)
    assert row.values["system/memory_allocated_peak_gib"] == 3.0
    assert devices.values["system/device_memory_used_gib/gpu0"] == 5.0
    assert not [name for name in row.values | devices.values if "bytes" in name or "timestamp" in name]
    restarted = Job(2, 1.0, "training", 1.0, restart=1)
    found = rows(*hello(2), step(0, 5), step(1, 5), step(0, 6), restarted, step(0, 3), step(1, 3))
    assert [row.step for row in found] == [5, 6, 3]
    assert [row.step for row in rows(step(0, 5), step(0, 6), step(0, 5))] == [5, 6, 5]


def device(host: str, kind: str, index: int, used: int) -> DeviceSample:
    return DeviceSample(host, kind, index, "H200", 1.0, used, 80 * GIB)  # type: ignore[arg-type]


def test_devices_have_a_row_each_ten_seconds_and_evaluations_the_names_of_transformers_trainer():
    samples = [device("node-1", "gpu", 1, 1), device("node-2", "gpu", 0, 2), device("node-1", "host", 0, 3)]
    found = rows(*samples * 10, every=1.0)
    assert [row.time for row in found] == [0.0, 10.0, 20.0, 30.0]
    used = {name: value for name, value in found[1].values.items() if "memory_used" in name}
    stem = "system/device_memory_used_bytes/"
    assert used == {f"{stem}gpu1": 1, f"{stem}node-2/gpu0": 2, f"{stem}host": 3}
    default, named = rows(
        Evaluation(0, 7, 1.0, loss=NAN, metrics={"accuracy": 0.5}), Evaluation(0, 7, 1.0, "squad", loss=2.0)
    )
    assert {"eval/loss_finite": 0.0, "eval/accuracy": 0.5, "eval/global_step": 7}.items() <= default.values.items()
    assert named.values["eval/squad_loss"] == 2.0


def test_a_tracker_gets_a_run_from_its_first_message_to_its_end():
    client = Kept()
    tracker = Tracker(client)
    tracker.replayed = True
    tracker.open(RUN)
    frames = list(Stream(ranks=2, steps=50).frames())
    tracker.points([Sent(frame, True) for frame in frames])
    for frame in frames:
        if isinstance(frame.message, Alert):
            tracker.alert(frame.message)
            tracker.alert(msgspec.structs.replace(frame.message, count=2))
    tracker.close()
    assert client.about == About(RUN.id, RUN.created, True)
    assert [row.step for row in client.rows if "train/loss" in row.values] == list(range(1, 51))
    assert client.facts["model"] == "LlamaForCausalLM"
    assert not {"argv", "command", "host"} & set(client.facts)
    assert [(note.step, note.severity) for note in client.notes] == [(40, "warning")]
    assert client.ended == ("finished", frames[-1].t)
    assert tracker.written == len(client.rows) + 1


def test_what_a_client_raises_in_a_replay_is_one_line_without_keys(tmp_path, monkeypatch):
    class Full(Kept):
        def open(self, about: About) -> None:
            raise sqlite3.OperationalError("database or disk is full of s3cr3t\n[SQL: CREATE TABLE experiments]")

    monkeypatch.setenv("SOME_TOKEN", "s3cr3t")
    monkeypatch.setattr(__main__, "make_target", lambda _: Tracker(Full()))
    path = write(tmp_path / "r.sqlite", Stream(ranks=1, steps=1).frames())
    with pytest.raises(TargetError) as caught:
        __main__.replay(path, "mlflow")
    assert str(caught.value) == "mlflow: OperationalError: database or disk is full of ***"


def test_what_is_not_live_is_not_written_again_and_texts_of_clients_are_shown_without_keys(monkeypatch):
    client = Kept()
    tracker = Tracker(client)
    tracker.open(RUN)
    sent = [Sent(Frame(1, 1.0, message), False) for message in [*hello(1), step(0, 5), RunState("training", 1.0)]]
    tracker.points(sent)
    tracker.alert(Alert(1, "hang", "error", 1.0, "an old one"))
    assert (client.rows, client.notes) == ([], [])
    assert client.facts
    monkeypatch.setenv("SOME_API_KEY", "abcdef123")
    text = "cannot reach http://me:secret@host:5000/api?key=abcdef123\nsecond line"
    assert without_secrets(text) == "cannot reach http://host:5000/api?key=***"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_an_error_of_one_line_and_what_follows_is_written(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    client = TensorBoard()
    client.open(About("run", 0.0, False))
    (file,) = Path("runs/run").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.raises(TargetError, match=r"runs/run: No space left on device$"):
        client.log([Row(1, 1.0, {"train/loss": 1.0})])
    file.unlink()
    client.log([Row(2, 2.0, {"train/loss": 2.0})])
    client.close("finished", 3.0)
    reader = import_module("tensorboard.backend.event_processing.event_accumulator").EventAccumulator("runs/run")
    reader.Reload()
    assert [(each.step, each.value) for each in reader.Scalars("train/loss")] == [(2, 2.0)]
