"""Data and models of the Hugging Face hub, asked for by a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

import fake_hub
from ftmon.trainer.recipe.data_check import __main__ as data_check
from ftmon.trainer.recipe.preflight.resolve import hub_refusal

ASKS = """
import os
import sys
from pathlib import Path
import torch.distributed as dist
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.export import export
folder, name = Path(sys.argv[1]), sys.argv[2]
for token in (os.environ["HF_TOKEN"], os.environ["HF_TOKEN"], "hf_reads"):
    os.environ["HF_TOKEN"], kept = token, os.environ["HF_TOKEN"]
    try:
        print(export.push(folder, name))
    except FtmonError as error:
        print(error)
os.environ["HF_TOKEN"] = kept
world = World()
assert dist.is_initialized()
upload = export.push
export.push = lambda *arguments: f"{upload(*arguments)}, in a group: {dist.is_initialized()}"
export.push_last(folder, "me/last", world)
print("pushed", flush=True)
input()
# The hub is gone.
import time
time.sleep = lambda seconds: None  # the pauses between the hub library's 24 attempts add up to 92 s
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data
from ftmon.trainer.recipe.data.records import read_records
from ftmon.trainer.recipe.config import schema as model
from ftmon.trainer.recipe.model import tokenizer
for attempt in (
    lambda: read_records(Config(data=Data(name="me/words"))),
    lambda: tokenizer.load(Config(model=model.Model(name="me/model")), None),
):
    try:
        attempt()
    except ConfigError as error:
        print(error)
"""
NOWHERE = "http://127.0.0.1:9"
"""The port of "discard": nothing listens."""


def test_a_model_is_pushed_to_a_private_repository_by_rank_0_outside_of_its_group_and_a_lost_hub_is_a_line(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    written = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 100, "README.md": b"---\n---\n# model\n"}
    for name, content in written.items():
        (model / name).write_bytes(content)
    with fake_hub.serving() as hub, (tmp_path / "errors").open("w+") as errors:
        environment = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        environment |= {"HF_ENDPOINT": hub.address, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path / "home")}
        environment.pop("HF_HUB_OFFLINE", None)
        command = [sys.executable, "-c", ASKS, str(model), "me/poems"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)
        assert process.stdout is not None
        said = "".join(iter(lambda: process.stdout.readline().replace("pushed\n", ""), ""))
    lines, _ = process.communicate("\n", timeout=240)
    assert process.returncode == 0, (tmp_path / "errors").read_text()
    first, again, refused, *_ = said.splitlines()
    assert first == again == f"pushed to {hub.address}/me/poems", "the second time the repository is there"
    assert refused.startswith("the model could not be pushed to me/poems: ")
    assert refused.endswith(f"it is whole in {model}: hf upload me/poems {model}")
    assert f"pushed to {hub.address}/me/last, in a group: False\n" in said, "ranks have left their group"
    assert hub.files == {"me/poems": written, "me/last": written}
    created = hub.repositories["me/poems"]
    assert created.get("private") is True or created.get("visibility") == "private", json.dumps(created)

    data, base = lines.strip().splitlines()
    assert data.startswith("data.name: me/words cannot be read: ")
    assert base.startswith("model.name: no tokenizer can be loaded from me/model: ")
    assert all("hub" in line.lower() or "connect" in line.lower() for line in (data, base)), lines


def test_a_name_on_an_unreachable_hub_is_refused_in_one_line_without_retries(tmp_path, monkeypatch, capsys):
    """By a process and within this one; a chat's is in its unit test, a prediction's in test_predict_config."""
    for name, value in {"HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path), "FTMON_HOME": str(tmp_path / "runs")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    said = "me/model: cannot reach 127.0.0.1 (Connection refused), and the cache has no copy; give a local"
    words = ["model.name=me/model", "data.name=me/words"]
    command = [sys.executable, "-m", "ftmon.tui.cli", "train", *words, "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert data_check.main(words) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert said in errors


def test_without_a_connection_the_cache_is_used_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", NOWHERE)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert "cannot reach" in hub_refusal("me/model")
    (tmp_path / "hub" / "models--me--model" / "snapshots" / "main").mkdir(parents=True)
    assert hub_refusal("me/model") == ""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert hub_refusal("me/other") == "", "the libraries refuse it at once"


def test_a_reachable_hub_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with fake_hub.serving() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        assert hub_refusal("me/model") == ""
        assert os.environ["HF_HUB_OFFLINE"] == "0"
