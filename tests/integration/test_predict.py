"""``ftmon predict`` beside peaks measured on H200s (``bench/data/h200_peaks.jsonl``)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[2] / "bench" / "data" / "h200_peaks.jsonl"
MIB = 1 << 20
QWEN = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip


def ftmon(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ftmon.tui.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)


def without_progress(errors: str) -> list[str]:
    """Return the lines of standard error but those of a prediction that takes more than 2 s."""
    return [line for line in errors.splitlines() if not line.startswith("predicting: ")]


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


@pytest.mark.parametrize(("stage", "adam"), [(3, "deepspeed"), (0, "torch")])
def test_a_step_takes_what_was_measured_on_a_gpu(stage: int, adam: str, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(QWEN))
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, "gradient_clipping": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    done = ftmon(
        *("predict", "--model", str(tmp_path / "model.json"), "--deepspeed", str(tmp_path / "ds.json")),
        *("--optimizer", adam, "--sequence-length", "4096", "--capacity", "16GiB", "--json"),
    )
    assert done.returncode == 0, done.stderr
    prediction = json.loads(done.stdout)
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


def test_ranks_that_hold_other_layers_take_other_memory(tmp_path: Path) -> None:
    # As measured with an 8B on 4 H200s: with offloaded states the first and the last rank, which hold the embedding's
    # and the head's gradients, peak higher than those between.
    model = {**QWEN, "num_hidden_layers": 4, "vocab_size": 32000, "tie_word_embeddings": False}
    (tmp_path / "model.json").write_text(json.dumps(model))
    partition = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": partition}))
    done = ftmon(
        *("predict", "--model", str(tmp_path / "model.json"), "--deepspeed", str(tmp_path / "ds.json")),
        *("--ranks", "3", "--sequence-length", "64", "--json"),
    )
    assert done.returncode == 0, done.stderr
    (point,) = json.loads(done.stdout)["points"]
    peaks = [rank["phases"]["backward"]["allocated_peak_bytes"] for rank in point["ranks"]]
    assert [rank["rank"] for rank in point["ranks"]] == [0, 1, 2]
    assert min(peaks[0], peaks[2]) > peaks[1] + 16 * MIB, peaks
    assert point["nvml_bytes"] == max(rank["nvml_bytes"] for rank in point["ranks"])


def test_free_memory_is_not_that_of_this_hosts_gpus(tmp_path: Path) -> None:
    # NVML's module as on a host with GPUs, which DeepSpeed would ask; beside a run none is visible.
    (tmp_path / "pynvml.py").write_text("class NVMLError(Exception): pass\ndef nvmlInit(): pass\n")
    (tmp_path / "model.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 1, "vocab_size": 512}))
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    words = ("--model", str(tmp_path / "model.json"), "--deepspeed", str(tmp_path / "ds.json"))
    command = [sys.executable, "-P", "-m", "ftmon.trainer.predict", *words, "--sequence-length", "8"]
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stage", [2, 3])
def test_a_dry_run_writes_none_of_deepspeeds_outputs(stage: int, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 1, "vocab_size": 512}))
    profile, logs = tmp_path / "profile.txt", tmp_path / "logs"
    profile.write_text("kept")
    settings = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "csv_monitor": {"enabled": True, "output_path": str(logs)},
        "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(profile)},
    }
    (tmp_path / "ds.json").write_text(json.dumps(settings))
    words = ("--model", str(tmp_path / "model.json"), "--deepspeed", str(tmp_path / "ds.json"))
    done = ftmon("predict", *words, "--sequence-length", "8")
    assert done.returncode == 0, done.stderr
    assert profile.read_text() == "kept"
    assert not logs.exists()


def test_what_deepspeed_refuses_is_one_line_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({**QWEN, "num_hidden_layers": 1}))
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 7}}))
    done = ftmon("predict", "--model", str(tmp_path / "model.json"), "--deepspeed", str(tmp_path / "ds.json"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(without_progress(done.stderr)) == 1, done.stderr
    assert "stage" in done.stderr or "zero_optimization" in done.stderr


def test_an_unknown_model_is_one_line_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model_type": "no-such-model"}))
    done = ftmon("predict", "--model", str(tmp_path / "model.json"))
    assert done.returncode == 2
    assert len(without_progress(done.stderr)) == 1, done.stderr
    assert "no-such-model" in done.stderr
