"""FLOPs of a model and MFU, against figures computed by hand."""

import pytest
from ftmon.protocol.messages import throughput
from ftmon.protocol.messages.throughput import ModelFlops, causal_pairs, mfu, peak_flops, perplexity


def test_the_flops_of_a_packed_step_count_pairs_within_documents_only() -> None:
    # 2 layers, 4 heads of 8: 12 * 2 * 4 * 8 = 768 FLOPs a pair; 1,000 parameters: 6,000 a token.
    flops = ModelFlops(token=6_000.0, pair=768.0)
    pairs = causal_pairs([3, 5])
    assert pairs == 6 + 15
    assert flops.of(8, pairs) == 8 * 6_000 + 21 * 768
    assert flops.of(8, causal_pairs([8])) - flops.of(8, pairs) == 15 * 768


def test_mfu_of_a_llama_1b_shape_is_the_hand_computed_one() -> None:
    # Llama-3.2-1B: 1,235,814,400 parameters, tied; 16 layers, 32 heads of 64; rows of 4,096 tokens.
    flops = ModelFlops(token=6 * 1_235_814_400, pair=12 * 16 * 32 * 64)
    a_second = flops.of(55_296, causal_pairs([4096]) * 13 + causal_pairs([2048]))
    # 55,296 * 7,414,886,400 = 4.100095583e14; pairs 13 * 8,390,656 + 2,098,176 = 111,176,704, times 393,216
    assert a_second == pytest.approx(4.100135583e14 + 4.37164588e13, rel=1e-4)
    share = mfu(a_second, 1.0, peak_flops("NVIDIA H200", "bf16"))
    assert share == pytest.approx(0.4586, abs=2e-4)


def test_pairs_beyond_a_sliding_window_do_not_count() -> None:
    flops = ModelFlops(token=0.0, windowed_pair=1.0, window=4)
    # Rows of the mask: 1, 2, 3, 4, 4, 4 ... against 1 .. 4,096; the exact share is (w/n)(2 - w/n) for long documents.
    exact = sum(min(position, 4) for position in range(1, 4097))
    assert flops.of(4096, causal_pairs([4096]), 4096) == pytest.approx(exact, rel=2e-3)
    assert flops.of(4, causal_pairs([4]), 4) == causal_pairs([4])


def test_rows_of_a_foreign_script_count_as_rows_of_equal_length() -> None:
    assert throughput.causal_pairs_of_rows(4096, 2) == causal_pairs([2048, 2048])
    assert throughput.causal_pairs_of_rows(100, 0) == 0


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [("NVIDIA H200", "bf16", 989.4), ("NVIDIA H100 80GB HBM3", "tf32", 494.7), ("NVIDIA H100 PCIe", "bf16", 756.0),
     ("NVIDIA H100 NVL", "bf16", 835.5), ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
     ("NVIDIA A100 80GB PCIe", "fp32", 19.5), ("Tesla V100-SXM2-32GB", "fp16", 125.0),
     ("NVIDIA GeForce RTX 4090", "bf16", 165.2), ("NVIDIA L40S", "bf16", 362.05), ("NVIDIA L40", "bf16", 181.05)],
)  # fmt: skip
def test_a_gpu_has_its_data_sheet_peak(name: str, precision: str, tera: float) -> None:
    assert peak_flops(name, precision) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    ["AMD EPYC 9654", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A10G",
     "NVIDIA H300", "Tesla V100-SXM2-32GB"],
)  # fmt: skip
def test_a_device_or_type_without_a_peak_has_no_mfu(name: str) -> None:
    assert peak_flops(name, "bf16") is None
    assert mfu(1e15, 1.0, peak_flops(name, "bf16")) is None


def test_mfu_needs_a_type_flops_and_time_and_perplexity_a_loss_that_is_a_figure() -> None:
    assert peak_flops("NVIDIA H200", "") is None
    assert mfu(0.0, 1.0, 1e12) is None
    assert mfu(1e12, 0.0, 1e12) is None
    assert mfu(5e11, 1.0, 1e12) == 0.5
    assert perplexity(0.0) == 1.0
    assert perplexity(1e4) is None
