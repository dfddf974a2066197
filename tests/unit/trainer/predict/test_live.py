"""Which runs are predicted, and what is sent where none can be."""

from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.messages.memory import Prediction
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello
from ftmon.protocol.run.rundir import RunDir, RunFile, RunOptions
from ftmon.trainer.hub.analyses import PredictionProcess
from ftmon.trainer.predict.live import cache_file, lengths


def hello(kind: Any) -> Hello:
    device = DeviceInfo(kind, 0, "NVIDIA H200" if kind == "cuda" else "some CPU", 2**30)
    return Hello(0, 0, 1, "here", 1, 1, device, "cuda" if kind == "cuda" else "glibc", 1.0)


@pytest.fixture
def predicting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "config.yaml").write_text("training: {sequence_length: 64}\n")
    (tmp_path / "logs").mkdir()
    sent: list[Any] = []
    begun: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: Any) -> None:
            begun.append(command)

        def poll(self) -> int:
            return 3

    monkeypatch.setattr("subprocess.Popen", Process)

    def make(kind: str = "train", **options: Any) -> tuple[PredictionProcess, list[Any], list[list[str]]]:
        file = RunFile("id", "name", 1.0, ["ftmon"], str(tmp_path), "here", kind, options=RunOptions(**options))
        return PredictionProcess(RunDir(tmp_path), file, sent.append), sent, begun

    return make


def test_ranks_on_a_cpu_have_no_prediction_and_the_reason_is_sent_once(predicting):
    made, sent, begun = predicting()
    made.hello(hello("cpu"))
    made.tick()
    made.hello(hello("cpu"))
    made.tick(stepped=False)
    assert not sent, "a rank says so until its script uses a GPU"
    made.tick(stepped=True)
    made.tick(stepped=True)
    assert [message.refused.partition(",")[0] for message in sent] == ["the ranks train on the CPU"]
    assert not begun


def test_a_rank_that_comes_to_use_a_gpu_is_predicted(predicting):
    made, sent, begun = predicting()
    made.hello(hello("cpu"))
    made.hello(hello("cuda"))
    made.tick(stepped=True)
    assert len(begun) == 1
    assert not any("on the CPU" in message.refused for message in sent)


@pytest.mark.parametrize(
    ("kind", "options", "earlier"),
    [("run", {}, []), ("watch", {}, []), ("train", {"predict": False}, []), ("train", {}, [Prediction(1.0)])],
)
def test_foreign_runs_and_those_that_an_earlier_hub_predicted_are_left_alone(predicting, kind, options, earlier):
    made, sent, begun = predicting(kind, **options)
    made.restore([hello("cuda"), *earlier])
    made.hello(hello("cuda"))
    assert (sent, begun) == ([], [])


def test_lengths_are_the_longest_and_its_halves_and_a_process_without_an_answer_is_told_with_its_log(predicting):
    assert lengths(4096) == [256, 512, 1024, 2048, 4096]
    assert lengths(24) == [8, 12, 24]
    made, sent, begun = predicting("demo")
    made.hello(hello("cuda"))
    made.hello(hello("cuda"))
    made.tick()
    made.hello(hello("cuda"))
    assert len(begun) == 1
    assert "--gpu=NVIDIA H200" in begun[0]
    assert [message.refused for message in sent] == ["its process ended (exit code 3): see logs/predict.log"]


def test_where_results_go_does_not_change_the_cached_prediction_and_the_zero_stage_does(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    config = "zero: {stage: 2}\nrun: {ranks: 2}\n"
    before = cache_file(config, "H200")
    assert cache_file(config + "checkpoint: {resume: /old}\noutput: {dir: /new}\n", "H200") == before
    assert before not in (cache_file(config.replace("2}", "3}", 1), "H200"), cache_file(config, "A100"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert cache_file(config, "H200") != before
