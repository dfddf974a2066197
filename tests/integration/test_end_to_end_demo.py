"""One finished demo, with a spike of memory, started by the real executable without a terminal, and what it answers."""

import json
import sqlite3
import subprocess
from collections.abc import Iterator

import pytest
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import SMALL, Ftmon, ftmon_home, lines_with, wait_until_nothing_is_left

STEPS = 10
SPIKE = 8
"""The step of a fault in it: late enough for a history to compare with."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path_factory.mktemp("home")) as ftmon:
        yield ftmon


@pytest.fixture(scope="module")
def demo(home: Ftmon) -> "subprocess.CompletedProcess[str]":
    words = ("--steps", str(STEPS), "--fault", f"spike:step={SPIKE}", *SMALL, "training.rehearsal=true")
    return home.run("demo", *words)


@pytest.fixture(scope="module")
def run(home: Ftmon, demo: "subprocess.CompletedProcess[str]") -> RunDir:
    assert demo.returncode == 0, demo.stdout + demo.stderr
    return home.newest()


def test_without_a_terminal_progress_and_a_spike_are_printed_no_process_left_and_every_step_recorded(demo, run):
    (last,) = lines_with(demo.stdout, [f"step {STEPS}/{STEPS} "])
    assert all(word in last for word in ("loss ", " tok/s", " s/step", "peak ", "iB"))
    assert "\x1b" not in demo.stdout
    (spike,) = (alert for alert in Reader(run.recording).alerts() if alert.kind == "spike")
    assert "rank 1" in spike.title, demo.stdout
    assert "spike: " in demo.stdout
    wait_until_nothing_is_left(run)
    with sqlite3.connect(f"file:{run.recording}?mode=ro", uri=True) as connection:
        found = connection.execute("SELECT rank, count(DISTINCT step), max(step) FROM steps GROUP BY rank").fetchall()
    assert found == [(0, STEPS, STEPS), (1, STEPS, STEPS)]


def test_the_last_lines_say_where_the_recording_and_the_model_are_which_loads_and_speaks(demo, run):
    assert f"recording:  {run.recording}" in demo.stdout
    assert f"replay it:  ftmon replay {run.id}" in demo.stdout
    assert f"chat:       ftmon chat {run.id}" in demo.stdout
    (line,) = lines_with(demo.stdout, ["model:  "])
    folder = line.split(":", 1)[1].strip()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("What", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape[-1] == model.config.vocab_size
    assert bool(torch.isfinite(logits).all())


def test_the_recording_replays_as_the_lines_which_attach_tells_again_and_a_torn_one_what_is_left(home, run, tmp_path):
    replays = [("replay", name, "--plain") for name in (run.id, str(run.path), str(run.recording))]
    for words in (*replays, ("attach", run.id[:6])):
        told = home.run(*words)
        assert told.returncode == 0, told.stderr
        assert lines_with(told.stdout, [f"step {STEPS}/{STEPS} ", "loss "])
        assert lines_with(told.stdout, ["finished"])
    torn = tmp_path / "torn.sqlite"
    whole = run.recording.read_bytes()
    torn.write_bytes(whole[: len(whole) * 2 // 3])
    told = home.run("replay", str(torn), "--plain")
    assert "Traceback" not in told.stderr
    assert told.returncode in (0, 1)
    assert (told.returncode == 0 and "incomplete: " in told.stdout) or told.stderr.count("\n") == 1


def test_ls_status_and_logs_have_it(home, run):
    listed = home.run("ls")
    assert listed.returncode == 0, listed.stderr
    assert lines_with(listed.stdout, [run.id, "finished"])
    (entry,) = json.loads(home.run("ls", "--json").stdout)
    assert entry["id"] == run.id
    assert "finished" in home.run("status", run.id).stdout
    assert home.status(run.id)["state"] == "finished"
    told = home.run("logs", run.id, "--text", "final model")
    assert told.returncode == 0, told.stderr
    (line,) = told.stdout.splitlines()
    assert line.startswith("rank 0| ")


@pytest.mark.parametrize("command", [("kill",), ("stop",)])
def test_acting_on_a_finished_run_says_so(home, run, command):
    done = home.run(*command, run.id)
    assert done.returncode == 0, done.stderr
    assert "has ended" in done.stdout
