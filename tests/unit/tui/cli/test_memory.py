"""``ftmon memory``, ``ftmon events`` and ``ftmon capture``: the same as on the screens, in lines and as JSON."""

import json
import shutil
from pathlib import Path

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import AllocatorEvents
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.tui.cli.main import main, parse
from ftmon.tui.cli.memory import _news
from ftmon.tui.cli.train import words
from ftmon.tui.model import RunModel
from peaks import explained
from streams import RUN


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return explained(tmp_path_factory.mktemp("runs") / "recording.sqlite", 2, steps=24)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    run = RunDir(tmp_path / "runs" / RUN.id)
    run.path.mkdir(parents=True, mode=0o700)
    run.write_run(RUN)
    return run


def test_memory_tells_parts_lead_and_cause_and_as_json_adds_up(path, capsys):
    assert main(["memory", str(path), "--rank", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("rank 0, step 24: ")
    words = ("optimizer states", "used (NVML)", "unexplained", "up to length", "gradient upcast", "try: a smaller")
    assert all(one in text for one in words), text
    assert "rank 1" not in text
    assert main(["memory", str(path), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert sum(rank["parts"].values()) == rank["peak_bytes"]
        assert rank["lead"]["standing"][0]["bytes"] >= rank["peak_bytes"]
    assert ranks[0]["causes"][0]["phase"] == "optimizer"


def test_a_rank_that_there_is_not_and_a_snapshot_of_a_run_that_has_ended_are_refused(path, capsys, run):
    for command in ("memory", "events", "logs"):
        assert main([command, str(path), "--rank", "7"]) == 2
        assert capsys.readouterr().err == "ftmon: no rank 7 in this run; its ranks: 0 to 1\n"
    run.write_exit(ExitFile(0, RUN.created, "finished"))
    assert main(["capture", RUN.id]) == 1
    assert "has ended" in capsys.readouterr().err


def test_events_tell_each_phase_of_each_sampled_step_or_as_json_an_object_a_line(path, capsys):
    assert main(["events", str(path), "--rank", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[4] for line in lines} == {"1", "2", "8", "16", "24"}
    forward = next(line for line in lines if "step 8 forward" in line)
    assert "1,904 allocations" in forward
    assert "20,473/s" in forward
    assert main(["events", str(path), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == 10
    assert found[-1]["rates"]["optimizer"]["allocations_per_second"] > 7000


def test_samples_of_a_later_job_are_news_though_its_steps_begin_again():
    model, printed = RunModel(), dict[int, float]()
    for number, steps in ((1, (8, 16)), (2, (1,))):
        begun = RUN.created + 30 * number
        messages = [Job(number, begun, "training", begun, world_size=1)]
        for message in [*messages, *(AllocatorEvents(0, step, begun + step, []) for step in steps)]:
            model.apply(Frame(model.last_seq + 1, RUN.created, message))
        assert [events.step for events in _news(model, None, printed)] == list(steps)
        assert not list(_news(model, None, printed))


def test_a_recording_on_its_own_cannot_be_followed_and_an_ended_runs_directory_ends_at_once(path, run, capsys):
    assert main(["events", str(path), "--follow"]) == 2
    assert capsys.readouterr().out == ""
    shutil.copy(path, run.recording)
    run.write_exit(ExitFile(1, RUN.created, "failed"))
    assert main(["events", str(run.path), "--follow"]) == 0
    assert "rank 0 step 24" in capsys.readouterr().out


def test_a_runs_parts_are_compared_with_the_prediction_of_its_configuration(path, run, capsys):
    shutil.copy(path, run.recording)
    given = ["predict", "--explain", "--run", RUN.id]
    with pytest.raises(UsageError, match="no configuration to predict"):
        words(parse(given))
    run.config.write_text("")
    measured, *rest = words(parse(given))
    assert rest == ["--explain", "--", str(run.config), "run.device=auto"]
    assert main(["memory", str(path), "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    phases = [phase for rank in ranks for name in ("latest", "highest") for phase in rank[name]["phases"]]
    parts = json.loads(measured.removeprefix("--measured="))
    assert parts["optimizer_states"] == 3540 << 20
    assert parts["activations"] == max(phase["parts"].get("activations", 0) for phase in phases)
