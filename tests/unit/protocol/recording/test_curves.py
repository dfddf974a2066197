"""Curves of training out of a recording: pooled where long, exact where short, and from older recordings too."""

import math
import sqlite3
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.messages.telemetry import Checkpoint, Evaluation, Hello, PhaseRecord, Span, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.curves import Rollups, point_of, pool_points, pool_rollups, pool_steps
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.rows import step_rows
from ftmon.protocol.recording.schema import ADDED, ROLLUP_COLUMNS, ROLLUP_SIZES
from ftmon.protocol.recording.writer import Writer
from streams import STARTED, Stream, append, write

NO_MEMORY = Span(0, 0, 0)


def test_few_steps_come_one_by_one_and_many_pooled_without_losing_a_token(tmp_path: Path) -> None:
    frames = list(Stream(ranks=2, steps=700, devices=False, logs=False, step_s=0.1).frames())
    steps = [frame.message for frame in frames if isinstance(frame.message, Step) and frame.message.rank == 1]
    with Reader(write(tmp_path / "r.sqlite", frames)) as recording:
        info = recording.info()
        whole = recording.training(1, info.first_t, info.last_t, 1000)
        pooled = recording.training(1, info.first_t, info.last_t, 20)
    assert [point.step for point in whole] == [step.step for step in steps]
    assert [point.loss for point in whole] == [step.loss for step in steps]
    assert len(pooled) <= 20
    for points in (whole, pooled):
        assert sum(point.count for point in points) == 700
        assert sum(point.tokens for point in points) == sum(step.tokens for step in steps)
        assert sum(point.training_us for point in points) == sum(step.training_us for step in steps)
        assert max(point.max_grad_norm or 0 for point in points) == max(step.grad_norm or 0 for step in steps)
    assert (pooled[0].first_step, pooled[-1].step) == (1, 700)


def test_a_pooled_loss_is_weighted_by_label_tokens_and_pauses_are_no_training_time() -> None:
    few = point_of(Step(0, 1, STARTED, 100, [], loss=1.0, label_tokens=1), 1.0)
    many = point_of(Step(0, 2, STARTED, 100, [], loss=3.0, label_tokens=3), 2.0)
    assert pool_points([few, many]).loss == 2.5
    assert pool_points([few, point_of(Step(0, 2, STARTED, 100, [], loss=3.0), 2.0)]).loss == 2.0
    pauses = [PhaseRecord(name, 0, us, NO_MEMORY, NO_MEMORY) for name, us in (("eval", 600), ("checkpoint", 300))]
    step = Step(0, 1, STARTED, 1000, [PhaseRecord("data", 900, 50, NO_MEMORY, NO_MEMORY), *pauses], tokens=10)
    point = point_of(step, 1.0)
    assert (point.training_us, point.data_us, point.whole_us) == (100, 50, 100)


def test_mfu_is_recorded_per_rank_with_the_peak_of_its_device(tmp_path: Path) -> None:
    hello = next(frame.message for frame in Stream(ranks=1, steps=1).frames() if isinstance(frame.message, Hello))
    known = msgspec.structs.replace(hello, matmul_precision="bf16")
    unknown = msgspec.structs.replace(hello, rank=1)
    step = Step(0, 1, STARTED, 1_000_000, [], tokens=1000, flops=9.894e14 / 2)
    messages = (known, unknown, step, msgspec.structs.replace(step, rank=1))
    write(tmp_path / "r.sqlite", [Frame(number, STARTED + number, each) for number, each in enumerate(messages, 1)])
    connection = sqlite3.connect(tmp_path / "r.sqlite")
    rows = connection.execute("SELECT rank, mfu, flops FROM throughput ORDER BY rank").fetchall()
    connection.close()
    assert rows == [(0, pytest.approx(0.5), 9.894e14 / 2), (1, None, 9.894e14 / 2)]


