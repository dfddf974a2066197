"""The prediction of a run that is going on, sent by its hub, and what becomes of the processes of a prediction."""

import os
import signal
import subprocess
import sys

import msgspec
import pytest
from eventually import eventually
from ftmon.protocol.errors import ConfigError
from ftmon.protocol.messages.memory import PredictedPhase, PredictedPoint, Prediction
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir, RunOptions
from ftmon.protocol.run.start import StartRequest
from ftmon.trainer.launch.start import start_run
from ftmon.trainer.predict import ranks
from ftmon.trainer.predict.dry import DryRun
from ftmon.trainer.predict.live import cache_file
from hub_client import exit_of, fake_ranks, hub_gone, hub_of
from run_picture import pictured

CONFIG = """
training: {sequence_length: 512, max_steps: 10, micro_batch: 2, grad_accumulation: 1}
zero: {stage: 2}
"""
KNOWN = Prediction(5.0, [PredictedPoint(0, 512, [PredictedPhase("backward", 2**30)])], 2, 0.02, gpu="H200 141 GB")


def recorded(run: RunDir) -> list[Prediction]:
    with Reader(run.recording) as reader:
        return [frame.message for frame in reader.frames(0, 10_000) if isinstance(frame.message, Prediction)]


def test_a_configuration_predicted_before_is_sent_and_kept_once_whatever_becomes_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    kept = cache_file(CONFIG + "output: {dir: /before}\n", "NVIDIA H200")
    kept.parent.mkdir(parents=True)
    kept.write_bytes(msgspec.json.encode(KNOWN))
    config = CONFIG + "output: {dir: /elsewhere}\n"
    ranks = fake_ranks({"pretends": "NVIDIA H200"}, {"pretends": "NVIDIA H200"})
    run = start_run(StartRequest("train", options=RunOptions(logs=False)), "predicted", ranks, config)
    with pictured(run):
        expected = msgspec.structs.replace(KNOWN, cached=True, config=config)
        hub = hub_of(run).process.pid
        assert eventually(lambda: recorded(run), "the prediction") == [expected]
        assert msgspec.json.decode(run.prediction.read_bytes(), type=Prediction) == expected
        os.kill(hub, 9)
        eventually(lambda: (now := run.living_hub()) is not None and now.process.pid != hub, "another hub")
        os.kill(run.read_run().launcher.pid, 15)  # type: ignore[union-attr]
        exit_of(run)
        hub_gone(run)
    assert recorded(run) == [expected]


BACKGROUND = """
import os, sys, time
from ftmon.trainer.host.processes import end_with_parent, lower_priority
end_with_parent(os.getppid())
lower_priority()
idle = os.sched_getscheduler(0) == os.SCHED_IDLE
print(idle, os.nice(0), open("/proc/self/oom_score_adj").read(), flush=True, end="")
time.sleep(600)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_background_process_yields_to_everything_and_ends_with_its_parent():
    words = [sys.executable, "-c", PARENT, BACKGROUND]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        told = parent.stdout.readline()
        os.kill(parent.pid, signal.SIGKILL)
        assert told == "True 19 1000\n"
        assert parent.stdout.read() == ""  # the other end is closed once the child has gone, too


def test_a_refusal_in_a_ranks_process_is_raised_here_and_one_that_dies_is_told_by_its_signal():
    def refuse(rank: int) -> DryRun:
        raise ConfigError(f"rank {rank}: no such stage")

    with pytest.raises(ConfigError, match="rank 3: no such stage"):
        ranks.run(refuse, [3], [8])

    def die(rank: int) -> DryRun:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(ConfigError, match="rank 1 was killed by SIGKILL"):
        ranks.run(die, [1], [8])


def _raise() -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("call", "words", "traceback"),
    [
        (lambda: os._exit(7), "the dry run ended with exit status 7, without a result", False),
        (lambda: os._exit(0), "the dry run ended with exit status 0, without a result", False),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the dry run was killed by SIGKILL", False),
        (_raise, "the dry run failed; its traceback is above", True),
    ],
)
def test_how_a_process_without_a_result_ended_is_reported(call, words, traceback, capfd):
    with pytest.raises(ConfigError) as refusal:
        ranks.once(call, type(None))
    assert str(refusal.value) == words
    assert ("RuntimeError: no" in capfd.readouterr().err) is traceback
