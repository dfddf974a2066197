"""A model and data are all that is given: what is chosen loads, is predicted, trains, and answers."""

import contextlib
import json
import os
import re
from pathlib import Path

import pytest
import rank_jobs
from ftmon.protocol.text import gib
from ftmon.trainer.predict.measure import run
from ftmon.trainer.recipe.config.load import load, of_model_and_data
from ftmon_process import Ftmon
from small_shape import write_model_and_data

GPUS = "2xH100-80GB"
HOURLY = "2.5"
BF16 = ("training.precision=bf16", "zero.stage=0")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of random weights and data, and nothing else."""
    folder = tmp_path_factory.mktemp("here")
    write_model_and_data(folder)
    return folder


@pytest.fixture(scope="module")
def ftmon(tmp_path_factory: pytest.TempPathFactory) -> Ftmon:
    return Ftmon(tmp_path_factory.mktemp("home"), DS_ACCELERATOR="cpu")


def test_the_written_choice_is_the_one_of_auto_and_needs_what_it_says(ftmon: Ftmon, here: Path) -> None:
    done = ftmon.run("train", "--init", "--gpus", GPUS, "--price", HOURLY, "model", "data.jsonl", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "choosing: dry run" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "chosen for 2 x H100 80 GB"
    (figures,) = (line for line in lines if line.startswith("predicted: "))
    assert len([line for line in lines if line.startswith("next best: all weights, ZeRO ")]) == 2
    assert ", costs 0." in figures

    config = load(str(here / "train.yaml")).config
    assert (config.run.ranks, config.lora.rank, config.zero.offload_optimizer) == (2, 0, False)
    assert config.training.sequence_length == 256
    asked = (["train.yaml"], ["--ranks", "2", "--", *of_model_and_data("model", "data.jsonl")])
    answers = rank_jobs.predictions([["--json", "--gpu", "H100 80 GB", *each] for each in asked], here)
    assert [answer["status"] for answer in answers] == [0, 0], answers
    point, auto = (json.loads(answer["output"])["points"][0] for answer in answers)
    assert figures.startswith(f"predicted: {gib(point['needed_bytes'])} of 77.")
    seen = {name: auto[name] for name in ("needed_bytes", "micro_batch", "nvml_bytes")}
    assert seen == {name: point[name] for name in ("needed_bytes", "micro_batch", "nvml_bytes")}

    refused = ftmon.run("train", "--init", "--gpus", GPUS, "model", "data.jsonl", cwd=here)
    assert (refused.returncode, refused.stderr) == (2, "ftmon: train.yaml: exists; give another name with --output\n")


def test_a_model_and_data_are_trained_and_answer_with_two_commands(ftmon: Ftmon, here: Path) -> None:
    done = ftmon.run("train", "--plain", "model", "data.jsonl", "training.max_steps=3", *BF16, cwd=here)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "chosen for the CPU" in done.stderr
    assert re.search(
        r"^\d\d:\d\d:\d\d settings: training.grad_accumulation .* no evaluation", done.stdout, re.MULTILINE
    )
    assert " note: zero.stage is 0, DeepSpeed runs its stage 1: its stage 0 is for fp32" in done.stdout
    # The model's configuration names another end than its tokenizer, as some bases do: that is learned all the same.
    assert "health" not in done.stdout
    (made,) = ftmon.runs()
    assert made.id.startswith("model-")
    assert made.config.read_text().startswith("# chosen for the CPU")
    config = load(str(made.config)).config
    assert (config.training.micro_batch, config.training.sequence_length, config.run.ranks) == (8, 256, 1)
    assert (made.path / "output" / "model" / "config.json").is_file()

    answered = ftmon.run("chat", "--max-tokens", "3", cwd=here)
    assert answered.returncode == 0, answered.stderr
    assert f"chat with {made.id}" in answered.stderr


def test_a_choice_that_is_refused_is_one_line_and_starts_no_run(ftmon: Ftmon, here: Path) -> None:
    before = len(ftmon.runs())
    for words, text in (
        (("./nothing", "data.jsonl"), "model.name ./nothing: no such folder"),
        (("model", "none.jsonl"), "data.path none.jsonl: no such file"),
        (("model",), "model: is a folder; to train the model in it, name the data too: ftmon train MODEL DATA"),
    ):
        done = ftmon.run("train", "--plain", *words, cwd=here)
        *progress, last = done.stderr.strip().splitlines()
        assert (done.returncode, [line for line in progress if not line.startswith("choosing: ")]) == (2, [])
        assert text in last
    assert len(ftmon.runs()) == before


def test_a_short_training_of_two_ranks_is_measured_and_keeps_nothing(here: Path, tmp_path: Path) -> None:
    words = [*of_model_and_data("model", "data.jsonl"), "run={ranks: 2, device: cpu}", "training.grad_accumulation=2"]
    words += ["training.micro_batch=2", "training.sequence_length=64", "zero.stage=1", "lora.rank=0"]
    with contextlib.chdir(here):
        found = run(None, words, {**os.environ, "TMPDIR": str(tmp_path), "FTMON_HOME": str(tmp_path / "home")})
    assert not found.out_of_memory
    # 2 x 2 x 2 full rows, of at most 64 tokens each.
    assert found.tokens_per_second * found.step_seconds == pytest.approx(8 * 64, rel=0.05)
    assert list((tmp_path / "home").rglob("*.safetensors")) == []
