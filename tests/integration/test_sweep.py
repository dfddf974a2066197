"""A sweep of real gloo ranks: failures are rows, a killed sweep goes on where it was."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import start_ranks
from eventually import eventually
from ftmon.protocol.host.process import is_alive
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon.protocol.sweep.rows import Row, read
from ftmon.trainer.recipe.start import DATA
from ftmon_process import PROGRAM, wait_until_nothing_is_left
from terminal import command, open_terminal, wait_for

SCRIPT = Path(__file__).parent / "scripts" / "sweep_loop.py"


def write_sweep(folder: Path, whats: str, **keys: str) -> Path:
    path = folder / "faults.yaml"
    lines = [
        f"command: {json.dumps(start_ranks.command(2, SCRIPT, '{seq}', '{what}'))}",
        f"axes: {{seq: [64], what: [{whats}]}}",
        "steps: 4",
        "warm_up: 2",
        "hang_grace: 1 s",
        "budget: {money: 10, price_per_gpu_hour: 10, gpus: 2}",
        *(f"{name}: {value}" for name, value in keys.items()),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_killed_sweep_goes_on_and_what_failed_is_a_row(home, tmp_path):
    sweep = write_sweep(tmp_path, "ok, oom, hang", columns="[backward.peak, step_ms, loss]")
    results = tmp_path / "faults.results.jsonl"

    def hanging() -> Any:
        assert process.poll() is None, process.communicate()
        if not results.exists() or not results.stat().st_size:
            return None
        running = read(results).running
        return running if running is not None and running.settings["what"] == "hang" else None

    with home.start("sweep", str(sweep)) as process:
        lost = RunDir(eventually(hanging, "the third run", 500, every=0.2).run)
        os.kill(process.pid, signal.SIGKILL)
    before = results.read_bytes()
    done = home.run("sweep", str(sweep), "--json", seconds=500)
    assert done.returncode == 0, done.stderr
    assert results.read_bytes().startswith(before), "rows of the killed session stay"
    assert len(home.runs()) == 4, "only the run that was lost is run again"
    wait_until_nothing_is_left(lost)
    assert "2 runs have their rows already" in done.stderr
    assert "budget: 30 m 00 s (10.00)" in done.stderr

    answer = json.loads(done.stdout)
    rows = {row["settings"]["what"]: row for row in answer["rows"]}
    expected = {"ok": "done", "oom": "out-of-memory", "hang": "hang"}
    assert {what: row["verdict"] for what, row in rows.items()} == expected
    figures = {row["settings"]["what"]: found for row, found in zip(answer["rows"], answer["columns"], strict=True)}
    backward = [rank["phases"]["backward"]["resident_peak_bytes"] for rank in rows["ok"]["ranks"]]
    assert figures["ok"]["backward.peak"] == max(backward)
    assert figures["ok"]["step_ms"] == max(rank["step_ms"] for rank in rows["ok"]["ranks"])
    assert "backward.peak" in done.stderr, "the table shows what was asked for"
    assert (rows["oom"]["rank"], rows["oom"]["step"], rows["oom"]["asked_bytes"]) == (1, 6, 1 << 55)
    assert rows["hang"]["rank"] == 1
    assert rows["hang"]["text"]
    wait_until_nothing_is_left(RunDir(home.home / "runs" / rows["hang"]["run"]))
    for rank in rows["ok"]["ranks"]:
        assert rank["steps"] == 4, "eight were taken, two of them are warm-up, and four are measured"
        assert rank["step_ms_low"] <= rank["step_ms"] <= rank["step_ms_high"]
        assert rank["phases"]["backward"]["resident_peak_bytes"] > 64 << 20
    assert len(rows["ok"]["ranks"]) == 2
    (killed,) = [row for row in read(results).entries if isinstance(row, Row) and row.verdict == "unfinished"]
    assert killed.run == lost.id
    assert answer["used_seconds"] >= sum(row["seconds"] for row in answer["rows"]) + killed.seconds - 0.1


def test_a_sweep_that_its_budget_does_not_cover_runs_nothing_more(home, tmp_path):
    sweep = write_sweep(tmp_path, "ok, oom", budget="{hours: 0.000001}")
    sweep.write_text(sweep.read_text().replace("budget: {money: 10, price_per_gpu_hour: 10, gpus: 2}\n", ""))
    done = home.run("sweep", str(sweep))
    assert done.returncode == 1
    assert "the budget ends the sweep" in done.stdout
    assert "2 runs are missing" in done.stdout
    assert home.runs() == []
    assert len(json.loads(home.run("sweep", str(sweep), "--plan", "--json").stdout)["runs"]) == 2


def test_a_sweep_goes_on_without_its_screen_until_it_is_ended_there(home, tmp_path):
    path = tmp_path / "sleeps.yaml"
    script = "import time; time.sleep({s})"
    path.write_text(f"command: [{sys.executable}, -c, '{script}']\naxes: {{s: [0, 900, 901]}}\n")
    results = tmp_path / "sleeps.results.jsonl"
    environ = {**home.environ, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("axis: {s: [0]}\n")
    with open_terminal(100, 30, environ, tmp_path) as terminal:
        command(terminal, PROGRAM, "sweep", str(wrong))
        refusal = "unknown key axis; did you mean axes?"
        eventually(lambda: refusal in " ".join(terminal.text().split()), refusal, state=terminal.text)
        assert "ftmon: ftmon:" not in terminal.text()
        command(terminal, PROGRAM, "sweep", str(path))
        wait_for(terminal, "sleeps: s=900", "1 / 3 done", "1 no steps", "running")
        terminal.press("q")
        wait_for(terminal, "the sweep continues")
        plan = read(results).plan
        assert is_alive(plan.process)
        command(terminal, PROGRAM, "sweep", str(path))
        wait_for(terminal, "sleeps: s=900", "running")
        assert len(home.runs()) == 2, "it is shown again, not started again"
        terminal.press("S")
        wait_for(terminal, "interrupted")
        terminal.press("q")
        wait_for(terminal, "the run exited with status 0")
    end = read(results).end
    assert (end.reason, end.not_run) == ("interrupted", 2)
    eventually(lambda: not is_alive(plan.process), "the end of the sweep's process")
    for run in home.runs():
        wait_until_nothing_is_left(run)


TRAIN = """
model: {config: {model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 32}}
tokenizer: {vocab_size: 512}
data: {path: DATA, packing: true}
training: {epochs: 3, sequence_length: 64, micro_batch: 2}
evaluation: {share: 0.1, every: 5, patience: 2, samples: 1}
checkpoint: {every: 10}
run: {ranks: 1, device: cpu}
"""


def test_lengths_in_one_process_are_rows_of_their_own_until_one_fails_and_nothing_else_is_measured(home, tmp_path):
    (tmp_path / "train.yaml").write_text(TRAIN.replace("DATA", str(DATA)))
    sweep = tmp_path / "lengths.yaml"
    axes = "axes: {training.sequence_length: [40, 16, 48, 24]}\n"
    sweep.write_text(f"config: train.yaml\none_process: true\npredict: false\nsteps: 2\nwarm_up: 1\n{axes}")
    done = home.run("sweep", str(sweep), "--json", seconds=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["settings"]["training.sequence_length"] for row in rows] == [16, 24, 40, 48]
    assert [row["verdict"] for row in rows] == ["done", "done", "crash", "crash"], rows
    for row in rows[:2]:
        (rank,) = row["ranks"]
        assert rank["steps"] == 2
        assert rank["loss"] > 1
        assert {"forward", "backward", "optimizer"} <= set(rank["phases"])
        assert not {"eval", "checkpoint"} & set(rank["phases"]), "though the configuration has both"
    assert "index out of range" in rows[2]["text"]
    assert rows[2]["step"] == 1, "of the length, not of the process"
    assert "48 tokens are more than the model's n_positions" in rows[3]["text"]
    first, *same, last = (row["run"] for row in rows)
    assert same == [first, first]
    assert last != first, "after a length that fails the next has a process of its own"
    assert len(home.runs()) == 2
    with Reader(RunDir(home.home / "runs" / first).recording) as reader:
        steps = [one.message for one in reader.frames(0, 100_000) if isinstance(one.message, Step)]
    assert [step.tokens for step in steps] == [2 * length for length in (16, 24) for _ in range(3)]
