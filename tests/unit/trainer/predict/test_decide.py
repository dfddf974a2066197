"""What is read of GPUs and data for a choice, and the files that it is written to."""

import json
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import decide
from ftmon.trainer.predict.choose import Candidate, Choice, Estimate, Space, candidates
from ftmon.trainer.recipe.config.load import load, of_model_and_data
from ftmon.trainer.recipe.model import tokenizer as tokenizers
from ftmon.trainer.recipe.preflight import resolve
from small_shape import SMALL_SHAPE
from transformers import AutoConfig

RECORDS = 600


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the folder of a model without weights, which a choice does not read, and data of 3 to 90 words."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    texts = [" ".join(words[(row + place) % 7] for place in range(3 + row * 37 % 88)) for row in range(RECORDS)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made: Any = tokenizers.train(lambda: texts, 300)
    made.save_pretrained(tmp_path / "model")
    shape = SMALL_SHAPE | {"vocab_size": len(made), "max_position_embeddings": 512}
    AutoConfig.for_model("llama", **shape).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model"), str(tmp_path / "data.jsonl")


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("8xH100-80GB", "H100 80 GB", 8), ("H100", "H100 80 GB", 1), ("2xA100-40GB", "A100 40 GB", 2),
        ("4 x RTX 4090", "RTX 4090 24 GB", 4), ("NVIDIA H200", "H200 141 GB", 1), ("2x4090", "RTX 4090 24 GB", 2),
    ],
)  # fmt: skip
def test_gpus_are_named_as_people_name_them(text, name, count):
    machine = decide._machine(text)
    assert (machine.gpu.name, machine.number, machine.host_bytes) == (name, count, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8xA100", "say which"),
        ("3xfoo", "^--gpus: foo is not in the table"),
        ("8xH10O-80GB", "did you mean H100 80 GB[?]$"),
        ("8x", "^--gpus: 8x: must be"),
        ("1000000xH200", "must be 1 to 4,096 GPUs"),
    ],
)
def test_gpus_that_are_not_one_kind_of_the_table_are_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        decide._machine(text)


def test_any_file_is_a_path_of_data_and_the_share_of_padding_is_that_of_batches_in_any_order(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"\0")
    assert f'data.path="{tmp_path / "data.bin"}"' in of_model_and_data("m", str(tmp_path / "data.bin"))
    assert 'data.name="owner/data"' in of_model_and_data("m", "owner/data")
    assert decide._padding([100] * 50) == pytest.approx(0)
    # Of 8 draws from 1 to n, the longest is 8/9 of n on average, and the mean is half of n.
    assert decide._padding(range(1, 10_001)) == pytest.approx(1 - (1 / 2) / (8 / 9), abs=1e-3)


def test_a_gpu_without_known_rates_is_ordered_by_those_of_another_with_its_own_memory():
    machine = decide._machine("A10G")
    assert machine.gpu.name == "A100 80 GB"
    assert machine.capacity_bytes < 23 * 2**30
    assert machine.note == "no rates are known of A10G 24 GB: times are those of an A100 80 GB"
    assert machine.name == "A10G 24 GB", "which the choice is for"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(10.0, "4 is as fast within 1%, in 60.0 GiB"), (9.95, "4 is as fast within 1%, in 60.0 GiB"),
     (13.5, "4 needs 1.35 times as long"), (9.4, "4 may need 0.94 times as long, which no dry run checked")],
)  # fmt: skip
def test_a_larger_micro_batch_that_is_as_fast_is_not_called_faster(seconds, words):
    machine = decide._machine("A100-80GB")
    space = Space(machine.gpu, 1, machine.capacity_bytes, 32, 2048)
    of = Candidate(1, "none", False, 0, 2, 16)
    best = Estimate(of, 40 << 30, 10.0, 6_554.0)
    other = Estimate(of._replace(micro_batch=4, accumulation=8), 60 << 30, seconds, 65_536 / seconds)
    assert decide._reasons(Choice([best], [best, other], 1, []), space)["training.micro_batch"] == words


def test_the_choice_for_the_cpu_is_written_as_a_file_that_loads(given, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    words = ["--pair", "--init", str(file), "--", *given, "run.device=cpu", "training.epochs=3"]
    assert decide.main(words) == 0
    shown = capsys.readouterr().out
    config = load(str(file)).config
    training = config.training
    assert (config.model.name, config.data.path) == given
    assert (config.run.device, training.epochs) == ("cpu", 3.0)
    # 600 records make some 50 rows of the model's 512 positions, of which a step takes a tenth.
    assert training.sequence_length == 512
    assert training.micro_batch * training.micro_steps == 4
    assert "  # 4 x 1 x 1 rank = 4 sequences, 2,048 tokens (small data)\n" in file.read_text()
    assert "training.micro_batch=4" in shown
    assert f"written: {file}; start it: ftmon train {file}" in shown

    assert decide.main(words) == 2
    assert capsys.readouterr().err == f"ftmon: {file}: exists; give another name with --output\n"


def test_what_is_read_of_the_data_is_known_to_a_prediction_and_what_is_given_is_not_chosen(given, capsys):
    known = decide.known(["--pair", "--", *of_model_and_data(*given), "run.device=cpu"], lambda what: None)
    assert "training.sequence_length=512" in known.overrides
    lengths = [4 + row * 37 % 88 for row in range(RECORDS)]  # a word is a token, and so is the end
    # A token attends to itself and to those before it in its text.
    assert known.pairs_a_token == pytest.approx(sum(one * (one + 1) / 2 for one in lengths) / sum(lengths))
    # Nothing predicts the first token of a text.
    assert known.label_share == pytest.approx(1 - RECORDS / sum(lengths))
    fixed = ["run.device=cpu", "training.micro_batch=2", "training.sequence_length=128", "zero.stage=0"]
    assert decide.main(["--pair", "--", *given, *fixed]) == 0
    overrides: list[str] = json.loads(capsys.readouterr().out)["overrides"]
    assert {"training.micro_batch=2", "training.sequence_length=128", "zero.stage=0"} < set(overrides)
    assert load(None, [*of_model_and_data(*given), *fixed, *overrides]).chosen == frozenset()


@pytest.mark.parametrize(
    ("more", "quantized"),
    [
        ([], (False, True)),
        (["model.quantization=none"], (False,)),
        (["lora.rank=8"], (False,)),
        (["lora.rank=8", "model.quantization=nf4", "zero.stage=1"], (True,)),
    ],
)
def test_a_base_in_4_bits_is_chosen_only_if_adapters_are(given, more, quantized):
    pytest.importorskip("bitsandbytes")
    loaded = load(None, [*of_model_and_data(*given), *more])
    space = decide._space(resolve.resolve(loaded, elsewhere=1).config, loaded, decide._machine("T4"), 1, 32)
    assert space.quantized == quantized
    assert {one.quantized for one in candidates(space)} == set(quantized)
