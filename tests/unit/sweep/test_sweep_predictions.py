"""What ``ftmon predict`` is asked for a sweep's configurations."""

from pathlib import Path

import pytest
from ftmon.protocol.analysis.estimates.memory import beside_pytorch
from ftmon.protocol.host.machine import find_gpu
from ftmon.trainer.predict.__main__ import arguments_of
from ftmon.trainer.sweep import plan, search
from ftmon.trainer.sweep.search import Predictor

A100 = "NVIDIA A100-SXM4-80GB"
CONFIG = """
model: {config: {model_type: llama, vocab_size: 512, hidden_size: 64}}
data: {path: d.jsonl}
zero: {stage: 2}
run: {ranks: 2}
"""


def asked(name: str, offload: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the kind of GPU and the capacity that are asked for on a host with GPUs of a name."""
    gpu = find_gpu(name)
    memory = gpu.memory_bytes if gpu else 8 << 30
    monkeypatch.setattr(search, "smallest_gpu", lambda: search.HostGpu(name, memory))
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "s.yaml").write_text("config: train.yaml\naxes: {training.sequence_length: [64, 128]}\n")
    predictor = Predictor(plan.read(str(folder / "s.yaml")), lambda _: None)
    arguments = arguments_of(predictor.words({"zero.offload_optimizer": offload}, [128, 64]))
    assert (arguments.ranks, arguments.sequence_length) == (2, [64, 128])
    return arguments.gpu, memory - arguments.capacity


@pytest.mark.parametrize("offload", [False, True])
def test_a_prediction_is_of_this_hosts_gpus_and_what_is_beside_pytorch_on_them(
    offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, beside = asked(A100, offload, tmp_path, monkeypatch)
    assert gpu == A100
    assert beside == round(beside_pytorch(2, offload=offload).value)


def test_of_a_gpu_that_is_not_in_the_table_the_default_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, _ = asked("NVIDIA Voodoo 2", False, tmp_path, monkeypatch)
    assert gpu == arguments_of(["--model", "m"]).gpu
