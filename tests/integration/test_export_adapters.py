"""Adapters of every kind, written and loaded again: the exported model gives the logits of the trained one."""

import re
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")

import small_runs
from safetensors.torch import load_file
from small_shape import SMALL_SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

CASES = {
    "dora": ["lora={rank: 4, kind: dora}"],
    "dora-alone": ["lora={rank: 4, kind: dora, merge: false}"],
    "nf4": ["lora={rank: 4}", "model.quantization=nf4"],
    "experts": ["lora={rank: 4}"],
    # Without a threshold of 0 parameters of so small a model are not partitioned.
    "experts-partitioned": [
        *("lora={rank: 4}", "zero.stage=3"),
        "deepspeed.zero_optimization.stage3_param_persistence_threshold=0",
    ],
    # Its kernels read the weights of layers that they do not call.
    "reading-partitioned": [
        *("lora={rank: 4}", "zero.stage=3"),
        "deepspeed.zero_optimization.stage3_param_persistence_threshold=0",
    ],
    "head-alone": [
        "lora={rank: 4, targets: [q_proj, k_proj, v_proj, lm_head], merge: false}",
        *("training.rehearsal=true", "output.save_model=true"),
    ],
    "nf4-dora": ["lora={rank: 4, kind: dora}", "model.quantization=nf4"],
}


class Outcome:
    def __init__(self, folder: Path) -> None:
        pytest.importorskip("bitsandbytes")
        self.out = folder / "out"
        small_runs.write_model(folder)
        small_runs.write_records(folder / "data.jsonl", [5, 60, 7, 1])
        common = ["zero.stage=2", "training={max_steps: 1, micro_batch: 1, rehearsal: false}", "model.fused_loss=off"]
        sizes = {**SMALL_SHAPE, "vocab_size": 512, "num_local_experts": 4}
        AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes)).save_pretrained(folder / "experts")
        reading = AutoConfig.for_model("mamba", vocab_size=512, hidden_size=32, state_size=4, num_hidden_layers=2)
        AutoModelForCausalLM.from_config(reading).save_pretrained(folder / "reading")
        jobs = {name: (1, [*common, *words]) for name, words in CASES.items()}
        for name in CASES:
            if (kind := name.partition("-")[0]) in ("experts", "reading"):
                jobs[name][1].append(f"model.name={folder / kind}")
        self.text = small_runs.launch(folder, "export_ranks", jobs)

    def figure(self, name: str, what: str) -> float:
        (found,) = re.findall(rf"^{what}: (\S+)$", self.text[name], re.MULTILINE)
        return float(found)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("adapters"))


@pytest.mark.parametrize("name", CASES)
def test_the_exported_model_gives_the_logits_of_the_trained_one(outcome: Outcome, name: str) -> None:
    assert outcome.figure(name, "changed") > 0.05, "the adapters matter"
    assert outcome.figure(name, "off") < 0.002
    assert outcome.figure(name, "compared") > 10


@pytest.mark.parametrize("name", ["nf4", "nf4-dora"])
def test_a_merged_base_of_4_bits_is_written_in_full_precision(outcome: Outcome, name: str) -> None:
    folder = outcome.out / name / "model"
    assert "quantization_config" not in (folder / "config.json").read_text()
    tensors = load_file(folder / "model.safetensors")
    assert {tensor.is_floating_point() for tensor in tensors.values()} == {True}
    assert tensors["model.layers.0.self_attn.q_proj.weight"].shape == (32, 32)
