"""A prediction as text."""

import msgspec
import pytest
from ftmon.protocol.analysis.estimates.memory import Piece
from ftmon.protocol.analysis.estimates.ranking import Largest
from ftmon.trainer.predict.answer import render
from ftmon.trainer.predict.result import Holds, Phase, Point, Prediction, Rank, WhatIf

GIB = 1 << 30
PHASES = {name: Phase(GIB, 2 * GIB) for name in ("init", "forward", "backward", "optimizer")}
FOUND = Prediction(
    model="m.json", parameters=1000, ranks=1, points=[Point(512, 2, [Rank(0, PHASES, 0)], 0, 3 * GIB)],
    gpu="H200 141 GB", positions=4096,
)  # fmt: skip


def table(text: str, first: str) -> list[list[str]]:
    """Return the cells of a table's heading, whose line starts with ``first``, and of the two rows below it."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    return [[cell.strip() for cell in line.split("  ") if cell] for line in lines[begin : begin + 3]]


@pytest.mark.parametrize("price", [None, 2.0])
def test_a_change_has_its_cost_where_a_price_is_known(price: float | None) -> None:
    changes = [
        WhatIf("checkpointing", "--checkpointing", True, GIB, GIB, 0, 0.5, 1.25, price and 0.125),
        WhatIf("ZeRO 3", "stage=3", False, 0, 0, 0, 0.0, 0.0, refused="it cannot be"),
    ]
    text = render(msgspec.structs.replace(FOUND, what_if=changes, price_per_gpu_hour=price))
    names, known, refused = table(text, "what if")
    paid = [] if price is None else ["0.125"]
    assert names[-2 - len(paid) :] == ["GPU time", *(["1M tokens"] if paid else []), "set"]
    assert known == ["checkpointing", "yes", "1.00", "0.00", "500", "x 1.25", *paid, "--checkpointing"]
    assert refused == ["ZeRO 3", *["-"] * (5 + len(paid)), "it cannot be"]


def test_changes_fit_a_narrow_terminal_whole_with_what_to_set_below() -> None:
    change = "model.gradient_checkpointing=layers zero.offload_optimizer=true training.micro_batch=2"
    changes = [WhatIf("checkpointing + optimizer offload", change, True, GIB, GIB, 0, 123.4, 1.25, 0.125, fitted=True)]
    found = msgspec.structs.replace(FOUND, what_if=changes, price_per_gpu_hour=2.0)
    wide, narrow = render(found, 200), render(found, 80)
    assert any(line.endswith(f"0.125  {change}") for line in wide.splitlines())
    lines = narrow.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("what if"))
    table = lines[begin : begin + 6]
    assert max(map(len, table)) <= 80
    assert table[1] == "    set"
    assert table[2].startswith("checkpointing +")
    assert table[2].endswith("0.125")
    assert table[3] == "offload"
    assert " ".join(map(str.strip, table[4:])) == change


def test_a_reserved_peak_above_a_gpu_that_suffices_is_explained_and_a_size_that_just_suffices_is_tight():
    (point,) = FOUND.points
    point = msgspec.structs.replace(point, needed_bytes=60 * GIB, nvml_bytes=81 * GIB, fits_on=["H100 80 GB"])
    for gpu, said in (("H100 80 GB", True), ("H200 141 GB", False)):
        text = render(msgspec.structs.replace(FOUND, points=[point], gpu=gpu))
        assert ("on which PyTorch frees cached blocks instead" in text) is said
    point = msgspec.structs.replace(point, needed_bytes=3 * GIB, fits=False, fails_in="backward")
    for tight, verdict in ((True, "tight"), (False, "no: backward")):
        points = [msgspec.structs.replace(point, tight=tight)]
        text = render(msgspec.structs.replace(FOUND, points=points, capacity_bytes=2 * GIB))
        assert table(text, "tokens")[1][-1] == verdict
        assert ("2.00 GiB or less happen to suffice, but some sizes up to 3.00 GiB do not" in text) is tight


def test_the_largest_that_fits_says_where_the_search_ended() -> None:
    largest = [
        Holds("T4 16 GB", 14 * GIB, Largest(1136, 1144), Largest(None, 1)),
        Holds("B300 288 GB", 266 * GIB, Largest(4096, None), Largest(1024, None)),
    ]
    text = render(msgspec.structs.replace(FOUND, largest=largest))
    names, small, large = table(text, "largest that fits")
    assert names == ["largest that fits", "GiB for PyTorch", "tokens at batch 2", "batch at 512 tokens"]
    assert small == ["T4 16 GB", "14.00", "1,136", "none"]
    assert large == ["B300 288 GB", "266.00", "4,096 (the model's)", "1,024 or more"]


def test_a_slope_between_two_lengths_is_called_an_average() -> None:
    (point,) = FOUND.points
    points = [msgspec.structs.replace(point, sequence_length=length) for length in (512, 1024, 2048)]
    curve = [Piece(512, 2048, "backward", 1 << 20, GIB)]
    for count, said in ((2, True), (3, False)):
        text = render(msgspec.structs.replace(FOUND, points=points[:count], pieces=curve))
        (line,) = (line for line in text.splitlines() if line.startswith("backward leads at +1.0 MiB a token"))
        assert ("on average" in line) is said


def test_a_name_from_somebody_elses_configuration_cannot_reach_the_terminal_as_an_escape() -> None:
    notes = ["ds.json: unknown key \x1b]52;c;eHg=\x07\x9b2J\u202e is ignored by DeepSpeed"]
    text = render(msgspec.structs.replace(FOUND, model="m\x1b[2J.json", notes=notes))
    assert text.startswith("m.json: 1,000 parameters")
    assert text.replace("\n", "").replace("\ufffd", "").isprintable()
