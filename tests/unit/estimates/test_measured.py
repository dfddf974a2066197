"""CSV files of others' measurements."""

import pytest
from ftmon.protocol.analysis.estimates.memory import CsvMapping, bands, guess_mapping, pieces, points, read_csv
from ftmon.protocol.analysis.words import describe_curve

MIB = 2**20
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
    assert [(one.length, one.iteration, one.rank) for one in rows] == [
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (512, 0, 0), (512, 0, 1),
    ]  # fmt: skip
    assert rows[3].figures == {"active": 9400 * MIB, "allocated": 9500 * MIB, "reserved": 9800 * MIB}


def test_one_row_a_rank_is_read_in_its_unit() -> None:
    text = "Seq Len,Rank,Peak Allocated GB\n128,0,1.5\n128,1,1.25\n\n256,0,2\n"
    mapping = guess_mapping(text)
    assert mapping == CsvMapping("Seq Len", {"allocated_peak": "Peak Allocated GB"}, rank="Rank", unit="GB")
    assert [(one.length, one.rank, one.figures) for one in read_csv(text, mapping)] == [
        (128, 0, {"allocated_peak": 1_500_000_000}),
        (128, 1, {"allocated_peak": 1_250_000_000}),
        (256, 0, {"allocated_peak": 2_000_000_000}),
    ]


@pytest.mark.parametrize("column", ["allocated_bytes", "Allocated (bytes)", "allocated [byte]", "allocated B"])
def test_a_column_in_bytes_is_read_as_bytes(column: str) -> None:
    text = f"length,{column}\n128,1048576\n"
    assert read_csv(text, guess_mapping(text))[0].figures == {"allocated": MIB}


def test_bands_are_over_ranks_and_without_the_warm_up() -> None:
    rows = read_csv(WIDE, guess_mapping(WIDE))
    with_all, without = bands(rows, "allocated"), bands(rows, "allocated", warm_up=1)
    assert (with_all[0].lowest, with_all[0].highest) == (9800 * MIB, 9900 * MIB)
    assert (without[0].lowest, without[0].median, without[0].highest) == (9500 * MIB, 9550 * MIB, 9600 * MIB)
    assert (without[1].length, without[1].highest) == (512, 9600 * MIB)


def test_a_measured_curve_is_explained_as_pieces() -> None:
    lines = [f"{length},{max(9800.0, 7000 + 5.6 * length):.2f}" for length in range(1, 2049)]
    rows = read_csv("length,allocated MiB\n" + "\n".join(lines), CsvMapping("length", {"allocated": "allocated MiB"}))
    curve = pieces(points(bands(rows, "allocated")))
    assert len(curve) == 2
    assert curve[0].end == pytest.approx(500, abs=8)
    words = describe_curve(curve)
    assert words.startswith("flat to ")
    assert words.endswith(" tokens, then at +5.6 MiB a token")


@pytest.mark.parametrize(
    ("text", "mapping", "said"),
    [
        ("a,b\n1,2\n", CsvMapping("length", {"allocated": "b"}), "column length is not in the file, which has a, b"),
        ("a,b\n1,2\n", CsvMapping("a", {"allocated": "gpu{rank}"}), "no column matches gpu{rank}"),
        ("a,b\n1,x\n", CsvMapping("a", {"allocated": "b"}), "line 2, column b: 'x' is no number"),
        ("a,b\n1,-4\n", CsvMapping("a", {"allocated": "b"}), "line 2, column b: '-4' is no number of 0 or more"),
        ("a,b\n1.5,4\n", CsvMapping("a", {"allocated": "b"}), "line 2, column a: '1.5' is no whole number"),
        ("a,b\n1,2\n\n1,nan\n", CsvMapping("a", {"allocated": "b"}), "line 4, column b"),
        ("a,b\n1,2,3\n", CsvMapping("a", {"allocated": "b"}), "line 2: 3 columns, the header has 2"),
        ("a,b\n", CsvMapping("a", {"allocated": "b"}), "no measurements"),
        ("", CsvMapping("a", {"allocated": "b"}), "is empty"),
        ("a;b\n1;2\n", CsvMapping("a", {"allocated": "b"}), "its columns are separated by semicolons, not by commas"),
        ("a\tb\n1\t2\n", CsvMapping("a", {"allocated": "b"}), "its columns are separated by tabs"),
        ("a,a,b\n1,1,2\n", CsvMapping("a", {"allocated": "b"}), "column a is in the file 2 times"),
        ("a,b\n1,2\n", CsvMapping("a", {"allocated": "b"}, unit="pages"), "unit must be one of B, KiB, MiB"),
        ("a,b\n1,2\n", CsvMapping("a", {}), "the mapping names no figure"),
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


def test_a_figure_without_measurements_is_refused() -> None:
    with pytest.raises(ValueError, match="no measurement has a figure nvml"):
        bands(read_csv(WIDE, guess_mapping(WIDE)), "nvml")
