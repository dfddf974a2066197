"""Peaks over the sequence length as straight pieces, and CSV files of others' measurements."""

import json
from itertools import pairwise
from typing import Any

import pytest
from ftmon.protocol.analysis.estimates.memory import (
    WHOLE_STEP,
    Band,
    CsvMapping,
    Piece,
    bands,
    guess_mapping,
    pieces,
    read_csv,
    sample_curve,
)
from ftmon.protocol.analysis.words import describe_curve
from places import DATA

MIB = 2**20
MEASURED = [json.loads(line) for line in (DATA / "h200_peaks.jsonl").read_text().splitlines()]


def points_of_runs(one: dict[str, Any], without: int = 0) -> dict[int, dict[str, float]]:
    return {
        int(length): {phase: peaks[0] * MIB for phase, peaks in phases.items()}
        for length, phases in one["peaks_mib"].items()
        if int(length) != without
    }


def peak_at(curve: list[Piece], length: float) -> float:
    """Return the peak at a length, bytes; beyond the curve its last piece goes on."""
    return next((piece for piece in curve if length <= piece.end), curve[-1]).at(length)


def phases(length: int) -> dict[str, float]:
    """A made-up training: the optimizer leads to 500 tokens, then backward, which bends at 2,000."""
    backward = max(9000 + 2 * length, 6000 + 3.5 * length)
    return {"forward": (4000 + 2 * length) * MIB, "backward": backward * MIB, "optimizer": 10_000.0 * MIB}


def test_pieces_meet_at_exact_crossovers_cover_the_range_and_hold_the_measured_points():
    for one in MEASURED:
        measured = points_of_runs(one)
        curve = pieces(measured)
        assert (curve[0].start, curve[-1].end) == (min(measured), max(measured))
        assert all(first.end == second.start for first, second in pairwise(curve))
        for length, peaks in measured.items():
            assert peak_at(curve, length) == pytest.approx(max(peaks.values()), rel=0.004)
    curve = pieces({length: phases(length) for length in (1, 128, 256, 1024, 1500, 3000, 3500, 4096)})
    expected = [("optimizer", 1, 500), ("backward", 500, 2000), ("backward", 2000, 4096)]
    assert [(piece.phase, round(piece.start), round(piece.end)) for piece in curve] == expected
    assert [round(piece.slope_bytes / MIB, 6) for piece in curve] == [0, 2, 3.5]
    assert describe_curve(curve) == (
        "optimizer leads to 500 tokens, then backward at +2.0 MiB a token to 2,000 tokens, then at +3.5 MiB a token"
    )


