"""Which configuration a sweep runs next: order, budget, searches by real runs."""

import msgspec
import pytest
from ftmon.protocol.analysis.estimates.memory import Piece
from ftmon.protocol.analysis.sweep import search, summary
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.sweep.rows import Budget, PhaseFigures, Plan, Planned, Predicted, RankRow, Row, Search

GIB = 1 << 30
MIB = 1 << 20


def planned(name: str, peak: int, fits: bool | None) -> Planned:
    return Planned({"c": name}, Predicted(peak, "backward", peak, peak, fits))


def row(seq: int, repeat: int = 0, ms: float = 100.0, optimizer: int = 10 * GIB) -> Row:
    phases = {"backward": PhaseFigures(8 * GIB + seq * 2 * MIB), "optimizer": PhaseFigures(optimizer)}
    rank = RankRow(0, 3, ms, ms, ms, seq / ms * 1e3, phases)
    return Row({"seq": seq, "zero": 3}, "done", 0.0, 30.0, repeat, ranks=[rank])


def test_the_risky_come_last_or_first_with_fail_fast_and_without_predictions_the_order_stays() -> None:
    runs = [planned("over", 90, False), planned("big", 70, True), Planned({"c": "?"}), planned("small", 5, True)]
    assert [run.settings["c"] for run in search.order(runs, fail_fast=False)] == ["small", "big", "?", "over"]
    assert [run.settings["c"] for run in search.order(runs, fail_fast=True)] == ["over", "?", "big", "small"]
    runs = [Planned({"c": name}) for name in "zaq"]
    assert search.order(runs, fail_fast=False) == search.order(runs, fail_fast=True) == runs


def test_no_run_begins_that_would_not_end_within_the_budget_and_what_is_left_is_time_and_money():
    rows = [row(1), row(2)]
    assert search.why_not_next(Budget(), 1e9, rows, 0.0) == ""
    assert search.why_not_next(Budget(100.0), 69.0, rows, 0.0) == ""
    assert "29 s are left of the budget, and a run takes 30 s" in search.why_not_next(Budget(100.0), 71.0, rows, 0.0)
    assert "used up" in search.why_not_next(Budget(100.0), 100.0, [], 0.0)
    assert "used up" in search.why_not_next(Budget(100.0), 60.0, [], 40.0)
    found = search.left(Budget(7200.0, None, 2.5, 4), 1800.0, [row(1)], 4)
    assert (found.left_seconds, found.used_money, found.left_money) == (5400.0, 5.0, 15.0)
    assert found.expected_seconds == 120.0


def lengths(count: int) -> list[Planned]:
    return [Planned({"seq": seq, "zero": 3}, Predicted(0, "backward", 0, 0, step_seconds=0.2)) for seq in range(count)]


def test_a_plan_has_the_time_of_each_run_and_what_a_coarser_step_saves() -> None:
    budget = Budget(None, None, 3.6, 8)
    runs = search.with_durations(lengths(9), [], 5)
    assert {run.seconds for run in runs} == {search.START_SECONDS + 1}
    shown = Plan(0.0, ProcessId(1, 1), runs, 2, budget)
    assert summary.duration_text(shown, runs[0]) == "41 s (0.33)"
    total, second, fourth = summary.cost_lines(shown, [])
    assert total == "time: about 12 m 18 s (5.90) for 18 runs, 41 s (0.33) a run; 8 x 3.6 an hour"
    assert second == "  every 2nd seq: 10 runs, saves 5 m 28 s (2.62)"
    assert fourth == "  every 4th seq: 6 runs, saves 8 m 12 s (3.94)"
    assert summary.cost_lines(shown, [row(1), row(1, 1)])[0].startswith("time: about 10 m 56 s (5.25) for 16 runs")


