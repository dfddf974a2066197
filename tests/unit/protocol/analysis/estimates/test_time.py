"""Memory beside PyTorch's, time, disk, money, the what-if table; measured peaks beside predicted ones."""

import json

import pytest
from ftmon.protocol.analysis.estimates import time as times
from ftmon.protocol.analysis.estimates.memory import beside_pytorch, checkpoint_bytes
from ftmon.protocol.analysis.estimates.ranking import Option, rank
from ftmon.protocol.analysis.words import comparison_sentences
from ftmon.protocol.host.machine import FIT_TABLE, GPUS, find_gpu
from ftmon.protocol.messages.memory import PredictedPhase, PredictedPoint, Prediction
from places import DATA, ROOT

MIB, GIB = 2**20, 2**30
H200 = find_gpu("NVIDIA H200")
assert H200 is not None


def test_memory_beside_pytorch_is_met_on_every_measured_rank_and_wider_where_none_was():
    checked = 0
    for line in (DATA / "h200_peaks.jsonl").read_text().splitlines():
        one = json.loads(line)
        if one["nvml_used_mib"] is None:
            continue
        reserved = max(peaks[1] for phases in one["peaks_mib"].values() for peaks in phases.values())
        beside = beside_pytorch(one["world_size"], 1, one["offload_optimizer"])
        assert reserved * MIB + beside.value == pytest.approx(one["nvml_used_mib"] * MIB, rel=0.002)
        assert beside.value == pytest.approx((one["nvml_used_mib"] - reserved) * MIB, rel=beside.error)
        checked += 1
    assert checked >= 5
    one, two, four, eight = (beside_pytorch(ranks, 1, offload=False) for ranks in (1, 2, 4, 8))
    assert one.value < two.value < four.value == eight.value
    assert eight.error > four.error
    elsewhere = beside_pytorch(4, 1, offload=False, device="NVIDIA A100-SXM4-80GB")
    assert elsewhere.error > four.error
    assert "not on this GPU" in elsewhere.basis
    assert "several hosts" in beside_pytorch(4, 2, offload=False).basis