def test_measured_lengths_that_were_held_out_are_predicted_within_one_percent() -> None:
    errors: dict[tuple[str, int], float] = {}
    for number, one in enumerate(MEASURED):
        for length in sorted(points_of_runs(one))[1:-1]:
            measured = max(points_of_runs(one)[length].values())
            predicted = peak_at(pieces(points_of_runs(one, without=length)), length)
            errors[f"{one['model']} {number}", length] = abs(predicted / measured - 1)
    assert len(errors) >= 60
    off = {case: error for case, error in errors.items() if error > 0.01}
    # Two cannot be known without the point itself: the only one on a slope but for the end, and the one at a kink.
    assert len(off) <= 2, off
    assert sorted(errors.values())[len(errors) // 2] < 0.002


def test_a_flat_curve_one_point_and_a_small_slope_are_one_piece_and_thousands_of_noisy_points_are_few():
    curve = pieces({length: {"optimizer": 5e9, "backward": 3e9} for length in (1, 2, 3, 900)})
    assert curve == [Piece(1, 900, "optimizer", pytest.approx(0, abs=1e-3), pytest.approx(5e9))]
    assert describe_curve(curve) == "optimizer leads"
    assert pieces({512: {"backward": 7.0}}) == [Piece(512, 512, "backward", 0, 7)]
    small = pieces({x: {"backward": 1e6 + x * 2048.0} for x in (64, 128, 256)})
    assert describe_curve(small) == "backward leads at +2.0 KiB a token"
    curve = pieces({x: {name: y + (x * 7919 % 13) * MIB for name, y in phases(x).items()} for x in range(1, 4097)})
    assert curve[0].phase == "optimizer"
    assert curve[0].end == pytest.approx(500, abs=8)
    assert len(curve) <= 5
    assert curve[-1].slope_bytes / MIB == pytest.approx(3.5, rel=0.01)


def test_phases_that_are_as_high_as_each_other_tie_and_none_leads() -> None:
    noise = {64: 0.0, 128: 0.0009, 256: -0.0008, 512: 0.0007}
    flat = {x: {"forward": 5e9, "backward": 5e9 * (1 + noise[x]), "optimizer": 5e9, "data": 4e9} for x in noise}
    (piece,) = pieces(flat)
    assert {piece.phase, *piece.tied} == {"forward", "backward", "optimizer"}
    assert describe_curve([piece]) == "backward, forward and optimizer tie"
    rising = {x: {"forward": 5e9, "backward": max(5e9, x * 1e7)} for x in (100, 200, 300, 400, 500, 600, 700, 800, 900)}
    expected = "backward and forward tie to 500 tokens, then backward at +9.5 MiB a token"
    assert describe_curve(pieces(rising)) == expected


def test_points_without_a_phase_are_refused_and_a_curve_without_phases_is_flat_then_straight():
    with pytest.raises(ValueError, match="same phases"):
        pieces({1: {"forward": 1.0}, 2: {"backward": 1.0}})
    with pytest.raises(ValueError, match="at least one point"):
        pieces({})
    curve = pieces(
        {length: {WHOLE_STEP: max(9800.0, 7000 + 5.6 * length) * MIB} for length in (1, 128, 256, 1024, 2048)}
    )
    assert describe_curve(curve) == "flat to 500 tokens, then at +5.6 MiB a token"


def test_a_curve_is_sampled_only_where_it_bends() -> None:
    calls: list[int] = []

    def predict(length: int) -> dict[str, float]:
        calls.append(length)
        return phases(length)

    found = sample_curve(predict, 1, 4096)
    assert len(calls) == len(set(calls)) == len(found) <= 16
    curve = pieces(found)
    for length in (300, 499, 501, 1900, 2100, 4000):
        assert peak_at(curve, length) == pytest.approx(max(phases(length).values()), rel=0.005)


WIDE = """sequence_length,iteration,gpu 0 active (MiB),gpu 0 allocated (MiB),gpu 0 reserved (MiB),gpu 1 active (MiB),\
gpu 1 allocated (MiB),gpu 1 reserved (MiB)
1,0,9800,9900,10000,9700,9800,9900
1,1,9500,9600,9900,9400,9500,9800
512,0,9500,9600,9900,9400,9500,9800
"""


def test_one_row_a_length_with_columns_for_each_gpu_is_read() -> None:
    mapping = guess_mapping(WIDE)
    assert mapping == CsvMapping(
        "sequence_length",
        {
            "active": "gpu {rank} active (MiB)",
            "allocated": "gpu {rank} allocated (MiB)",
            "reserved": "gpu {rank} reserved (MiB)",
        },
        iteration="iteration",
    )
    rows = read_csv(WIDE, mapping)
    expected = [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (512, 0, 0), (512, 0, 1)]
    assert [(one.length, one.iteration, one.rank) for one in rows] == expected
    assert rows[3].figures == {"active": 9400 * MIB, "allocated": 9500 * MIB, "reserved": 9800 * MIB}


def test_one_row_a_rank_is_read_in_its_unit_a_rate_is_a_median_and_bands_are_over_ranks():
    text = "Seq Len,Rank,Peak Allocated GB\n128,0,1.5\n128,1,1.25\n\n256,0,2\n"
    mapping = guess_mapping(text)
    assert mapping == CsvMapping("Seq Len", {"allocated_peak": "Peak Allocated GB"}, rank="Rank", unit="GB")
    assert [(one.length, one.rank, one.figures) for one in read_csv(text, mapping)] == [
        (128, 0, {"allocated_peak": 1_500_000_000}),
        (128, 1, {"allocated_peak": 1_250_000_000}),
        (256, 0, {"allocated_peak": 2_000_000_000}),
    ]
    text = "seq,gpu0_allocated,gpu1_allocated,iterations_per_second\n8,1,2,4\n8,1,2,1\n8,1,2,3\n"
    mapping = CsvMapping("seq", {"allocated": "gpu{rank}_allocated", "iterations_per_second": "iterations_per_second"})
    assert bands(read_csv(text, mapping), "iterations_per_second") == [Band(8, 3, 3, 3, 2)]
    alone = "seq,its\n8,4\n"
    assert [one.figures for one in read_csv(alone, guess_mapping(alone))] == [{"its": 4.0}]
    found = bands(read_csv(WIDE, guess_mapping(WIDE)), "allocated")
    assert found == [
        Band(1, 9800 * MIB, 9850 * MIB, 9900 * MIB, 2), Band(512, 9500 * MIB, 9550 * MIB, 9600 * MIB, 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no measurement has a figure nvml"):
        bands(read_csv(WIDE, guess_mapping(WIDE)), "nvml")


@pytest.mark.parametrize("column", ["allocated_bytes", "Allocated (bytes)", "allocated [byte]", "allocated B"])
def test_a_column_in_bytes_is_read_as_bytes(column: str) -> None:
    text = f"length,{column}\n128,1048576\n"
    assert read_csv(text, guess_mapping(text))[0].figures == {"allocated": MIB}


UNNAMED = """512, 0, 0, 9000, 10000, 1.5
512, 8000, 9500, 0, 0, 1.75

1024, 0, 0, 10000, 11000, 0.5
1024, 9000, 10500, 0, 0, 0.75
2048, OOM
"""
"""Each of two ranks has written a row with its own GPU's figures alone."""
OF_TWO_RANKS = "length,gpu_0_allocated_MiB,gpu_0_reserved_MiB,gpu_1_allocated_MiB,gpu_1_reserved_MiB"


@pytest.mark.parametrize("header", ["", *(f"{OF_TWO_RANKS},{rate}\n" for rate in ("its", "it/s", "Iterations/second"))])
def test_a_row_a_rank_with_zeros_for_the_other_gpus_has_its_own_figures_alone(header: str) -> None:
    text = header + UNNAMED
    found = read_csv(text, guess_mapping(text))
    assert [(one.length, one.rank, one.figures) for one in found] == [
        (512, 1, {"allocated": 9000 * MIB, "reserved": 10000 * MIB, "its": 1.5}),
        (512, 0, {"allocated": 8000 * MIB, "reserved": 9500 * MIB, "its": 1.75}),
        (1024, 1, {"allocated": 10000 * MIB, "reserved": 11000 * MIB, "its": 0.5}),
        (1024, 0, {"allocated": 9000 * MIB, "reserved": 10500 * MIB, "its": 0.75}),
        (2048, 0, {}),
    ]
    assert bands(found, "allocated")[0] == Band(512, 8000 * MIB, 8500 * MIB, 9000 * MIB, 2)
    assert bands(found, "its") == [Band(512, 1.5, 1.625, 1.75, 2), Band(1024, 0.5, 0.625, 0.75, 2)]


def test_the_length_of_a_file_without_a_header_may_be_named_and_columns_of_counts_are_no_rates() -> None:
    assert guess_mapping(UNNAMED, "micro_batch").length == "micro_batch"
    assert set(guess_mapping("seq,steps,iterations,allocated\n8,30,30,5\n").figures) == {"allocated"}


@pytest.mark.parametrize(
    ("text", "mapping", "said"),
    [
        ("a,b\n1,2\n", CsvMapping("length", {"allocated": "b"}), "column length is not in the file, which has a, b"),
        ("a,b\n1,2\n", CsvMapping("a", {"allocated": "gpu{rank}"}), "no column matches gpu{rank}"),
        ("a,b\n1,x\n", CsvMapping("a", {"allocated": "b"}), "line 2, column b: 'x' is no number"),
        ("a,b\n1,-4\n", CsvMapping("a", {"allocated": "b"}), "line 2, column b: '-4' is no number of 0 or more"),
        ("a,b\n1.5,4\n", CsvMapping("a", {"allocated": "b"}), "line 2, column a: '1.5' is no whole number"),
        ("a,b\n1,2\n\n1,nan\n", CsvMapping("a", {"allocated": "b"}), "line 4, column b"),
        ("a,b\n1,2,3\n", CsvMapping("a", {"allocated": "b"}), "line 2: 3 columns, the first line has 2"),
        ("a,b\n", CsvMapping("a", {"allocated": "b"}), "no measurements"),
        ("", CsvMapping("a", {"allocated": "b"}), "is empty"),
        ("a;b\n1;2\n", CsvMapping("a", {"allocated": "b"}), "its columns are separated by semicolons, not by commas"),
        ("a\tb\n1\t2\n", CsvMapping("a", {"allocated": "b"}), "its columns are separated by tabs"),
        ("a,a,b\n1,1,2\n", CsvMapping("a", {"allocated": "b"}), "column a is in the file 2 times"),
        ("a,b\n1,2\n", CsvMapping("a", {"allocated": "b"}, unit="pages"), "unit must be one of B, KiB, MiB"),
        ("a,b\n1,2\n", CsvMapping("a", {}), "the mapping names no figure"),
        ("a,b\n1,0\n", CsvMapping("a", {"allocated": "b"}), "no measurements: every figure is 0 or empty"),
        ("1,0,0,0\n", CsvMapping("a", {"allocated": "gpu_0_allocated_MiB"}), "every figure is 0 or empty"),
        ("1,2,3\n1,2\n", CsvMapping("a", {"allocated": "gpu_0_allocated_MiB"}), "line 2: 2 columns, the first"),
        ("1,2\n", CsvMapping("a", {"allocated": "b"}), "has no header, and 2 columns: without one it must have"),
    ],
)
def test_a_file_that_does_not_match_is_refused_in_one_line(text: str, mapping: CsvMapping, said: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011  (what is said is compared below)
        read_csv(text, mapping)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("header", "said"),
    [("foo,allocated", "no column looks like a length"), ("seq_len,bar", "no column looks like a figure")],
)
def test_a_header_that_suggests_nothing_asks_for_a_mapping(header: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        guess_mapping(header + "\n1,2\n")
