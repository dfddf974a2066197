"""Measured peaks beside predicted ones, and by what they part."""

import json

import pytest
from ftmon.protocol.analysis.estimates.memory import beside_pytorch, checkpoint_bytes, host_memory, pinned_bytes
from ftmon.protocol.analysis.estimates.ranking import Option, rank
from ftmon.protocol.analysis.estimates.time import (
    Communication,
    Compared,
    Efficiency,
    Operation,
    Work,
    collective_seconds,
    compared,
    epoch_cost,
    predicted,
    step_time,
)
from ftmon.protocol.analysis.words import comparison_sentences
from ftmon.protocol.host.machine import FIT_TABLE, GPUS, find_gpu
from ftmon.protocol.messages.memory import PredictedPhase, PredictedPoint, Prediction
from places import DATA

# Memory beside PyTorch's, time, host, disk, money, and the what-if table.


MIB, GIB = 2**20, 2**30
H200 = find_gpu("NVIDIA H200")
assert H200 is not None


def test_nvml_less_reserved_is_met_on_every_measured_rank() -> None:
    checked = 0
    for line in (DATA / "h200_peaks.jsonl").read_text().splitlines():
        one = json.loads(line)
        if one["nvml_used_mib"] is None:
            continue
        reserved = max(peaks[1] for phases in one["peaks_mib"].values() for peaks in phases.values())
        beside = beside_pytorch(one["world_size"], offload=one["offload_optimizer"])
        assert reserved * MIB + beside.value == pytest.approx(one["nvml_used_mib"] * MIB, rel=0.002)
        assert beside.value == pytest.approx((one["nvml_used_mib"] - reserved) * MIB, rel=beside.error)
        checked += 1
    assert checked >= 5


def test_what_was_not_measured_has_a_larger_error_and_says_so() -> None:
    measured, elsewhere = beside_pytorch(4), beside_pytorch(4, device="NVIDIA A100-SXM4-80GB")
    assert elsewhere.error > measured.error
    assert "not on this GPU" in elsewhere.basis
    assert "several hosts" in beside_pytorch(4, hosts=2).basis
    assert beside_pytorch(1).value < beside_pytorch(2).value < beside_pytorch(4).value == beside_pytorch(8).value
    assert beside_pytorch(8).error > beside_pytorch(4).error


def test_the_fit_table_goes_from_8_to_288_gigabytes_in_order() -> None:
    sizes = [gpu.memory_gib for gpu in FIT_TABLE]
    assert sizes == sorted(sizes)
    assert (FIT_TABLE[0].title, FIT_TABLE[-1].title) == ("RTX 4060 8 GB", "B300 288 GB")
    assert all(0.85 < gpu.memory_gib / float(gpu.title.split()[-2]) < 1 for gpu in FIT_TABLE)


def test_every_gpu_is_found_by_its_title_and_variants_differ() -> None:
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


def test_bandwidths_are_known_of_every_gpu() -> None:
    assert all(gpu.memory_gbs > gpu.link_gbs >= 16 and gpu.host_gbs >= 16 for gpu in GPUS)


BUSY = Efficiency().busy


def test_an_operation_takes_its_arithmetic_or_its_traffic() -> None:
    product = step_time(Work([Operation(flops=989.4e12 * 0.7 * BUSY, bytes_moved=1e9)], []), H200)
    assert product.total.value == pytest.approx(1.0)
    assert product.bound_by == "arithmetic"
    attention = step_time(Work([Operation(flops=989.4e12 * 0.4 * BUSY, attention=True)], []), H200)
    assert attention.total.value == pytest.approx(1.0)
    copy = step_time(Work([Operation(flops=1e9, bytes_moved=4800e9 * 0.85 * BUSY, precision="fp32")], []), H200)
    assert copy.total.value == pytest.approx(1.0)
    assert copy.bound_by == "memory"


def test_many_small_operations_are_bound_by_the_host() -> None:
    found = step_time(Work([Operation(bytes_moved=1000, count=10_000)], [], calls=20_000), H200)
    assert found.bound_by == "host"
    assert found.total.value == pytest.approx(0.22)
    assert found.total.error == 0.5
    assert "bound by host" in found.total.basis
    hooks = step_time(Work([], [Communication("all_gather", 1000, 4, count=1000)], fetches=1000), H200)
    assert hooks.bound_by == "host"
    assert hooks.total.value == pytest.approx(0.31)


