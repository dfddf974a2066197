"""Checks across keys, files and the machine, before anything starts."""

import os
import re
import socket
from pathlib import Path

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe import hardware
from ftmon.trainer.recipe.checkpoint import manifest
from ftmon.trainer.recipe.checkpoint.manifest import Manifest
from ftmon.trainer.recipe.config.load import Loaded, load
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.preflight import resolve
from ftmon.trainer.recipe.state import TrainState
from places import DATA

MODEL = "model.config={model_type: qwen2, hidden_size: 64}"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n')
    return path


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "usable_gpus", list[str])


def loaded(data: Path, *overrides: str) -> Loaded:
    return load(None, [MODEL, f"data.path={data}", *overrides])


def refusal(data: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as raised:
        resolve.resolve(loaded(data, *overrides))
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_was_left_to_choose_is_settled(data, monkeypatch):
    monkeypatch.chdir(data.parent)
    resolved = resolve.resolve(loaded(Path(data.name), "output.dir=out"))
    config = resolved.config
    assert (resolved.device, resolved.gpus, resolved.ranks) == ("cpu", [], 1)
    assert config.training.precision == "fp32"
    assert config.run.threads == hardware.cores()
    assert config.data.path == str(data)
    assert config.output.dir == str(data.parent / "out")
    assert resolve.resolve(Loaded(config, "train.yaml")).config == config


FEW = "model.config.num_hidden_layers=2"
WIDE = "model.config={model_type: llama, hidden_size: 4096, intermediate_size: 14336, num_hidden_layers: 32}"


@pytest.mark.parametrize(
    ("ranks", "overrides", "stage"),
    [
        (2, [FEW], 1),
        (2, [], 2),
        (2, [FEW, "zero.stage=2"], 2),
        (2, [WIDE], 2),
        (1, [FEW], 2),
        (2, [FEW, "run.device=cpu"], 2),
        (2, [FEW, "training.precision=fp16"], 2),
        (2, [FEW, "optimizer.kind=muon", "optimizer.max_grad_norm=0"], 2),
        (2, [FEW, "zero.offload_optimizer=true"], 2),
        (2, [FEW, "training.sequence_parallel_size=2"], 2),
        (2, [FEW, "lora.rank=8"], 1),
    ],
)
def test_small_models_keep_whole_gradients_on_several_gpus_unless_a_stage_is_given(ranks, overrides, stage, data):
    assert resolve.resolve(loaded(data, *overrides), elsewhere=ranks).config.zero.stage == stage


def test_all_gpus_are_taken_unless_fewer_and_ranks_have_few_threads_unless_the_host_computes(data, monkeypatch):
    monkeypatch.setattr(hardware, "usable_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(hardware, "cores", lambda: 64)
    for words, gpus, precision, threads in (
        ([], 4, "bf16", 4),
        (["run.ranks=2"], 2, "bf16", 4),
        (["run.ranks=2", "zero.offload_optimizer=true"], 2, "bf16", 32),
        (["run.threads=7"], 4, "bf16", 7),
        (["run.device=cpu"], 0, "fp32", 64),
    ):
        found = resolve.resolve(loaded(data, *words))
        assert found.gpus == ["0", "1", "2", "3"][:gpus]
        assert (found.config.training.precision, found.config.run.threads) == (precision, threads)


def test_a_data_sets_folder_is_found_in_the_home_directory_and_settled(data, monkeypatch):
    monkeypatch.setenv("HOME", str(data.parent))
    (data.parent / "poems").mkdir()
    settled = resolve.resolve(loaded(data, "data.path=", "data.name=~/poems", "run.device=cpu")).config
    assert settled.data.name == str(data.parent / "poems")
    named = resolve.resolve(loaded(data, "data.path=", "data.name=me/poems", "run.device=cpu")).config
    assert named.data.name == "me/poems"


def test_more_ranks_than_gpus_and_a_port_that_is_taken_are_refused(data, monkeypatch):
    monkeypatch.setattr(hardware, "usable_gpus", lambda: ["0"])
    assert refusal(data, "run.ranks=2") == "command line: run.ranks is 2, but 1 GPU is visible"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"run.master_port {port} is taken" in refusal(data, f"run.master_port={port}")


@pytest.mark.parametrize("line", (DATA / "refusals.txt").read_text().splitlines()[1:])
def test_what_does_not_hold_is_refused_in_one_line(data, line):
    overrides, _, words = line.partition(" -> ")
    text = refusal(data, *overrides.split(" & "))
    assert words in text
    assert text.startswith("command line: ")


def test_without_a_compiler_compilation_is_refused(data, monkeypatch):
    words = ("model.compile=layers", "data.packing=true")
    assert resolve.resolve(loaded(data, *words)).config.model.compile == "layers"
    monkeypatch.setenv("PATH", str(data.parent))
    monkeypatch.delenv("CXX", raising=False)
    assert re.search(r"model\.compile needs a C\+\+ compiler .*, not found here", refusal(data, *words))


def test_a_place_of_the_file_is_named_and_without_a_complete_checkpoint_a_run_begins_anew(data):
    path = data.parent / "train.yaml"
    path.write_text(f"model:\n  config: {{model_type: qwen2}}\ndata:\n  path: {data}x\n")
    with pytest.raises(ConfigError) as raised:
        resolve.resolve(load(str(path)))
    assert str(raised.value) == f"{path}:4: data.path {data}x: no such file"
    here = f"output.dir={data.parent / 'out'}"
    (data.parent / "out" / "checkpoints" / "step-3.part").mkdir(parents=True)
    assert resolve.resolve(loaded(data, here)).config.checkpoint.resume == "auto"
    (data.parent / "out" / "checkpoints" / "step-2").mkdir()
    assert "holds no complete checkpoint: step-2 is incomplete: no manifest.json; begin anew" in refusal(data, here)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_data_file_in_another_encoding_is_refused_with_how_to_convert_it(data, name, encoding):
    text = {"a.jsonl": '{"text": "caf\xe9"}\n', "a.json": '[{"text": "caf\xe9"}]', "a.csv": "text\ncaf\xe9\n"}
    path = data.with_name(name)
    path.write_bytes(text.get(name, "caf\xe9\n").encode(encoding))
    name = "LATIN1" if encoding == "latin-1" else "UTF-16"
    assert f"is not text in UTF-8; convert the file, as iconv -f {name} -t UTF-8" in refusal(path)


def test_a_file_in_a_models_place_is_no_name_of_the_hub(data, monkeypatch):
    monkeypatch.chdir(data.parent)
    expected = f"tokenizer.name {data.name}: is a file; give the folder that has it"
    assert expected in refusal(data, f"tokenizer.name={data.name}")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", "[" * 100_000, "line 1 is nested too deeply"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.jsonl", '\n{\n  "text": "a"\n}\n', "line 2 is not JSON: .* at column 2; one record a line is read"),
        ("a.json", "[]", "holds no records"),
        ("a.csv", "text\na,b\n", "a.csv:2 has 2 fields, and the header 1"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "not json\n", "line 1 is not JSON"),
        ("a.jsonl", "[1, 2]\n", "line 1 is not a JSON object"),
    ],
)
def test_a_first_record_that_cannot_be_read_is_refused_with_its_line(data, name, content, words):
    path = data.with_name(name)
    path.write_text(content)
    assert re.search(f"data.path {path}: {words}", refusal(path))