def test_the_time_of_a_run_is_that_of_the_measured_ones_and_without_rows_a_plan_has_a_limit():
    runs = search.with_durations(lengths(3), [row(1)], 5)  # 30 s with steps of 100 ms: a start of 29.5 s
    assert [run.seconds for run in runs] == [30.5, 30.0, 30.5]
    assert search.with_durations([Planned({"seq": 7})], [row(1)], 5)[0].seconds == 30.0
    together = search.with_durations(lengths(3), [], 5, "seq")
    assert [run.seconds for run in together] == [search.START_SECONDS + 1, 1.0, 1.0], "one process starts once"
    plan = Plan(0.0, ProcessId(1, 1), [Planned({"seq": 7})], 3, Budget(None, None, 3.6, 2), timeout=600.0)
    (line,) = summary.cost_lines(plan, [])
    assert line.startswith("time: not known before a run is measured; 3 runs take at most 30 m 00 s (3.60)")
    assert "(" not in summary.cost_lines(msgspec.structs.replace(plan, budget=Budget()), [])[0], "no price, no cost"
    (line,) = summary.cost_lines(msgspec.structs.replace(plan, search=Search("largest", "seq")), [])
    assert line.endswith("a run at most 10 m 00 s (1.20)")


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 39, 40, 41, 64, 126, 127, 128, 4096])
@pytest.mark.parametrize("guess", [None, 1, 40, 128])
def test_the_largest_that_fits_is_found_from_any_guess(limit: int, guess: int | None) -> None:
    calls: list[int] = []

    def measure(value: int) -> search.Tried:
        calls.append(value)
        return search.Tried(value <= limit, float(value))

    found = search.largest(measure, 1, 128, 1, guess)
    assert found.value == (min(limit, 128) or None)
    assert found.at_the_end == (limit >= 128)
    assert len(calls) == len(set(calls)) <= 16


def test_a_right_guess_takes_two_runs_and_values_are_multiples_of_the_step_above_the_lowest() -> None:
    found = search.largest(lambda value: search.Tried(value <= 5_310, 0.0), 1, 100_000, 1, 5_310)
    assert (found.value, len(found.tried)) == (5_310, 2)
    found = search.largest(lambda value: search.Tried(value <= 1_000, 0.0), 128, 4_096, 128)
    assert found.value == 896
    assert all((value - 128) % 128 == 0 for value in found.tried)


def test_where_the_phase_changes_is_found_by_few_runs_where_it_is_predicted() -> None:
    runs: list[int] = []

    def measure(seq: int) -> dict[str, float] | None:
        runs.append(seq)
        only_between = {"idle": float(GIB)} if 100 < seq < 900 else {}
        return (
            {"optimizer": 10.0 * GIB, "backward": 8.0 * GIB + seq * 2 * MIB, **only_between} if seq <= 6_000 else None
        )

    predicted = [Piece(1, 1024, "optimizer", 0, 10 * GIB), Piece(1024, 8192, "backward", 2 * MIB, 8 * GIB)]
    points, pieces = search.phase_curve(measure, 1, 8192, predicted)
    assert [piece.phase for piece in pieces] == ["optimizer", "backward"]
    assert pieces[0].end == pytest.approx(1024, abs=2)
    assert len(runs) == len(set(runs)) <= 7
    assert any("idle" in phases for phases in points.values()), "but it is no part of the curve"


