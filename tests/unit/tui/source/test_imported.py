"""A Trainer's log as a run: what it has, which entries of a resumed run count, and files that are no such log."""

import json
import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.recording.reader import RecordedRun
from ftmon.protocol.run import rundir
from ftmon.tui.cli.main import main
from ftmon.tui.source.foreign_logs import read_log
from ftmon.tui.source.imported import import_log, without_repeated

ENDED = 1_700_000_000.0


def trained(step: int, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    return {"epoch": step / 100, "grad_norm": 1.5, "learning_rate": step * 1e-6, "loss": loss, "step": step, **more}


def evaluated(step: int, loss: float, prefix: str = "eval", **more: float) -> dict[str, Any]:
    speed = {"runtime": 4.0, "samples_per_second": 5.0, "steps_per_second": 1.0, "model_preparation_time": 0.1}
    results = {f"{prefix}_{name}": value for name, value in ({"loss": loss} | speed | more).items()}
    return {"epoch": step / 100, **results, "step": step}


SUMMARY = {"epoch": 1.0, "step": 100, "total_flos": 1e9, "train_loss": 2.0, "train_runtime": 50.0}
HISTORY = [
    *(trained(step, 3.0 - step / 100) for step in range(10, 51, 10)),
    evaluated(50, 2.8, accuracy=0.25),
    trained(60, 9.0), trained(70, 9.0), evaluated(70, 9.5),  # then it was resumed from step 50
    *(trained(step, 3.0 - step / 100) for step in range(60, 101, 10)),
    evaluated(100, 2.9, accuracy=0.5), evaluated(100, 1.5, "eval_squad"), SUMMARY,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a ``trainer_state.json`` as the Trainer does."""

    def write(history: list[Any], folder: str = "llama/checkpoint-100", **state: Any) -> Path:
        path = tmp_path / folder / "trainer_state.json"
        path.parent.mkdir(parents=True)
        state = {"best_metric": None, "global_step": 100, "log_history": history, "max_steps": 100, **state}
        path.write_text(json.dumps(state, indent=2, sort_keys=True))
        os.utime(path, (ENDED, ENDED))
        return path

    return write


def test_a_resumed_run_has_each_step_once(written):
    made = import_log(written(HISTORY), None)
    assert (made.steps, made.last_step, made.evaluations, made.repeated) == (10, 100, 3, 3)
    found = RecordedRun(made.run.recording)
    steps = found.steps(0)
    assert [(one.step, one.loss) for one in steps] == [(n, pytest.approx(3.0 - n / 100)) for n in range(10, 101, 10)]
    assert [(one.lr, one.grad_norm) for one in steps[:2]] == [(pytest.approx(1e-5), 1.5), (pytest.approx(2e-5), 1.5)]
    assert [steps[0].started, steps[-1].started] == [ENDED - 45, ENDED]
    assert [(one.name, one.step, one.loss, one.best, one.metrics, one.seconds) for one in found.evaluations] == [
        ("evaluation", 50, 2.8, True, {"accuracy": 0.25}, 4.0),
        ("evaluation", 100, 2.9, False, {"accuracy": 0.5}, 4.0),
        ("squad", 100, 1.5, True, {}, 4.0),
    ]
    assert (found.info.state, found.info.complete, found.info.host) == ("finished", True, "")
    assert found.info.run_id.startswith("llama-checkpoint-100-")


def test_of_the_same_entry_twice_the_last_counts_also_after_others_of_its_step():
    first, second = trained(5, 1.0), trained(5, 2.0)
    assert without_repeated([first, evaluated(5, 3.0), second]) == [evaluated(5, 3.0), second]
    assert without_repeated([trained(3), trained(4), trained(1)]) == [trained(1)]


def test_an_imported_run_is_listed_reported_compared_and_replayed(written, tmp_path, capsys):
    assert main(["import", str(written(HISTORY)), "--name", "theirs"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    name = last.removeprefix("ftmon report ")
    # With include_num_input_tokens_seen the Trainer adds its run time to each entry, not only to the last one.
    of_half = [{**entry, "train_runtime": entry["step"] / 4} for entry in HISTORY[:5]]
    assert main(["import", str(written(of_half, "half", global_step=50)), "--json"]) == 0
    half = json.loads(capsys.readouterr().out)
    expected = {"steps": 5, "last_step": 50, "repeated": 0}
    assert {key: half[key] for key in ("steps", "last_step", "repeated")} == expected
    assert main(["report", name, "--json"]) == 0
    (section,) = json.loads(capsys.readouterr().out)["sections"]
    assert [chart["title"] for chart in section["charts"]] == ["loss", "learning rate", "evaluation: accuracy"]
    assert ["time", "50 s"] in section["facts"]
    assert section["table"] == []
    assert main(["compare", half["run"], name, "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert [one["name"] for one in comparison["differences"]] == ["loss"], "neither times nor memory"
    assert comparison["differences"][0]["change"] == 0.0
    for words in (["ls"], ["status", name], ["report", name], ["compare", name, name], ["replay", "--plain", name]):
        assert main(words) == 0, words
    out = capsys.readouterr().out
    assert "stopped" in "".join(line for line in out.splitlines() if half["run"] in line)
    assert "ranks: 1 finished" in out
    assert " 0.000 s/step" not in out
    assert main(["report", name, "--csv", str(tmp_path / "rows.csv")]) == 2


def test_losses_that_are_not_finite_and_entries_of_other_callbacks_are_kept_out_of_nothing(written):
    history = [
        trained(1, math.nan),
        trained(2, grad_norm=math.inf),
        {"step": 2, "tokens": 10**400},
        evaluated(2, math.nan),
    ]
    found = RecordedRun(import_log(written(history), "x").run.recording)
    assert found.not_finite == {1}
    assert [(one.step, one.grad_norm) for one in found.steps(0)] == [(1, 1.5), (2, math.inf)]
    assert [math.isnan(one.loss or 0.0) for one in found.evaluations] == [True]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("[]", "is not the trainer_state.json of a transformers Trainer: Expected `object`, got `array`"),
        ('{"log_history": [1]}', "is not the trainer_state.json of a transformers Trainer: "),
        ('{"log_history": [{"loss": 1.0}]}', "log_history[0]: step must be a whole number of 0 or more, not None"),
        ('{"log_history": [{"step": -1}]}', "log_history[0]: step must be a whole number of 0 or more, not -1"),
        ('{"log_history": [{"step": 1e3}]}', "log_history[0]: step must be a whole number of 0 or more, not 1000.0"),
        (
            '{"log_history": [{"step": 1, "epoch": 1.0}]}',
            "log_history has no loss and no evaluation: nothing to import",
        ),
        ('{"log_history": []}', "log_history has no loss and no evaluation: nothing to import"),
    ],
)
def test_a_file_that_is_no_log_is_one_line_and_makes_no_run(tmp_path, capsys, content, words):
    path = tmp_path / "trainer_state.json"
    if content is not None:
        path.write_text(content)
    assert main(["import", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ftmon: {path}: ")
    assert words in error
    assert len(error.splitlines()) == 1
    assert rundir.all_runs() == []


def events(folder: Path, rows: list[tuple[int, dict[str, float]]], started: float) -> None:
    """Write an event file as a training does, a row a second."""
    module = pytest.importorskip("tensorboard.compat.proto.summary_pb2")
    event = import_module("tensorboard.compat.proto.event_pb2").Event
    writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
    for second, (step, row) in enumerate(rows):
        for name, value in row.items():
            some = module.Summary(value=[module.Summary.Value(tag=name, simple_value=value)])
            writer.add_event(event(wall_time=started + second + len(name) / 1e6, step=step, summary=some))
    writer.close()


def test_event_files_of_a_run_and_its_resumed_part_are_one_run_with_each_step_once(tmp_path):
    folder = tmp_path / "runs" / "llama"
    rows = [(step, {"train/loss": 3.0 - step / 100, "train/learning_rate": 1e-3}) for step in range(1, 51)]
    evaluated = (40, {"eval/loss": 2.5, "eval/runtime": 4.0, "eval/squad_loss": 1.5, "eval/accuracy": 0.5})
    events(folder, [*rows[:40], evaluated, *rows[40:]], ENDED)
    first = import_log(next(folder.iterdir()), "first")
    expected = {("evaluation", 40, 2.5), ("squad", 40, 1.5)}
    assert {(one.name, one.step, one.loss) for one in RecordedRun(first.run.recording).evaluations} == expected
    resumed = [(step, {"loss/train": 1.0} | ({"val/loss": 2.0} if step == 60 else {})) for step in range(31, 61)]
    events(folder, resumed, ENDED + 100)
    made = import_log(folder, None)
    assert (made.steps, made.last_step) == (60, 60)
    found = RecordedRun(made.run.recording)
    assert [(one.step, one.loss) for one in found.steps(0)] == [
        *((step, pytest.approx(3.0 - step / 100)) for step in range(1, 31)), *((step, 1.0) for step in range(31, 61)),
    ]  # fmt: skip
    assert [(one.name, one.step, one.loss) for one in found.evaluations] == [("evaluation", 60, 2.0)]
    assert found.steps(0)[30].started == pytest.approx(ENDED + 100, abs=0.01)


DEEPSPEED = """\
[2026-11-29 06:38:03,804] [INFO] [logging.py:123:log_dist] [Rank 0] step=0, skipped=0, lr=[0.0], mom=[(0.9, 0.999)]
[Rank 0] time (ms) | fwd_microstep: 76.02 | bwd_microstep: 2.61 | bwd_inner_microstep: 2.48 | step_microstep: 0.02
[Rank 0] time (ms) | fwd: 86.53 | bwd: 27.25 | bwd_inner: 20.39 | bwd_allreduce: 6.79 | step: 15.31
[2026-11-29 06:38:04,013] [INFO] [logging.py:123:log_dist] [Rank 0] step=2, skipped=0, lr=[0.0003, 0.1], mom=[0.0, 0.0]
[Rank 0] time (ms) | fwd: 19.98 | bwd: 0.81 | bwd_inner: 0.32 | bwd_allreduce: 0.46 | step: 10.69
[Rank 0] time (ms) | fwd: 41.21 | bwd: 4.58 | bwd_inner: 0.35 | bwd_allreduce: 4.19 | step: 14.88
the script's own line
[2026-11-29 06:38:04,122] [INFO] [logging.py:123:log_dist] [Rank 0] step=4, skipped=1, lr=[0.0006], mom=[(0.9, 0.999)]
[2026-11-29 06:38:04,122] [INFO] [timer.py:264:stop] epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=147.5
"""


def test_what_deepspeed_prints_becomes_steps_with_their_phases(tmp_path, capsys):
    path = tmp_path / "train.log"
    path.write_text(DEEPSPEED)
    steps = RecordedRun(import_log(path, "ds").run.recording).steps(0)
    expected = [(1, None, 129_090), (2, 3e-4, 31_480), (3, None, 60_670), (4, 6e-4, 0)]
    assert [(one.step, one.lr, one.host_us) for one in steps] == expected
    wanted = [("forward", 19_980), ("backward", 810), ("optimizer", 10_690)]
    assert [(phase.name, phase.host_us) for phase in steps[1].phases] == wanted
    path.write_text("steps: 10 loss: 4.2500 iter time (s): 0.500 samples/sec: 32.000\n")
    (step,) = RecordedRun(import_log(path, "pipeline").run.recording).steps(0)
    assert (step.step, step.loss, step.host_us) == (10, 4.25, 500_000)
    path.write_text("nothing of DeepSpeed\n")
    assert main(["import", str(path)]) == 2
    assert "is no log that can be imported" in capsys.readouterr().err


def test_a_folder_is_read_by_its_state_or_that_of_its_last_checkpoint(written):
    written([trained(10)], "llama/checkpoint-90")
    last = written([trained(20)], "llama/checkpoint-100").parent
    for folder in (last, last.parent):
        assert [entry["step"] for entry in read_log(folder).history] == [20]
    (last.parent / "runs" / "Nov29").mkdir(parents=True)
    (last.parent / "runs" / "Nov29" / "events.out.tfevents.1").touch()
    with pytest.raises(UsageError, match=r"trainer_state\.json, run-\*.*; name one of its 1 runs: .*/runs/Nov29$"):
        read_log(last.parent / "runs")
    tracker = last.parent / "wandb" / "offline-run-1"
    tracker.mkdir(parents=True)
    (tracker / "run-1.wandb").touch()
    tracker.with_name("latest-run").symlink_to(tracker)
    with pytest.raises(UsageError, match=r"; name one of its 1 runs: .*/wandb/offline-run-1$"):
        read_log(tracker.parent)


def test_a_pipe_is_refused_and_a_line_without_an_end_is_read_in_parts(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is not a regular file"):
        read_log(pipe)
    path = tmp_path / "train.log"
    path.write_text(f"{'x' * 200_000}\n{DEEPSPEED}")
    assert len(read_log(path).history) == 4