def test_an_optimizer_on_the_host_comes_on_top() -> None:
    work = Work([Operation(flops=989.4e12 * 0.07 * BUSY)], [], transfer_bytes=round(64e9 * 0.8), host_bytes=round(44e9))
    found = step_time(work, H200)
    assert found.bound_by == "offload"
    assert found.total.value == pytest.approx(0.1 + 1.0 + 2.0)


def test_an_overlapped_collective_counts_only_beyond_the_computation() -> None:
    work = [Operation(flops=989.4e12 * 0.7 * 0.1 * BUSY)]
    gather = Communication("all_gather", 450e9 * 0.75 * 0.3, 4)
    beside = Communication("all_gather", 450e9 * 0.75 * 0.3, 4, overlapped=True)
    alone = step_time(Work(work, [gather]), H200).total.value
    assert alone == pytest.approx(0.1 + 0.3 * 0.75, rel=1e-3)
    assert step_time(Work(work, [beside]), H200).total.value == pytest.approx(0.3 * 0.75, rel=1e-3)


def test_an_all_reduce_takes_twice_a_gather_and_one_rank_nothing() -> None:
    assert collective_seconds("all_reduce", 1e12, 8, 450) == pytest.approx(
        2 * collective_seconds("all_gather", 1e12, 8, 450), rel=1e-4
    )
    assert collective_seconds("all_reduce", 1e12, 1, 450) == 0


def test_a_gpu_without_known_rates_is_refused_for_time() -> None:
    unknown = find_gpu("NVIDIA A10G")
    assert unknown is not None
    with pytest.raises(ValueError, match="no rates are known of A10G"):
        step_time(Work([Operation(flops=1.0)], []), unknown)


def test_pinned_memory_is_rounded_to_powers_of_two() -> None:
    assert pinned_bytes(5 * GIB) == 8 * GIB
    assert pinned_bytes(4 * GIB) == 4 * GIB
    assert pinned_bytes(5 * GIB + 1, round_below_bytes=GIB) == 5 * GIB + 4096
    assert pinned_bytes(0) == 0


def test_offload_takes_sixteen_bytes_a_parameter_over_all_ranks() -> None:
    found = host_memory(8 * 10**9, 4, 4, 2, offload_optimizer=True, process_bytes=0)
    assert found.total_bytes == 16 * 8 * 10**9
    assert host_memory(8 * 10**9, 8, 4, 2, offload_optimizer=True, process_bytes=0).total_bytes == 8 * 8 * 10**9
    both = host_memory(8 * 10**9, 4, 4, 3, offload_optimizer=True, offload_parameters=True, process_bytes=0)
    assert both.total_bytes == 18 * 8 * 10**9
    pinned = host_memory(8 * 10**9, 4, 4, 2, offload_optimizer=True, pinned=True, process_bytes=0)
    assert pinned.pinned_loss_bytes == 4 * (2**33 - 8 * 10**9)
    assert host_memory(8 * 10**9, 4, 4, 2, process_bytes=GIB).total_bytes == 4 * GIB


def test_checkpoints_take_fourteen_bytes_a_trained_parameter_and_one_more_while_written() -> None:
    assert checkpoint_bytes(10**9, 10**9, kept=1) == 2 * 14 * 10**9
    assert checkpoint_bytes(10**9, 10**6, kept=2, state_bytes=0, exported=True) == 3 * 2 * 10**9 + 2 * 10**9


def test_an_epochs_price_is_that_of_its_gpu_hours() -> None:
    found = epoch_cost(1.8, 16_000, 16, 4, 2.5, tokens=8_000_000)
    assert (found.steps, found.seconds, found.gpu_hours) == (1000, 1800, 2.0)
    assert found.price == 5.0
    assert found.price_per_million_tokens == pytest.approx(0.625)
    with pytest.raises(ValueError, match="at least one sample"):
        epoch_cost(1.0, 10, 0, 1, 1.0)


