"""The command and environment that start the ranks."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from ftmon.protocol.errors import ConfigError, UsageError
from ftmon.protocol.run.rundir import RunOptions, home
from ftmon.protocol.run.start import StartRequest
from ftmon.trainer.recipe import __main__ as rank
from ftmon.trainer.recipe import hardware, start
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.data_check import __main__ as data_check
from ftmon.trainer.recipe.preflight import resolve


def test_the_demo_s_data_are_small_distinct_and_whole_and_its_overrides_checked_like_others():
    records = [json.loads(line) for line in start.DATA.read_text().splitlines()]
    assert 400 <= len(records) <= 800
    assert len({record["prompt"] for record in records}) == len(records)
    assert all(set(record) == {"prompt", "response"} and all(record.values()) for record in records)
    with pytest.raises(ConfigError, match=r"^command line: zero\.stage must be"):
        start.demo_config(["zero.stage=4"])


@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1", "2", "3"]])
def test_it_takes_all_gpus_or_two_cpu_ranks(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settled = resolved(monkeypatch, gpus)
    assert (settled.ranks, settled.gpus, settled.config.zero.stage) == (len(gpus) or 2, gpus, 2)


def test_a_long_setting_that_comes_first_is_not_taken_for_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    first = f"model.config={{model_type: llama, no_such: {'x' * 300}}}"
    assert start._file(StartRequest(kind="train", config=first)) == ""
    assert data_check.main([first]) == 2
    assert capsys.readouterr().err.startswith("ftmon: command line: data needs a path")


def resolved(monkeypatch: pytest.MonkeyPatch, gpus: list[str], *overrides: str) -> resolve.Resolved:
    monkeypatch.setattr(hardware, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(start, "usable_gpus", lambda: gpus)
    return resolve.resolve(start.demo_config(list(overrides)))


def option(words: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in words if word.startswith(f"--{name}=")]
    return found


def test_cpu_ranks_are_numbered_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 8)
    settled = resolved(monkeypatch, [], "run.ranks=2")
    words = start.launch_command(settled)
    assert option(words, "ranks") == "2"
    assert not [word for word in words if word.startswith("--gpus")]
    wanted = {"OMP_NUM_THREADS": "4", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    assert start.launch_environment(settled, {}).items() >= wanted.items()


def test_gpu_ranks_keep_the_devices_the_person_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = resolved(monkeypatch, ["3", "GPU-aa", "1"], "run.ranks=2")
    assert option(start.launch_command(settled), "gpus") == "3,GPU-aa"
    environment = start.launch_environment(settled, {"OMP_NUM_THREADS": "5"})
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(home() / "compiled")
    assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cuda", "5")
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_a_rank_s_libraries_do_not_find_scikit_learn_which_later_imports_do(monkeypatch):
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    found = importlib.util.find_spec("sklearn")
    with rank._without_sklearn():
        assert importlib.util.find_spec("sklearn") is None
    assert importlib.util.find_spec("sklearn") == found


def test_a_port_that_was_chosen_is_kept_and_another_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    port = hardware.free_port()
    words = start.launch_command(resolved(monkeypatch, [], f"run.master_port={port}"))
    assert option(words, "port") == str(port)
    words = start.launch_command(resolved(monkeypatch, []))
    assert hardware.port_is_free(int(option(words, "port")))
    assert Path(words[0]).name.startswith("python")
    assert words[-1] == "ftmon.trainer.recipe"
    assert words[words.index("-m") + 1] == "ftmon.trainer.recipe.launcher"


def test_the_configuration_says_where_a_run_is_sent_unless_the_command_line_does(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    for written in ("otel, otel", "[otel]"):
        file.write_text(f"monitor:\n  metrics: {tmp_path}/run.prom\n  report_to: {written}\n")
        options = start._with_monitor(StartRequest("train"), load(str(file))).options
        assert (options.metrics, set(options.report_to)) == (f"{tmp_path}/run.prom", {"otel"})
    given = RunOptions(metrics="9400", report_to=["wandb"])
    assert start._with_monitor(StartRequest("train", options=given), load(str(file))).options == given


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("report_to: otel,wandbb", "monitor.report_to wandbb: must be one of otel, wandb"),
        ("metrics: here", "monitor.metrics here: must be [HOST:]PORT"),
        ("metrics: /no/such/run.prom", "monitor.metrics /no/such/run.prom: /no/such is not a folder"),
    ],
)
def test_a_place_that_does_not_exist_is_refused_with_its_line(written: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(f"monitor:\n  {written}\n")
    with pytest.raises(UsageError) as refused:
        start.start_trainer(StartRequest("train"), load(str(file)))
    assert str(refused.value).startswith(f"{file}:2: {said}")
