"""``ftmon resume RUN`` continues a run of ftmon's trainer, by the real executable."""

import os
import time

import msgspec
import pytest
from ftmon.protocol.host.process import this_process
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run import exits
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon.tui.cli.main import main
from ftmon_process import Ftmon, lines_with, wait_until_nothing_is_left

SMALL = (
    *("--ranks", "1", "--plain", "--steps", "6", "training.rehearsal=false", "data.limit=80", "optimizer.lr=2e-3"),
    "model.config={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 1}",
)


def planted(home: Ftmon, kind: str, *, config: bool = True, alive: bool = False, state: str = "") -> RunDir:
    run = RunDir(home.home / "runs" / "planted-20260528-202640")
    for folder in (home.home, run.path.parent, run.path, run.logs):
        folder.mkdir(mode=0o700, exist_ok=True)
    content = RunFile(run.id, "planted", time.time(), ["torchrun", "train.py"], "/", os.uname().nodename, kind)
    run.write_run(msgspec.structs.replace(content, launcher=this_process() if alive else None))
    if config:
        run.config.write_text("model: {config: {model_type: llama}}\ndata: {path: /nowhere.jsonl}\n")
    if state:
        run.write_exit(ExitFile(0, time.time(), state))
    return run


def test_a_run_that_crashed_continues_with_its_configuration_from_its_newest_checkpoint(home):
    failed = home.run("demo", *SMALL, "checkpoint={every: 2, background: false}", "--fault", "crash:step=5")
    assert failed.returncode not in (0, 2, *exits.OWN), failed.stderr
    before = home.newest()
    wait_until_nothing_is_left(before)
    with Reader(before.recording) as reader:
        (died,) = [alert for alert in reader.alerts() if alert.kind == "died"]
    assert "rank 0" in died.title
    resumed = home.run("resume", before.id[:4], "--plain", "output.log_every=1")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = home.newest()
    assert after.id != before.id
    assert lines_with(resumed.stdout, ["resume: from step-4, after step 4"])
    status = home.status(after.id)
    assert (status["step"], status["state"], status["name"]) == (6, "finished", "demo")
    assert status["overrides"][-1] == "output.log_every=1"
    assert "optimizer.lr=2e-3" in status["overrides"]
    done = home.run("resume", after.id)
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"ftmon: {after.id}: has finished; to train longer, give training.max_steps=N or training.epochs=N\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("kind", "facts", "text"),
    [
        (
            "run",
            {},
            "is not a run of ftmon's trainer; start its script again with the script's own option for resuming",
        ),
        ("train", {"config": False}, "is not a run of ftmon's trainer"),
        ("train", {"alive": True}, "is still running; 'ftmon stop planted-20260528-202640' saves a checkpoint"),
        ("train", {}, "no complete checkpoint is in "),
    ],
    ids=["another script", "no configuration", "running", "no checkpoint"],
)
def test_what_cannot_be_resumed_is_refused_in_one_line(home, kind, facts, text, monkeypatch, capsys):
    monkeypatch.setenv("FTMON_HOME", str(home.home))
    run = planted(home, kind, **facts)
    assert main(["resume", "planted", "--plain"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"ftmon: {run.id}: {text}")
    assert [each.id for each in home.runs()] == [run.id]
