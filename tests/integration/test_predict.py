"""``ftmon predict`` beside peaks measured on H200s (``bench/data/h200_peaks.jsonl``)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parent / "scripts" / "predict_many.py"
DATA = Path(__file__).parents[2] / "bench" / "data" / "h200_peaks.jsonl"
MIB = 1 << 20
QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip


def measured(stage: int, adam: str) -> dict[str, Any]:
    """Return the line of the 0.5B model with DeepSpeed's or PyTorch's Adam, one sequence."""
    wanted = {"model": "qwen1.5-0.5b", "zero_stage": stage, "micro_batch": 1, "adam": adam}
    lines = [json.loads(line) for line in DATA.read_text().splitlines()]
    return next(
        line
        for line in lines
        if all(line[key] == value for key, value in wanted.items())
        and not line["gradient_checkpointing"]
        and not line["offload_optimizer"]
    )


MEASURED = [(3, "deepspeed"), (0, "torch")]
BF16 = {"bf16": {"enabled": True}}


class Predictions:
    """What was answered, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words: dict[str, list[str]] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, model: dict[str, Any], settings: dict[str, Any], *words: str) -> None:
        for what, content in (("model", model), ("ds", settings)):
            (self.folder / f"{name}-{what}.json").write_text(json.dumps(content))
        files = [f"--model={self.folder}/{name}-model.json", f"--deepspeed={self.folder}/{name}-ds.json"]
        self.words[name] = [*files, *words]

    def make(self) -> None:
        # NVML's module as on a host with GPUs, which DeepSpeed would ask for free memory; beside a run none is visible.
        (self.folder / "pynvml.py").write_text("class NVMLError(Exception): pass\ndef nvmlInit(): pass\n")
        path = os.pathsep.join([str(self.folder), os.environ["PYTHONPATH"]])
        environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-P", str(PROGRAM), json.dumps(list(self.words.values()))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=True, env=environment)
        self.answers = dict(zip(self.words, json.loads(done.stdout), strict=True))

    def found(self, name: str) -> dict[str, Any]:
        assert self.answers[name]["status"] == 0, self.answers[name]["output"]
        return json.loads(self.answers[name]["output"])


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Predictions:
    made = Predictions(tmp_path_factory.mktemp("predict"))
    for stage, adam in MEASURED:
        settings = {**BF16, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
        words = ("--optimizer", adam, "--sequence-length", "4096", "--capacity", str(16 << 30), "--json")
        made.ask(f"measured-{stage}", QWEN, settings, *words)
    model = {**QWEN, "num_hidden_layers": 4, "vocab_size": 32000, "tie_word_embeddings": False}
    partition = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    words = ("--ranks", "3", "--sequence-length", "64", "--json")
    made.ask("layers", model, {**BF16, "zero_optimization": partition}, *words)
    small = {**QWEN, "num_hidden_layers": 1, "vocab_size": 512}
    profile = made.folder / "profile.txt"
    profile.write_text("kept")
    for stage in (2, 3):
        settings = {
            **BF16,
            "zero_optimization": {"stage": stage},
            "csv_monitor": {"enabled": True, "output_path": f"{made.folder}/logs"},
            "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(profile)},
        }
        made.ask(f"outputs-{stage}", small, settings, "--sequence-length", "8", "--json")
    made.ask("refused", small, {**BF16, "zero_optimization": {"stage": 7}})
    made.make()
    return made


@pytest.mark.parametrize(("stage", "adam"), MEASURED)
def test_a_step_takes_what_was_measured_on_a_gpu(predictions: Predictions, stage: int, adam: str) -> None:
    prediction = predictions.found(f"measured-{stage}")
    line = measured(stage, adam)
    rows = {row["seq_len"]: row for row in line["rows"]}
    assert prediction["parameters"] == line["params"]
    for point in prediction["points"]:
        phases = point["ranks"][0]["phases"]
        assert phases["init"]["allocated_peak_bytes"] / MIB == pytest.approx(line["after_init_peak_mib"], rel=0.005)
        row = rows[point["sequence_length"]]
        for phase in ("forward", "backward", "optimizer"):
            predicted = phases[phase]["allocated_peak_bytes"] / MIB
            assert predicted == pytest.approx(row[f"{phase}_allocated_peak_mib"], rel=0.005), phase
            assert phases[phase]["reserved_peak_bytes"] >= phases[phase]["allocated_peak_bytes"]
    (point,) = prediction["points"]
    assert (point["fits"], point["fails_in"]) == (False, "forward")


def test_ranks_that_hold_other_layers_take_other_memory(predictions: Predictions) -> None:
    # As measured with an 8B on 4 H200s: with offloaded states the first and the last rank, which hold the embedding's
    # and the head's gradients, peak higher than those between.
    (point,) = predictions.found("layers")["points"]
    peaks = [rank["phases"]["backward"]["allocated_peak_bytes"] for rank in point["ranks"]]
    assert [rank["rank"] for rank in point["ranks"]] == [0, 1, 2]
    assert min(peaks[0], peaks[2]) > peaks[1] + 16 * MIB, peaks
    assert point["nvml_bytes"] == max(rank["nvml_bytes"] for rank in point["ranks"])


def test_a_dry_run_writes_none_of_deepspeeds_outputs(predictions: Predictions) -> None:
    for stage in (2, 3):
        assert predictions.found(f"outputs-{stage}")["points"]
    assert (predictions.folder / "profile.txt").read_text() == "kept"
    assert not (predictions.folder / "logs").exists()


def test_what_deepspeed_refuses_is_one_line_with_status_2(predictions: Predictions) -> None:
    answer = predictions.answers["refused"]
    assert answer["status"] == 2
    (line,) = answer["output"].splitlines()
    assert "stage" in line or "zero_optimization" in line


def test_an_unknown_model_is_one_line_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model_type": "no-such-model"}))
    command = [sys.executable, "-m", "ftmon.tui.cli", "predict", "--model", str(tmp_path / "model.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("predicting: ")]
    assert "no-such-model" in line