def test_every_gpu_is_found_by_its_title_and_the_fit_table_is_in_order_with_known_bandwidths():
    assert all(find_gpu(gpu.title) is gpu for gpu in FIT_TABLE)
    for name, gib in (
        ("NVIDIA A100-SXM4-80GB", 79.25), ("NVIDIA A100 80GB PCIe", 79.25), ("NVIDIA A100-SXM4-40GB", 39.39),
        ("NVIDIA A100-PCIE-40GB", 39.39), ("NVIDIA H100 80GB HBM3", 79.11), ("NVIDIA H100 PCIe", 79.11),
        ("NVIDIA H100 NVL", 93.0), ("Tesla V100-SXM2-32GB", 31.74), ("Tesla V100-SXM2-16GB", 15.77),
        ("NVIDIA GeForce RTX 4090", 23.64), ("NVIDIA B200", 178.35), ("NVIDIA B300 SXM6 AC", 267.69),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.97),
    ):  # fmt: skip
        gpu = find_gpu(name)
        assert gpu is not None, name
        assert gpu.memory_gib == gib
    assert find_gpu("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None
    assert find_gpu("cpu") is None
    sizes = [gpu.memory_gib for gpu in FIT_TABLE]
    assert sizes == sorted(sizes)
    assert (FIT_TABLE[0].title, FIT_TABLE[-1].title) == ("RTX 4060 8 GB", "B300 288 GB")
    assert all(0.85 < gpu.memory_gib / float(gpu.title.split()[-2]) < 1 for gpu in FIT_TABLE)
    assert all(gpu.memory_gbs > gpu.link_gbs >= 16 and gpu.host_gbs >= 16 for gpu in GPUS)


FLOPS, BYTES = 989.4e12 * times.BUSY, 4800e9 * times.BUSY
TENTH = times.Operation(flops=FLOPS * 0.1 * times.ARITHMETIC)
GATHERED = 450e9 * 0.4 * 0.3
"""Bytes that four ranks gather in 0.225 s."""


@pytest.mark.parametrize(
    ("work", "seconds", "bound_by"),
    [
        (times.Work([times.Operation(flops=FLOPS * times.ARITHMETIC)], []), 1.0, "arithmetic"),
        (times.Work([times.Operation(flops=FLOPS * 0.43, attention=64)], []), 1.0, "arithmetic"),
        (times.Work([times.Operation(flops=FLOPS * 0.58, attention=128)], []), 1.0, "arithmetic"),
        (times.Work([times.Operation(bytes_moved=BYTES * times.MEMORY["fused"], memory="fused")], []), 1.0, "memory"),
        (times.Work([times.Operation(bytes_moved=BYTES * times.MEMORY["eager"])], []), 1.0, "memory"),
        (times.Work([], [], calls=20_000, launches=5_000, graphs=1_000), 0.7, "host"),
        (times.Work([], [times.Communication("all_gather", 1000, 4, count=1000)], fetches=1000), 0.27, "host"),
        (times.Work([TENTH], [], transfer_bytes=round(51.2e9), host_bytes=44 * 10**9), 3.1, "offload"),
        (times.Work([TENTH], [times.Communication("all_gather", GATHERED, 4)]), 0.325, "communication"),
    ],
)
def test_a_step_takes_what_bounds_it(work, seconds, bound_by):
    """An operation takes its arithmetic or its traffic, a step what its device or its host needs."""
    found = times.step_time(work, H200)
    assert found.total.value == pytest.approx(seconds, abs=0.003)  # and some 2 ms around the optimizer
    assert found.bound_by == bound_by
    assert f"bound by {found.bound_by}" in found.total.basis


@pytest.mark.parametrize(("gathered", "seconds"), [(0.1, 0.1 + 0.7 * 0.075), (1.0, 0.75)])
def test_most_of_a_collective_beside_computation_takes_time_and_all_that_exceeds_it(gathered, seconds):
    work = times.Work([TENTH], [times.Communication("all_gather", 450e9 * 0.4 * gathered, 4, overlapped=True)])
    assert times.step_time(work, H200).total.value == pytest.approx(seconds, abs=0.003)


def test_a_host_near_the_limit_widens_the_range_and_products_of_few_columns_take_their_traffic_s_time():
    far, near = (times.step_time(times.Work([TENTH], [], calls=calls), H200).total for calls in (1_000, 7_600))
    assert far.error == 0.1
    assert near.value == far.value
    assert 0.3 < near.error < 0.7
    wide, narrow = times.Operation(1e12, 1e9), times.Operation(1e12, 100e9)
    (first, second) = (times.step_time(times.Work([one], []), H200).compute_seconds for one in (wide, narrow))
    assert first < 0.004
    assert second == pytest.approx(100e9 / BYTES / times.MEMORY["fused"], abs=0.003)


@pytest.mark.parametrize(
    ("case", "calls", "launches", "fetches"),
    [("0.5b batch 1", 2933, 1008, 0), ("0.5b batch 2, held out", 2945, 1008, 0), ("0.5b stage 3", 7496, 1032, 175)],
)
def test_the_range_of_a_step_that_its_host_limits_has_the_measured_time(case, calls, launches, fetches):
    """Counts of dry runs of the configurations that ``bench/gpu/step_times.py`` measured."""
    lines = map(json.loads, (ROOT / "bench/data/step_times_h200.jsonl").read_text().splitlines())
    measured = next(line["median_ms"] for line in lines if line["case"] == case) / 1e3
    found = times.step_time(times.Work([], [], calls=calls, launches=launches, graphs=48, fetches=fetches), H200)
    assert found.bound_by == "host"
    assert found.lowest_seconds < measured < found.highest_seconds < 2 * found.lowest_seconds


def test_works_are_added_with_factors():
    first = times.Work([times.Operation(1.0, 2.0, count=3)], [], calls=10, launches=2)
    second = times.Work([times.Operation(1.0, 2.0, count=5), times.Operation(7.0)], [], calls=20, launches=2)
    seen = times.combined([(first, -1), (second, 2)])
    assert seen == times.Work([times.Operation(1.0, 2.0, count=7), times.Operation(7.0, count=2)], [], 30, launches=2)


def test_an_all_reduce_takes_twice_a_gather_one_rank_nothing_and_a_gpu_without_known_rates_is_refused():
    seen = times.collective_seconds("all_reduce", 1e12, 8, 450)
    assert seen == pytest.approx(2 * times.collective_seconds("all_gather", 1e12, 8, 450), rel=1e-4)
    assert times.collective_seconds("all_reduce", 1e12, 1, 450) == 0
    unknown = find_gpu("NVIDIA A10G")
    assert unknown is not None
    with pytest.raises(ValueError, match="no rates are known of A10G"):
        times.step_time(times.Work([times.Operation(flops=1.0)], []), unknown)


def test_checkpoints_take_14_bytes_a_trained_parameter_and_an_epochs_price_is_that_of_its_gpu_hours():
    assert checkpoint_bytes(10**9, 10**9, kept=1) == 2 * 14 * 10**9
    assert checkpoint_bytes(10**9, 10**6, kept=2, state_bytes=0) == 3 * 2 * 10**9
    found = times.epoch_cost(1.8, 16_000, 16, 4, 2.5, tokens=8_000_000)
    assert (found.steps, found.seconds, found.price) == (1000, 1800, 5.0)
    assert found.price_per_million_tokens == pytest.approx(0.625)
    with pytest.raises(ValueError, match="at least one sample"):
        times.epoch_cost(1.0, 10, 0, 1, 1.0)


def test_the_cheapest_option_that_fits_comes_first():
    base = Option("as it is", 100 * GIB, 1.0, samples_per_step=8, gpus=4)
    options = [
        Option("offload", 30 * GIB, 3.0, 8, 4), Option("checkpointing", 70 * GIB, 1.3, 8, 4),
        Option("ZeRO 3", 75 * GIB, 1.2, 8, 4), Option("micro-batch 1", 60 * GIB, 0.9, 4, 4),
        Option("fused optimizer", 95 * GIB, 0.99, 8, 4), Option("custom", 0, 0.0, refused="needs a GPU"),
    ]  # fmt: skip
    ranked = rank(base, options, 80 * GIB)
    assert [(one.option.name, one.fits) for one in ranked] == [
        ("ZeRO 3", True), ("checkpointing", True), ("micro-batch 1", True), ("offload", True),
        ("fused optimizer", False), ("custom", False),
    ]  # fmt: skip
    assert (ranked[0].saved_bytes, ranked[4].lacking_bytes) == (25 * GIB, 15 * GIB)
    assert [one.slower for one in ranked[:3]] == pytest.approx([1.2, 1.3, 1.8])


def phase(name: str, activations: int, parameters: int = 10 * GIB) -> PredictedPhase:
    parts = {"parameters": parameters, "activations": activations}
    return PredictedPhase(name, activations + parameters, 0, parts)


PREDICTION = Prediction(
    1.0,
    [
        PredictedPoint(rank, length, [phase("backward", (length // 1024 + rank) * GIB), phase("optimizer", 0)])
        for rank in (0, 4)
        for length in (1024, 4096)
    ],
    micro_batch=2,
    error=0.02,
)


def test_a_prediction_is_that_of_the_nearest_rank_on_the_line_between_two_lengths():
    found = times.predicted(PREDICTION, 0, "backward", 2 * 2048)
    assert found.allocated_peak_bytes == 12 * GIB
    assert found.parts == {"parameters": 10 * GIB, "activations": 2 * GIB}
    assert times.predicted(PREDICTION, 3, "backward", 2 * 4096).parts["activations"] == 8 * GIB
    for name, elements in (("backward", 2 * 8192), ("backward", 0), ("eval", 2 * 2048)):
        assert times.predicted(PREDICTION, 0, name, elements) is None
    assert times.predicted(Prediction(1.0), 0, "backward", 2 * 2048) is None


def one(name: str, measured: int, parts: dict[str, int] | None = None, length: int = 4096) -> times.Compared:
    found = times.compared(PREDICTION, 0, name, measured, 2 * length, parts)
    assert found is not None
    return found


def test_within_the_expected_error_figures_stand_alone_and_a_few_mebibytes_are_no_difference():
    found = [one("backward", 14 * GIB + GIB // 5), one("optimizer", 10 * GIB)]
    assert not any(each.parted for each in found)
    expected = ["predicted: backward 14.00 GiB (measured +1.4 %), optimizer 10.00 GiB (measured 0.0 %)"]
    assert comparison_sentences(found, 0.02) == expected
    small = Prediction(1.0, [PredictedPoint(0, 8, [PredictedPhase("backward", 2**26)])], micro_batch=1, error=0.02)
    assert not times.compared(small, 0, "backward", 2**26 + 2**22, 8).parted


def test_beyond_the_expected_error_the_parts_that_make_it_are_named_and_without_parts_the_phases():
    parts = {"parameters": 10 * GIB, "activations": 5 * GIB, "buckets": GIB}
    found = [one("backward", 16 * GIB, parts), one("optimizer", 10 * GIB)]
    assert found[0].parts == (("activations", GIB), ("buckets", GIB))
    assert comparison_sentences(found, 0.02)[1] == (
        "backward was 2.00 GiB above its prediction, more than the expected error of 2 %: activations +1.00 GiB, "
        "buckets +1.00 GiB"
    )
    assert comparison_sentences([one("backward", 16 * GIB), one("optimizer", 10 * GIB)], 0.02)[1].endswith(
        "; optimizer agrees"
    )
    alike = comparison_sentences([one("backward", 12 * GIB), one("optimizer", 8 * GIB)], 0.02)[1]
    assert "backward was 2.00 GiB below its prediction" in alike
    assert alike.endswith("; all phases by the same amount, so this memory stays allocated")
