"""The process of ``ftmon predict``."""

import pytest
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import jobs
from ftmon.trainer.predict.__main__ import arguments_of, main

NOT_PREDICTED = (
    "per_process_memory_fraction is not predicted; leave it out, and give what PyTorch may reserve with --capacity"
)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("expandable_segments:maybe", "expandable_segments must be True or False, not maybe"),
        ("per_process_memory_fraction:0.9", NOT_PREDICTED),
    ],
)
def test_an_allocator_setting_that_is_wrong_or_not_predicted_is_refused_in_a_line(monkeypatch, capsys, setting, words):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    assert main(["--model", "m"]) == 2
    assert capsys.readouterr().err == f"ftmon: PYTORCH_CUDA_ALLOC_CONF: {words}\n"


@pytest.mark.parametrize(("precision", "run"), [("bf16", [0]), ("fp32", [0, 1, 2, 3])])
def test_ranks_differ_at_stage_1_where_deepspeed_reduces_gradients_as_they_come(tmp_path, precision, run):
    sizes = "hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512"
    (tmp_path / "train.yaml").write_text(
        f"model: {{config: {{model_type: llama, {sizes}}}}}\ndata: {{path: {tmp_path}/d.jsonl}}\n"
        f"training: {{precision: {precision}, max_steps: 2}}\nzero: {{stage: 1}}\nrun: {{ranks: 4}}\n"
    )
    (tmp_path / "d.jsonl").write_text('{"text": "some text"}\n')
    arguments = arguments_of([str(tmp_path / "train.yaml"), "--gpu", "H200"])
    assert jobs.prepare(arguments, Settings()).different == run


def test_a_gpu_may_be_named_as_people_do_and_a_refused_key_reaches_no_terminal_as_an_escape(tmp_path, capsys):
    assert jobs.find("H200").title == "H200 141 GB"
    with pytest.raises(ConfigError, match=r"A100 can be A100 40 GB or A100 80 GB; say which$"):
        jobs.find("A100")
    with pytest.raises(ConfigError, match=r"^--gpu: Voodoo 2 is not in the table of GPUs; known are .*A100 80 GB"):
        jobs.find("Voodoo 2")
    assert jobs.find("a100 80").title == jobs.find("A100-80GB").title == "A100 80 GB"
    assert jobs.find("NVIDIA GeForce RTX 4090").capability == (8, 9)
    (tmp_path / "ds.json").write_text('{"bf16": {}, "\\u001b[2Jx": 1, "\\u001b[2Jx": 2}')
    assert main(["--model", "m", "--deepspeed", str(tmp_path / "ds.json")]) == 2
    error = capsys.readouterr().err
    assert "is given twice" in error
    assert error.rstrip("\n").isprintable()
