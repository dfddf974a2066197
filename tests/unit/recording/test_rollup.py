"""Pooled rows keep the highest peak and its moment, and continue where an earlier writer stopped."""

from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.curves import Rollups, pool_rollups, pool_steps
from ftmon.protocol.recording.rows import step_rows
from ftmon.protocol.recording.schema import ROLLUP_COLUMNS, ROLLUP_SIZES
from streams import Stream


def rows(steps: int, cuda: bool = True) -> list[tuple[object, ...]]:
    stream = Stream(ranks=1, steps=steps, cuda=cuda, spike_every=7)
    return [step_rows(f.seq, f.t, f.message)[0] for f in stream.frames() if isinstance(f.message, Step)]


def named(row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip(ROLLUP_COLUMNS, row, strict=True))


def test_a_pooled_row_has_maxima_sums_and_the_moment_of_the_peak() -> None:
    taken = rows(16)
    pooled = named(pool_steps(taken))
    highest = max(taken, key=lambda row: row[11])
    assert pooled["count"] == 16
    assert (pooled["first_seq"], pooled["last_seq"]) == (taken[0][0], taken[-1][0])
    assert (pooled["min_step"], pooled["max_step"]) == (1, 16)
    assert (pooled["allocated_peak"], pooled["peak_t"]) == (highest[11], highest[1])
    assert pooled["host_us"] == sum(row[5] for row in taken)
    assert pooled["max_host_us"] == max(row[5] for row in taken)
    assert abs(pooled["loss"] - sum(row[7] for row in taken) / 16) < 1e-9


def test_on_the_cpu_the_moment_is_that_of_the_resident_peak() -> None:
    taken = rows(16, cuda=False)
    highest = max(taken, key=lambda row: row[13])
    pooled = named(pool_steps(taken))
    assert (pooled["resident_peak"], pooled["peak_t"]) == (highest[13], highest[1])
    assert pooled["device_us"] is None


def test_pooling_pooled_rows_equals_pooling_the_steps() -> None:
    taken = rows(128)
    by_sixteen = [pool_steps(taken[at : at + 16]) for at in range(0, 128, 16)]
    twice, once = named(pool_rollups(1, by_sixteen)), named(pool_steps(taken))
    assert abs(twice.pop("loss") - once.pop("loss")) < 1e-9
    assert {**twice, "level": 0} == once


def test_rows_are_emitted_as_each_level_fills_and_a_flush_gives_the_rest() -> None:
    emitted: list[tuple[object, ...]] = []
    rollups = Rollups(emitted.append)
    for row in rows(300):
        rollups.add(row)
    levels = [row[0] for row in emitted]
    assert (levels.count(0), levels.count(1), levels.count(2)) == (300 // ROLLUP_SIZES[0], 300 // ROLLUP_SIZES[1], 0)
    rollups.flush()
    for level in range(len(ROLLUP_SIZES)):
        assert sum(named(row)["count"] for row in emitted if row[0] == level) == 300