def test_evaluations_and_checkpoints_have_rows_and_come_back_as_messages(tmp_path: Path) -> None:
    evaluations = [Evaluation(0, 50 * k, STARTED + k, "validation", 2.0 / k, seconds=1.5) for k in range(1, 5)]
    checkpoint = Checkpoint(0, 200, STARTED + 9, "out/step-200", 123, 2.5, best=True)
    messages = [*evaluations, checkpoint]
    write(tmp_path / "r.sqlite", [Frame(n, STARTED + n, message) for n, message in enumerate(messages, 1)])
    connection = sqlite3.connect(tmp_path / "r.sqlite")
    found = connection.execute("SELECT step, loss FROM evaluations ORDER BY seq").fetchall()
    assert found == [(each.step, each.loss) for each in evaluations]
    assert connection.execute("SELECT path, bytes, best FROM checkpoints").fetchall() == [("out/step-200", 123, 1)]
    connection.close()
    with Reader(tmp_path / "r.sqlite") as recording:
        assert [frame.message for frame in recording.sampled("evaluation", 0, 10)] == evaluations
        assert [frame.message for frame in recording.sampled("checkpoint", 0, 10)] == [checkpoint]


def test_a_recording_that_is_continued_goes_on_pooling_where_it_stopped(tmp_path: Path) -> None:
    frames = list(Stream(ranks=1, steps=100, devices=False, logs=False).frames())
    cut = len(frames) // 3
    path = tmp_path / "r.sqlite"
    for part in (frames[:cut], frames[cut:]):
        writer = Writer(path)
        append(writer, part)
        writer.close()
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT min_step, max_step, count FROM curves WHERE level = 0 ORDER BY last_seq")
    assert rows.fetchall() == [(first, first + 15, 16) for first in range(1, 97, 16)]
    connection.close()


def with_nan(path: Path) -> Path:
    """Record two ranks. Rank 1's loss is NaN in step 5, infinite in 6; its norm is NaN in 7, later not measured."""
    frames: list[Frame] = []
    for frame in Stream(ranks=2, steps=40, devices=False, logs=False).frames():
        if isinstance(step := frame.message, Step):
            loss = {5: math.nan, 6: math.inf}.get(step.step, 2.0 + step.rank) if step.rank else 2.0
            norm = None if step.step > 7 else math.nan if step.rank and step.step == 7 else 1.0
            known = msgspec.structs.replace(step, loss=loss, grad_norm=norm, label_tokens=100 + 200 * step.rank)
            frame = Frame(frame.seq, frame.t, known)
        frames.append(frame)
    last = frames[-1]
    return write(path, [*frames, Frame(last.seq + 1, last.t, Evaluation(0, 40, last.t, "test", math.nan))])


def as_schema_2(path: Path) -> Path:
    connection = sqlite3.connect(path, isolation_level=None)
    for view in ("loss_curve", "jobs_latest", "ranks_latest"):
        connection.execute(f"DROP VIEW {view}")
    for table, columns in ADDED.items():
        for column in columns:
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    connection.execute("PRAGMA user_version=2")
    connection.close()
    return path


def test_a_figure_that_was_nan_is_told_from_one_that_was_not_measured(tmp_path: Path) -> None:
    connection = sqlite3.connect(with_nan(tmp_path / "r.sqlite"))
    flags = (
        "SELECT step, loss, loss_finite, grad_norm, grad_norm_finite FROM steps WHERE rank = 1 AND step BETWEEN 5 AND 8"
    )
    expected = [(5, None, 0, 1.0, 1), (6, math.inf, 0, 1.0, 1), (7, 3.0, 1, None, 0), (8, 3.0, 1, None, None)]
    assert connection.execute(flags).fetchall() == expected
    curve = "SELECT ranks, loss, low_loss, high_loss, loss_finite, grad_norm, grad_norm_finite FROM loss_curve"
    assert connection.execute(f"{curve} WHERE step IN (4, 5, 7, 8) ORDER BY step").fetchall() == [
        (2, 2.75, 2.0, 3.0, 1, 1.0, 1),
        (2, 2.0, 2.0, 2.0, 0, 1.0, 1),
        (2, 2.75, 2.0, 3.0, 1, 1.0, 0),
        (2, 2.75, 2.0, 3.0, 1, None, None),
    ]
    assert connection.execute("SELECT loss, loss_finite FROM evaluations").fetchall() == [(None, 0)]
    wanted = [(0, 40, 1), (1, 40, 1)]
    assert connection.execute("SELECT rank, last_step, loss_finite FROM ranks_latest").fetchall() == wanted
    connection.close()


