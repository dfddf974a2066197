"""The configuration of the model of a prediction."""

import json
from typing import Any

import pytest
import torch
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import result, script
from ftmon.trainer.predict.live import _message
from ftmon.trainer.predict.result import Phase, Point, Prediction, Rank


@pytest.mark.parametrize(("peaks", "ranks"), [([9, 9, 9], [0]), ([9, 5, 9], [0, 1, 2]), ([9, 9, 5], [0, 1, 2])])
def test_ranks_that_differ_are_all_in_it(peaks, ranks):
    every = [Rank(rank, {"backward": Phase(peak, peak)}, 0) for rank, peak in enumerate(peaks)]
    points = _message(Prediction("m", 1, len(every), [Point(64, 1, every, 0, 9)]), 1.0).points
    assert [point.rank for point in points] == ranks
    assert [point.phases[0].allocated_peak_bytes for point in points] == [peaks[rank] for rank in ranks]


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES}
QUANTIZED = {**LLAMA, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({**LLAMA, "num_attention_heads": 7}, "The hidden size (64) is not a multiple of the number of"),
        ({**LLAMA, "hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({**LLAMA, "torch_dtype": "float99"}, "module 'torch' has no attribute 'float99'"),
        *(
            ({"model_type": kind}, f"model type {kind} is no causal language model: only those are predicted")
            for kind in ("vit", "t5", "qwen2_vl")
        ),
        (
            QUANTIZED,
            "quantization_config: quantized weights cannot be predicted with --model; for QLoRA use CONFIG.yaml with "
            "model.quantization=nf4",
        ),
        ([], "must be a JSON object, not list"),
        ('{"model_type": "llama",}', "not JSON: "),
    ],
)  # fmt: skip
def test_a_configuration_that_cannot_be_used_is_refused_with_its_file(tmp_path, fields, reason, is_folder):
    file = tmp_path / "config.json"
    file.write_text(fields if isinstance(fields, str) else json.dumps(fields))
    with pytest.raises(ConfigError) as refusal:
        result.read_config(str(tmp_path if is_folder else file))
    assert str(refusal.value).startswith(f"{file}: {reason}")
    assert len(str(refusal.value).splitlines()) == 1


def test_a_causal_language_model_is_read_and_one_that_cannot_be_made_refused_with_its_file(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert [result.read_config(str(path)).hidden_size for path in (tmp_path, file)] == [64, 64]
    file.write_text(json.dumps({**LLAMA, "hidden_size": 0}))
    config = result.read_config(str(tmp_path))
    with pytest.raises(ConfigError) as refusal:
        result.make(config, torch.float32, False, None, "sdpa")
    assert str(refusal.value) == f"{file}: 0.0 cannot be raised to a negative power"


def test_quantized_weights_of_a_script_are_refused_by_their_configuration(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", PreTrainedModel.from_pretrained)  # patched below for good
    script._patch_weights()
    (tmp_path / "config.json").write_text(json.dumps(QUANTIZED))
    with pytest.raises(ConfigError, match=r"quantized models of a script .* model\.quantization=nf4"):
        AutoModelForCausalLM.from_pretrained(str(tmp_path))
