"""DeepSpeed's estimate beside a prediction, and each part as a sum made by hand."""

import re
from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.estimates.memory import Piece, reaches
from ftmon.trainer.predict import explain
from ftmon.trainer.predict.answer import render
from ftmon.trainer.predict.result import Estimate, Made, Phase, Point, Prediction, Rank

GIB = 1 << 30
ESTIMATE = Estimate("estimate_zero3_model_states_mem_needs", 20 * GIB, "525 M of the largest layer x 4 bytes + states")
LLAMA = Made(
    largest_layer=525_336_576, layers=32, hidden=4096, vocabulary=128_256, weight_bytes=2, gradient_bytes=2,
    stage=3, offloads_states=False, offloads_weights=False, checkpointing=True, bucket_elements=500_000_000,
    buckets=1, estimate=ESTIMATE,
)  # fmt: skip
PARAMETERS = 8_030_261_248
PARTS = {"parameters": 3 * GIB, "optimizer_states": 8 * GIB, "buckets": GIB, "activations": 9 * GIB, "temporaries": GIB}
OTHERS = {name: Phase(GIB, 2 * GIB) for name in ("init", "forward", "optimizer")}
BACKWARD = Phase(22 * GIB, 25 * GIB, PARTS, {"activations": 4 * GIB})


def found(stage: int = 3, lengths: tuple[int, ...] = (1024,), **more: Any) -> Prediction:
    points = [Point(length, 1, [Rank(0, {**OTHERS, "backward": BACKWARD}, 0)], 0, 26 * GIB) for length in lengths]
    made = msgspec.structs.replace(LLAMA, stage=stage, **more)
    return Prediction("llama", PARAMETERS, 8, points, trainable=PARAMETERS, made=made, versions={"deepspeed": "0.19.8"})


def test_what_the_estimate_leaves_out_adds_up_to_the_reserved_peak() -> None:
    (point,) = found().points
    sizes = explain.left_out(point, found())
    assert sum(sizes.values()) == 25 * GIB
    own = PARAMETERS * 2 // 8
    assert (sizes["gathered"], sizes["states"]) == (3 * GIB - own, own + 8 * GIB)
    assert (sizes["activations"], sizes["logits"]) == (5 * GIB, 4 * GIB), "logits are no second time in activations"
    assert (sizes["buckets"], sizes["temporaries"], sizes["fragmentation"]) == (GIB, GIB, 3 * GIB)
    whole = explain.left_out(point, found(2))
    assert whole["gathered"] == 0, "only ZeRO-3 gathers parameters"


def test_the_answer_has_the_estimate_beside_the_prediction_and_many_lengths_fit_80_columns():
    text = render(found())
    assert "DeepSpeed's estimate: 525 M of the largest layer x 4 bytes + states = 20.00 GiB" in text
    assert "(estimate_zero3_model_states_mem_needs, DeepSpeed 0.19.8)" in text
    assert re.search(r"^at tokens +1,024$", text, re.MULTILINE)
    assert re.search(r"^= reserved +25\.00 GiB\nestimate off by +-5\.00 GiB$", text, re.MULTILINE)
    assert "estimate" not in render(
        msgspec.structs.replace(found(), made=msgspec.structs.replace(LLAMA, estimate=None))
    )
    lines = render(found(lengths=tuple(range(64, 64 * 12, 64)))).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("at tokens"))
    assert lines[head].split()[2:] == ["64", "192", "384", "512", "704"]
    assert max(map(len, lines[head : head + 10])) <= 80


@pytest.mark.parametrize(
    ("gib", "words"),
    [(5, "is above the estimate at every length from 512 tokens on"), (19, "meets the estimate at 1,536 tokens")],
)
def test_the_line_over_lengths_meets_the_estimate(gib: int, words: str) -> None:
    size = msgspec.structs.replace(ESTIMATE, bytes=gib * GIB)
    curve = [Piece(512, 1024, "optimizer", 0.0, 18 * GIB), Piece(1024, 4096, "backward", GIB / 512, 16 * GIB)]
    many = msgspec.structs.replace(found(estimate=size), pieces=curve)
    assert words in explain.meets(many)
    assert words in render(many)
    above = msgspec.structs.replace(found(estimate=msgspec.structs.replace(ESTIMATE, bytes=99 * GIB)), pieces=curve)
    assert explain.meets(above).endswith("stays below the estimate up to 4,096 tokens")
    assert explain.meets(found()) == "", "one length makes no line"
    assert reaches(curve, 18 * GIB) == 512


def test_each_part_is_a_sum_made_by_hand() -> None:
    parts = {part.name: part for part in explain.parts(found(), None, {"parameters": 7})}
    weights = parts["parameters"]
    assert (weights.formula, weights.bytes) == ("8.03 B x 2 bytes / 8 ranks", PARAMETERS * 2 // 8)
    assert (weights.predicted_bytes, weights.measured_bytes) == (3 * GIB, 7)
    assert parts["optimizer_states"].bytes == PARAMETERS * 8 // 8
    assert parts["gradients"].bytes == PARAMETERS * 2 // 8
    assert parts["master_copies"].bytes == PARAMETERS * 4 // 8
    assert parts["buckets"].formula == "500 M x 2 bytes x 1 bucket"
    assert parts["activations"].formula == "32 layers x 1,024 tokens x 4,096 units x 2 bytes"
    assert parts["activations"].predicted_bytes == 5 * GIB
    assert parts["logits"].bytes == 1024 * 128_256 * (2 + 4 + 4)
    assert parts["logits"].predicted_bytes == 4 * GIB
    assert parts["logits"].measured_bytes is None
    text = render(msgspec.structs.replace(found(), explained=list(parts.values())))
    assert re.search(r"^parameters +3\.00 GiB +0\.0 KiB +8\.03 B x 2 bytes / 8 ranks = 1\.87 GiB$", text, re.MULTILINE)
    assert "measured" in text
    assert "not fused" not in text
    fused = [msgspec.structs.replace(parts["logits"], predicted_bytes=1)]
    assert "logits by hand are those of a loss that is not fused" in render(
        msgspec.structs.replace(found(), explained=fused)
    )


def test_gradients_have_a_type_of_their_own_and_what_is_offloaded_is_on_the_host():
    parts = {part.name: part for part in explain.parts(found(gradient_bytes=4), None, {})}
    assert (parts["gradients"].bytes, parts["buckets"].bytes) == (PARAMETERS * 4 // 8, 500_000_000 * 4)
    assert "buckets" not in {part.name for part in explain.parts(found(1, bucket_elements=0), None, {})}
    parts = {part.name: part for part in explain.parts(found(2, offloads_states=True), None, {})}
    expected = {*("gradients", "master_copies", "optimizer_states")}
    assert {name for name, part in parts.items() if part.formula == "on the host"} == expected
    assert parts["parameters"].bytes == PARAMETERS * 2


@pytest.mark.parametrize(("stage", "shared"), [(0, 0), (1, 2), (2, 3), (3, 4)])
def test_a_higher_stage_shares_more_parts(stage: int, shared: int) -> None:
    parts = explain.parts(found(stage), None, {})
    assert sum("/ 8 ranks" in part.formula for part in parts) == shared
    assert all(part.measured_bytes is None for part in parts)


@pytest.mark.parametrize(
    ("count", "text"),
    [(8_030_261_248, "8.03 B"), (494_032_768, "494 M"), (12_345, "12.3 K"), (512, "512"), (999_600, "1.00 M")],
)
def test_a_number_in_three_digits(count: int, text: str) -> None:
    assert explain.amount(count) == text
