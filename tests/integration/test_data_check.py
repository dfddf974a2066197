"""``ftmon data check`` as a person calls it, on the demo's data and on data with a fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("datasets")

from ftmon.trainer.recipe.start import DATA


def check(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ftmon.tui.cli", "data", "check", *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_the_demos_data_are_clean_and_a_fault_is_named_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(
        "model: {config: {model_type: qwen2}}\ntokenizer: {vocab_size: 1024}\n"
        f"data: {{path: {DATA}, packing: true}}\ntraining: {{sequence_length: 128}}\nrun: {{device: cuda}}\n"
    )
    clean = check(tmp_path, "train.yaml", "--samples", "1")
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "⟦Stockholm is the capital of Sweden.<|end|>⟧" in clean.stdout
    assert "747 of 747 learned" in clean.stdout
    (tmp_path / "broken.jsonl").write_text(DATA.read_text() + '{"prompt": "Hi", "response": null}\n')
    broken = check(tmp_path, "train.yaml", "--json", "data.path=broken.jsonl")
    assert broken.returncode == 1
    (finding,) = json.loads(broken.stdout)["findings"]
    assert (finding["kind"], finding["first"]) == ("refused", [["broken.jsonl:748", "response is null"]])
    assert finding["fix"] == "repair or remove them; none is trained on"
    wrong = check(tmp_path, "train.yaml", "data.packnig=true")
    assert wrong.returncode == 2
    assert wrong.stderr == "command line: unknown key data.packnig; did you mean data.packing?\n"
