"""Sweep files: what they mean, and what is refused, with line and fix."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.sweep.rows import Planned
from ftmon.trainer.sweep import plan
from ftmon.trainer.sweep.__main__ import _plan

_CONFIG, _COMMAND = "config: train.yaml\n", "command: python {a}\n"
CONFIG = "model: {config: {model_type: llama}}\ndata: {path: d.jsonl}\n"


def read(tmp_path: Path, text: str) -> plan.Spec:
    (tmp_path / "train.yaml").write_text(CONFIG)
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    found = plan.read(str(path))
    plan.check(found)
    return found


def test_a_grid_is_every_combination_as_overrides_of_the_configuration(tmp_path: Path) -> None:
    axes = "  training.sequence_length: [512, 1024]\n  zero.offload_optimizer: [true, false]\n"
    axes += "  env.PYTORCH_CUDA_ALLOC_CONF: ['', 'expandable_segments:True']\n"
    found = read(tmp_path, f"{_CONFIG}set: {{optimizer.lr: 1e-5}}\naxes:\n{axes}")
    grid = plan.combinations(found)
    assert len(grid) == 8
    job = plan.job(found, grid[-1], "s-001")
    words = job.request.overrides
    wanted = {"training.sequence_length=1024", "zero.offload_optimizer=false", "optimizer.lr=1e-05"}
    assert {*wanted, "training.max_steps=5"} <= set(words), "3 measured steps and 2 of warm-up"
    assert job.request.options.on_hang == "kill"
    assert job.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert not any(word.startswith("env.") for word in words)


def test_a_command_takes_its_values_at_its_placeholders_and_what_decides_a_row_decides_whose_it_is(tmp_path):
    found = read(tmp_path, "command: [python, train.py, '--seq={seq}', '--config={\"a\": 1}']\naxes: {seq: [8, 16]}\n")
    assert plan.job(found, {"seq": 16}, "s").request.command[-3:] == ["train.py", "--seq=16", '--config={"a": 1}']
    base = "config: train.yaml\naxes: {zero.stage: [1]}\n"
    one = plan.fingerprint(read(tmp_path, base))
    assert plan.fingerprint(read(tmp_path, base.replace("[1]", "[1, 2]") + "repeats: 3\nbudget: {hours: 1}\n")) == one
    assert plan.fingerprint(read(tmp_path, base + "steps: 9\n")) != one
    assert plan.fingerprint(read(tmp_path, base + "set: {training.micro_batch: 2}\n")) != one


@pytest.mark.parametrize(("goal", "repeats"), [("largest", 1), ("fastest", 3)])
def test_a_search_along_an_axis_runs_each_value_once(tmp_path: Path, goal: str, repeats: int) -> None:
    command, more = ("python {a} {b}", ", axis: b, low: 1, high: 8") if goal == "largest" else ("python {a}", "")
    text = f"command: {command}\naxes: {{a: [1, 2]}}\nrepeats: 3\nsearch: {{goal: {goal}{more}}}\n"
    wanted = read(tmp_path, text)
    predictor: Any = SimpleNamespace(notes=[], capacity_bytes=None, plan=lambda grid: list(map(Planned, grid)))
    planned = _plan(wanted, predictor, False)
    printed: list[str] = []
    plan.Lines(wanted, printed.append).plan(planned, [], 0, 0.0)
    assert planned.repeats == repeats
    assert ("x 3 repeats" in printed[0]) == (repeats == 3)


def test_a_budget_in_money_is_time_at_its_price_and_lengths_of_one_process_use_the_longest_s_data(tmp_path):
    text = "command: python {a}\naxes: {a: [1]}\ntimeout: 10 m\ncapacity: 80GB\n"
    found = read(tmp_path, text + "budget: {money: 10, price_per_gpu_hour: 2.5, hours: 3}\n")
    assert found.budget.seconds == 3 * 3600
    assert plan.priced(found.budget, 2, None).seconds == 10 / (2 * 2.5) * 3600
    assert plan.priced(found.budget, 8, None).seconds == 10 / (8 * 2.5) * 3600
    assert plan.priced(found.budget, 1, None).seconds == 3 * 3600
    assert plan.priced(found.budget, 2, 10.0).seconds == 10 / (2 * 10.0) * 3600
    assert (found.timeout, found.capacity_bytes) == (600, 80 * 10**9)
    text = "config: train.yaml\naxes: {training.sequence_length: [64, 16]}\n"
    found = read(tmp_path, text + "one_process: true\n")
    words = plan.job(found, {"training.sequence_length": 16}, "s", [16, 64]).request.overrides
    assert "training.sequence_length=64" in words
    assert "debug.lengths=[16, 64]" in words
    assert plan.fingerprint(found) != plan.fingerprint(read(tmp_path, text)), "their rows have no NVML figures"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("axes: {a: [1]}\n", "config or command is missing"),
        (_CONFIG + "", "axes is missing"),
        (_CONFIG + "axes: {a: [1]}\ncolumns: loss\n", "sweep.yaml:3: columns must be a list such as"),
        (_CONFIG + "axes: {a: [1]}\ncolumns:\n- loss\n- los\n", "sweep.yaml:5: columns[1] los is not a figure"),
        (_CONFIG + "axes: {a: [1]}\ncolumns: [loss, loss]\n", "sweep.yaml:3: columns[1] has loss twice"),
        (_CONFIG + "axes: {env.A=B: [1]}\n", "sweep.yaml:2: axes.env.A=B is no name of an environment variable"),
        (_CONFIG + "axes: {a: [1]}\nenv: {A=B: c}\n", "sweep.yaml:3: env.A=B is no name of an environment"),
        ("config: none.yaml\naxes: {a: [1]}\n", "sweep.yaml:1: config none.yaml: no such file"),
        (_CONFIG + "axis: {a: [1]}\n", "sweep.yaml:2: unknown key axis; did you mean axes?"),
        (_CONFIG + "axes:\n  zero.stag: [1, 2]\n", "sweep.yaml:3: axes.zero.stag[0] is refused: unknown key zero.stag"),
        (_CONFIG + "axes:\n  zero.stage: [1, 7]\n", "sweep.yaml:3: axes.zero.stage[1] is refused: zero.stage must be"),
        (_CONFIG + "axes:\n  zero.stage: 2\n", "sweep.yaml:3: axes.zero.stage must be a list"),
        (_CONFIG + "axes: {zero.stage: [2, 2]}\n", "has 2 twice"),
        ("command: python t.py\naxes: {seq: [1]}\n", "sweep.yaml:1: command has no {seq}"),
        ("command: python {seq} {zero}\naxes: {seq: [1]}\n", "command has {zero}, but the axes are seq"),
        ("command: no-such-program {seq}\naxes: {seq: [1]}\n", "no-such-program: command not found"),
        (_COMMAND + "axes: {a: [1]}\nbudget: {money: 3}\n", "budget.money needs price_per_gpu_hour"),
        (
            _COMMAND + "axes: {a: [1]}\nbudget: {price_per_hour: 3}\n",
            "unknown key budget.price_per_hour; did you mean budget.price_per_gpu_hour?",
        ),
        (_COMMAND + "axes: {a: [1]}\ntimeout: soon\n", "sweep.yaml:3: timeout must be seconds"),
        (_COMMAND + "search: {goal: best, axis: a, high: 9}\n", "search.goal must be fastest, largest or phases"),
        (_COMMAND + "search: {goals: best}\n", "sweep.yaml:2: unknown key search.goals; did you mean search.goal?"),
        (_COMMAND + "search: {goal: largest, axis: a}\n", "search needs axis and high"),
        (
            _COMMAND + "search: {goal: largest, axis: a, low: 9, high: 9}\n",
            "needs a low of at least 0, a high above it",
        ),
        (_COMMAND + "search: {axis: a, high: 9}\n", "sweep.yaml:2: search needs goal"),
        (_COMMAND + "axes: {a: [[1]]}\n", "sweep.yaml:2: axes.a[0] must be a number or a word, not a list"),
        (_COMMAND + "axes: {a: []}\n", "sweep.yaml:2: axes.a must be a list of values"),
        (
            _CONFIG + "one_process: true\naxes: {zero.stage: [1]}\n",
            "sweep.yaml:2: one_process needs the axis training.",
        ),
        (_COMMAND + "axes: {a: [1]}\none_process: true\n", "sweep.yaml:3: one_process goes with config"),
        (
            _CONFIG + "one_process: true\nsearch: {goal: largest, axis: training.sequence_length, high: 99}\n",
            "sweep.yaml:2: one_process goes without search",
        ),
        (_CONFIG + "one_process: 1\naxes: {a: [1]}\n", "sweep.yaml:2: one_process must be true or false"),
        (_COMMAND + f"axes: {{a: [{1 << 63}]}}\n", "sweep.yaml:2: axes.a[0] must be a whole number of at most 64 bits"),
        ("- 1\n", "must hold keys such as config and axes"),
    ],
)
def test_a_wrong_sweep_file_is_one_line_with_its_place_and_the_fix(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FtmonError) as refused:
        read(tmp_path, text)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