@pytest.mark.parametrize(("schema", "lost"), [(3, (2, 1)), (2, (1, 0))])
def test_pooled_points_count_the_steps_that_were_not_finite(tmp_path: Path, schema: int, lost: tuple[int, int]) -> None:
    path = with_nan(tmp_path / "r.sqlite")
    with Reader(as_schema_2(path) if schema == 2 else path) as reader:
        info = reader.info()
        assert (info.schema, info.missing, info.steps) == (schema, "", 80)
        for limit in (100, 2):
            points = reader.training(1, info.first_t, info.last_t, limit)
            counts = [sum(getattr(point, f"{name}_not_finite") for point in points) for name in ("loss", "grad_norm")]
            assert counts == ([*lost] if schema == 3 or limit == 100 else [0, 0])
            assert {point.loss for point in points} - {None} == {3.0}
        steps = [frame.message for frame in reader.frames(limit=1000) if isinstance(frame.message, Step)]
    losses = {step.step: step.loss for step in steps if step.rank}
    assert (str(losses[5]), losses[6], losses[7]) == ("nan", math.inf, 3.0)


def rows(steps: int, cuda: bool = True) -> list[tuple[object, ...]]:
    stream = Stream(ranks=1, steps=steps, cuda=cuda, spike_every=7)
    return [step_rows(f.seq, f.t, f.message)[0] for f in stream.frames() if isinstance(f.message, Step)]


def named(row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(ROLLUP_COLUMNS, row, strict=True))


def test_a_pooled_row_has_maxima_sums_and_the_moment_of_the_peak() -> None:
    taken = rows(16)
    pooled = named(pool_steps(taken))
    highest = max(taken, key=lambda row: row[11])
    assert (pooled["first_seq"], pooled["last_seq"]) == (taken[0][0], taken[-1][0])
    assert (pooled["count"], pooled["min_step"], pooled["max_step"]) == (16, 1, 16)
    assert (pooled["allocated_peak"], pooled["peak_t"]) == (highest[11], highest[1])
    assert pooled["host_us"] == sum(row[5] for row in taken)
    assert pooled["max_host_us"] == max(row[5] for row in taken)
    assert abs(pooled["loss"] - sum(row[7] for row in taken) / 16) < 1e-9
    # On the CPU the moment is that of the resident peak.
    taken = rows(16, cuda=False)
    highest = max(taken, key=lambda row: row[13])
    pooled = named(pool_steps(taken))
    assert (pooled["resident_peak"], pooled["peak_t"]) == (highest[13], highest[1])
    assert pooled["device_us"] is None


def test_pooling_pooled_rows_equals_pooling_steps_and_each_level_is_emitted_as_it_fills():
    taken = rows(128)
    by_sixteen = [pool_steps(taken[at : at + 16]) for at in range(0, 128, 16)]
    twice, once = named(pool_rollups(1, by_sixteen)), named(pool_steps(taken))
    assert abs(twice.pop("loss") - once.pop("loss")) < 1e-9
    assert {**twice, "level": 0} == once
    emitted: list[tuple[object, ...]] = []
    rollups = Rollups(emitted.append)
    for row in rows(300):
        rollups.add(row)
    levels = [row[0] for row in emitted]
    assert (levels.count(0), levels.count(1), levels.count(2)) == (300 // ROLLUP_SIZES[0], 300 // ROLLUP_SIZES[1], 0)
    rollups.flush()
    for level in range(len(ROLLUP_SIZES)):
        assert sum(named(row)["count"] for row in emitted if row[0] == level) == 300