def test_the_cheapest_option_that_fits_comes_first() -> None:
    base = Option("as it is", 100 * GIB, 1.0, samples_per_step=8, gpus=4)
    options = [
        Option("offload", 30 * GIB, 3.0, 8, 4, host_bytes=500 * GIB),
        Option("checkpointing", 70 * GIB, 1.3, 8, 4),
        Option("ZeRO 3", 75 * GIB, 1.2, 8, 4),
        Option("micro-batch 1", 60 * GIB, 0.9, 4, 4),
        Option("fused optimizer", 95 * GIB, 0.99, 8, 4),
        Option("custom", 0, 0.0, refused="needs a GPU"),
    ]
    ranked = rank(base, options, 80 * GIB, host_capacity_bytes=400 * GIB, price_per_gpu_hour=2.0)
    assert [one.option.name for one in ranked] == [
        "ZeRO 3", "checkpointing", "micro-batch 1", "fused optimizer", "offload", "custom",
    ]  # fmt: skip
    assert [one.fits for one in ranked] == [True, True, True, False, False, False]
    assert ranked[0].saved_bytes == 25 * GIB
    assert ranked[0].slower == pytest.approx(1.2)
    assert ranked[2].slower == pytest.approx(1.8)
    assert ranked[0].cost_per_sample == pytest.approx(1.2 * 4 / 8 / 3600 * 2)


LIVE_GIB = 2**30


def phase(name: str, activations: int, parameters: int = 10 * LIVE_GIB) -> PredictedPhase:
    parts = {"parameters": parameters, "activations": activations}
    return PredictedPhase(name, activations + parameters, 0, parts)


PREDICTION = Prediction(
    1.0,
    [
        PredictedPoint(rank, length, [phase("backward", (length // 1024 + rank) * LIVE_GIB), phase("optimizer", 0)])
        for rank in (0, 4)
        for length in (1024, 4096)
    ],
    micro_batch=2,
    error=0.02,
)


def test_between_two_lengths_a_prediction_lies_on_the_line_through_both() -> None:
    found = predicted(PREDICTION, 0, "backward", 2 * 2048)
    assert found is not None
    assert found.allocated_peak_bytes == 12 * LIVE_GIB
    assert found.parts == {"parameters": 10 * LIVE_GIB, "activations": 2 * LIVE_GIB}


def test_a_rank_that_was_not_run_is_like_the_nearest() -> None:
    found = predicted(PREDICTION, 3, "backward", 2 * 4096)
    assert found is not None
    assert found.parts["activations"] == 8 * LIVE_GIB


def test_nothing_is_predicted_outside_of_the_lengths_or_of_another_phase() -> None:
    assert predicted(PREDICTION, 0, "backward", 2 * 8192) is None
    assert predicted(PREDICTION, 0, "backward", 0) is None
    assert predicted(PREDICTION, 0, "eval", 2 * 2048) is None
    assert predicted(Prediction(1.0), 0, "backward", 2 * 2048) is None


def one(name: str, measured: int, parts: dict[str, int] | None = None, length: int = 4096) -> Compared:
    found = compared(PREDICTION, 0, name, measured, 2 * length, parts)
    assert found is not None
    return found


def test_within_the_expected_error_figures_stand_alone() -> None:
    found = [one("backward", 14 * LIVE_GIB + LIVE_GIB // 5), one("optimizer", 10 * LIVE_GIB)]
    assert not any(each.parted for each in found)
    assert comparison_sentences(found, 0.02) == [
        "predicted: backward 14.00 GiB (measured +1.4 %), optimizer 10.00 GiB (measured 0.0 %)"
    ]


def test_beyond_it_the_parts_that_make_it_are_named() -> None:
    parts = {"parameters": 10 * LIVE_GIB, "activations": 5 * LIVE_GIB, "buckets": LIVE_GIB}
    found = [one("backward", 16 * LIVE_GIB, parts), one("optimizer", 10 * LIVE_GIB)]
    assert found[0].parts == (("activations", LIVE_GIB), ("buckets", LIVE_GIB))
    assert comparison_sentences(found, 0.02)[1] == (
        "backward was 2.00 GiB above its prediction, more than the expected error of 2 %: activations +1.00 GiB, "
        "buckets +1.00 GiB"
    )


def test_without_parts_the_phases_tell_where_it_is() -> None:
    assert comparison_sentences([one("backward", 16 * LIVE_GIB), one("optimizer", 10 * LIVE_GIB)], 0.02)[1].endswith(
        "; optimizer agrees"
    )
    alike = comparison_sentences([one("backward", 12 * LIVE_GIB), one("optimizer", 8 * LIVE_GIB)], 0.02)[1]
    assert "backward was 2.00 GiB below its prediction" in alike
    assert alike.endswith("; all phases by the same amount, so this memory stays allocated")


def test_a_few_mebibytes_of_a_small_run_are_no_difference() -> None:
    small = Prediction(1.0, [PredictedPoint(0, 8, [PredictedPhase("backward", 2**26)])], micro_batch=1, error=0.02)
    found = compared(small, 0, "backward", 2**26 + 2**22, 8)
    assert found is not None
    assert not found.parted
