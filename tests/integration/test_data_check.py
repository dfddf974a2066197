"""``ftmon data check`` as a person calls it, on the demo's data and on data with a fault."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("datasets")

from ftmon.trainer.recipe.data_check.__main__ import main
from ftmon.trainer.recipe.start import DATA


def test_the_demos_data_are_clean_and_a_fault_is_named_with_its_line(tmp_path, capsys):
    config = tmp_path / "train.yaml"
    config.write_text(
        "model: {config: {model_type: qwen2}}\ntokenizer: {vocab_size: 1024}\n"
        f"data: {{path: {DATA}, packing: true}}\ntraining: {{sequence_length: 128}}\nrun: {{device: cuda}}\n"
    )
    assert main([str(config), "--samples", "1"]) == 0
    clean, errors = capsys.readouterr()
    assert errors == ""
    assert "⟦Stockholm is the capital of Sweden.<|end|>⟧" in clean
    assert "747 of 747 learned" in clean
    (tmp_path / "broken.jsonl").write_text(DATA.read_text() + '{"prompt": "Hi", "response": null}\n')
    command = [sys.executable, "-m", "ftmon.tui.cli", "data", "check", "train.yaml", "--json", "data.path=broken.jsonl"]
    broken = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert (broken.returncode, broken.stderr) == (1, "")
    (finding,) = json.loads(broken.stdout)["findings"]
    assert (finding["kind"], finding["first"]) == ("refused", [["broken.jsonl:748", "response is null"]])
    assert finding["fix"] == "repair or remove them; none is trained on"