def checkpoint(folder: Path, step: int, config: Config) -> None:
    path = folder / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    settings = manifest.identity(config)
    manifest.write(path, Manifest(float(step), TrainState(step=step), 2, "fp32", {}, [], {}, settings))


def test_an_output_folder_is_continued_by_the_same_configuration_and_not_written_over(data):
    out = data.parent / "out"
    here = f"output.dir={out}"
    assert resolve.resolve(loaded(data)).config.checkpoint.resume == "never"
    same = resolve.resolve(loaded(data, here)).config
    assert same.checkpoint.resume == "auto"
    checkpoint(out, 2, same)
    checkpoint(out, 4, same)
    assert resolve.resolve(loaded(data, here, "run.name=again")).config.checkpoint.resume == "auto"
    assert refusal(data, here, "optimizer.lr=1e-3", "checkpoint.resume=auto") == (
        f"command line: output.dir {out}: step-4 in it is of another configuration: optimizer.lr was 2e-05 and is "
        f"0.001; go on from it with checkpoint.resume={out}, begin anew with output.overwrite=true, or give another "
        "folder"
    )
    assert "holds results of an earlier run" in refusal(data, here, "checkpoint.resume=never")
    for words, resume in (
        ((f"checkpoint.resume={out}", "optimizer.lr=1e-3"), str(out)),
        (("output.overwrite=true", "optimizer.lr=1e-3"), "never"),
        (("output.overwrite=true",), "never"),
        (("output.overwrite=true", "checkpoint.resume=auto"), "auto"),
        (("output.overwrite=true", "checkpoint.resume=auto", "optimizer.lr=1e-3"), "never"),
    ):
        assert resolve.resolve(loaded(data, here, *words)).config.checkpoint.resume == resume
    (out / "model").mkdir()
    assert "holds the final model of an earlier run; go on from it with checkpoint.resume=" in refusal(data, here)
    assert resolve.resolve(loaded(data, here, "checkpoint.resume=auto")).config.output.dir == str(out)
    (out / "checkpoints").rename(data.parent / "gone")
    assert "earlier run; begin anew with output.overwrite=true, or give another folder" in refusal(data, here)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_an_output_folder_that_cannot_be_written_is_refused(data):
    assert "cannot be written" in refusal(data, "output.dir=/proc/out")