def test_repeats_are_pooled_with_their_spread_and_a_run_within_its_warm_up_has_no_figures():
    rows = [row(seq, repeat, ms=100.0 + 2 * repeat) for seq in (128, 512, 1024, 2048, 4096) for repeat in range(3)]
    pooled = summary.pool(rows)
    assert (pooled[0].repeats, pooled[0].step_ms) == (3, summary.Spread(102.0, 100.0, 104.0))
    (curve,) = summary.curves(pooled)
    assert curve.axis == "seq"
    assert [piece.phase for piece in curve.pieces] == ["optimizer", "backward"]
    assert summary.fastest(pooled).settings["seq"] == 4096
    assert any("optimizer leads to 1,024 tokens" in line for line in summary.result_lines(rows, None))
    rows = [Row({"seq": seq, "zero": 3}, "done", 0.0, 30.0, ranks=[RankRow(0)]) for seq in (64, 32)]
    rows += [row(seq) for seq in (128, 512)]
    assert (summary.pool(rows)[0].peak_bytes, summary.pool(rows)[0].step_ms) == (None, None)
    assert [list(curve.points) for curve in summary.curves(summary.pool(rows))] == [[128, 512]]
    assert summary.fastest(summary.pool([rows[0], row(128)])).settings["seq"] == 128
    assert summary.fastest(summary.pool(rows[:2])) is None
    assert summary.result_lines(rows[:2], None) == []
    rows = [
        Row({"seq": seq}, "done", 0.0, ranks=[RankRow(0, 3, 10.0, phases={name: PhaseFigures(GIB)})])
        for seq, name in ((64, "forward"), (128, "backward"))
    ]
    assert summary.curves(summary.pool(rows)) == []


def test_a_resident_set_is_compared_with_no_prediction_for_gpus() -> None:
    sizes = {"forward": GIB, "backward": GIB + 2**20}
    figures = {name: PhaseFigures(size // 2, resident_peak_bytes=size) for name, size in sizes.items()}
    expected = Predicted(GIB // 8, "backward", GIB // 8, GIB // 8, True)
    rows = [
        Row({"seq": seq}, "done", 0.0, ranks=[RankRow(0, 3, 10.0, phases=figures)], predicted=expected)
        for seq in (64, 128)
    ]
    assert "predicted" not in summary.row_text(rows[0])
    assert summary.table(summary.pool(rows))[1] == ["64", "1.00 GiB", "backward", "", "10.0", "", "done"]
    assert "peak by seq: backward and forward tie" in summary.result_lines(rows, None), (
        "they differ by less than its error"
    )


def test_a_failure_says_where_and_what_was_asked_for() -> None:
    failed = Row({"seq": 9}, "out-of-memory", 0.0, phase="backward", rank=1, step=3, asked_bytes=3 * GIB)
    assert summary.row_text(failed) == "out of memory in backward, rank 1, step 3: asked for 3.00 GiB"
    assert summary.table(summary.pool([row(1), failed]))[2][-1].startswith("out of memory in backward")
    assert summary.pool([row(1), Row({"seq": 1, "zero": 3}, "hang", 0.0, repeat=1)])[0].verdict == "hang"


def test_a_table_shows_the_figures_that_were_asked_for() -> None:
    other = RankRow(
        1, 3, 250.0, 240.0, 260.0, 30.0, {"backward": PhaseFigures(3 * GIB, 5 * GIB, host_ms=40.0, device_ms=70.0)},
        reserved_peak_bytes=6 * GIB, loss=2.0,
    )  # fmt: skip
    both = Row({"seq": 64}, "done", 0.0, 30.0, ranks=[*row(64).ranks, other])
    wanted = [
        "peak", "backward.ms", "backward.reserved", "reserved", "loss", "step_ms", "tokens_per_second", "eval.peak",
    ]  # fmt: skip
    assert summary.table(summary.pool([both]), wanted) == [
        ["seq", *wanted, "result"],
        ["64", "10.00 GiB", "70.0", "5.00 GiB", "6.00 GiB", "2.0000", "250.0", "670", "", "done"],
    ]
    assert summary.value(both, "forward.peak") is None
    repeated = [row(1, number, ms) for number, ms in enumerate((100.0, 104.0, 110.0))]
    assert summary.table(summary.pool(repeated), ["step_ms"])[1] == ["1", "3", "104.0 ±5.0", "done"]


@pytest.mark.parametrize(
    "name", ["peaks", "backward", "backward.", ".peak", "banana.peak", "backward.loss", "init.peak"]
)
def test_a_figure_that_no_run_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"are peak, reserved, nvml, step_ms, .*PHASE\.ms"):
        summary.check(name)
