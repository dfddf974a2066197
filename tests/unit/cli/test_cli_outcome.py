"""Exit statuses and closing lines."""

from pathlib import Path

import pytest
from ftmon.protocol.messages import control, telemetry, wire
from ftmon.protocol.messages.memory import OomReport, OomVerdict, Remedy
from ftmon.protocol.run import end as exits
from ftmon.protocol.run.rundir import ExitFile, RunDir, RunFile
from ftmon.tui.cli import arguments, narrate
from ftmon.tui.model.run import RunModel


@pytest.mark.parametrize(
    ("code", "state", "status"),
    [
        (0, "finished", 0),
        (1, "failed", 1),
        (2, "failed", 2),
        (3, "failed", 3),
        (255, "failed", 255),
        (-9, "failed", 137),
        (-2, "stopped", 130),
        (5, "stopped", 5),
        (0, "stopped", 0),
    ],
)
def test_the_exit_status_is_the_trainings_own_as_a_shell_gives_it(code: int, state: str, status: int) -> None:
    assert exits.of_run(ExitFile(code, 0.0, state)) == status


def test_the_codes_for_ftmons_own_outcomes_are_those_of_nobody_else_and_stand_in_the_help_and_the_guide() -> None:
    assert set(exits.CAUSES.values()) | {exits.RUN_USAGE, exits.LEFT} == set(exits.OWN)
    assert not set(exits.OWN) & {0, 1, 2, 120, *range(64, 79), *range(124, 193), *range(200, 256)}
    guide = (Path(__file__).parents[3] / "docs" / "guide.md").read_text()
    for code, meaning in exits.OWN.items():
        assert f"| {code} | {meaning} |" in guide
        assert f"  {code}  {meaning}\n" in arguments._RUN_EPILOG


def model_with(*messages: wire.Message) -> RunModel:
    model = RunModel()
    for seq, message in enumerate(messages, 1):
        model.apply(wire.Frame(seq, float(seq), message))
    return model


def test_closing_lines_say_where_everything_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "demo-1")
    run.logs.mkdir(parents=True)
    run.recording.touch()
    output = tmp_path / "out"
    for file, text in (("model/config.json", "{}"), ("checkpoints/latest", "step-8\n")):
        (output / file).parent.mkdir(parents=True)
        (output / file).write_text(text)
    model = model_with(telemetry.Plan(0, 8, output_dir=str(output)))
    lines = list(narrate.closing_lines(run, ExitFile(0, 0.0, "stopped", "exit code 0"), model))
    assert lines == [
        "demo-1 stopped: exit code 0",
        f"model:      {output}/model",
        f"chat:       ftmon chat {output}/model",
        f"checkpoint: {output}/checkpoints/step-8",
        f"resume it:  ftmon train CONFIG.yaml checkpoint.resume={output}/checkpoints/step-8",
        f"recording:  {run.recording}",
        "replay it:  ftmon replay demo-1",
    ]


def test_a_run_of_the_trainer_is_resumed_with_its_own_configuration(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    latest = tmp_path / "output" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    latest.write_text("step-8\n")
    run.config.touch()
    run.write_run(RunFile("tuned-1", "tuned", 0.0, ["deepspeed"], "/", "here", "train"))
    lines = list(narrate.closing_lines(run, ExitFile(1, 0.0, "failed", "exit code 1"), RunModel()))
    resume = f"resume it:  ftmon resume {run.id}"
    assert resume in lines
    lines = list(narrate.closing_lines(run, ExitFile(0, 0.0, "finished", "exit code 0"), RunModel()))
    assert f"checkpoint: {latest.parent}/step-8" in lines
    assert resume not in lines, "nothing is left to train"


def test_a_failed_run_shows_its_last_words(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    (run.logs / "launcher.log").write_text("".join(f"line {n}\n" for n in range(100)) + "ValueError: \x1b[1mno\n\n")
    lines = list(narrate.closing_lines(run, ExitFile(1, 0.0, "failed", "exit code 1"), RunModel()))
    assert lines[14] == "  ValueError: no"
    assert lines[15] == "demo-1 failed: exit code 1".replace("demo-1", run.id)
    assert lines[-1] == f"logs:       {run.logs}"


def test_a_failed_run_shows_the_last_words_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    run.rank_log(0, "err").write_text("Traceback\nConnectionError: peer\n")
    run.rank_log(1, "err").write_text("data.path: line 7 is not JSON\n" + "x" * 5000 + "\n")
    model = model_with(
        control.Alert(1, "failure", "error", 12.0, "rank 0 failed", rank=0),
        control.Alert(2, "died", "error", 11.0, "rank 1 ended", rank=1),
        control.Alert(3, "died", "info", 10.0, "rank 2 killed, as asked", rank=2),
    )
    lines = list(narrate.closing_lines(run, ExitFile(2, 0.0, "failed", "exit code 2"), model))
    assert lines[:2] == ["  rank 1| data.path: line 7 is not JSON", f"  rank 1| {'x' * 400}..."]
    assert not any("rank 0|" in line for line in lines)
    told = list(narrate.closing_lines(run, ExitFile(2, 0.0, "failed", "exit code 2"), model, output_printed=True))
    assert told[0] == f"{run.id} failed: exit code 2"


def test_a_run_that_ran_out_of_memory_names_what_to_try_first_and_the_command_that_explains_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "demo-1")
    run.logs.mkdir(parents=True)
    error = telemetry.Oom(1, 7, "forward", 11.0, 2**30, 0, 2**33, 2**32, 2**32)
    halved = Remedy("micro_batch", "halve the micro-batch", "micro_batch=1", 2**30, "about")
    verdict = OomVerdict("activations", "activations", "text")
    report = OomReport(1, 7, "forward", 11.0, error, verdict, [halved, Remedy("zero", "shard")])
    alert = control.Alert(1, "oom", "error", 11.0, "rank 1 out of memory", rank=1)
    end = ExitFile(1, 12.0, "failed", "exit code 1")
    lines = list(narrate.closing_lines(run, end, model_with(report, alert)))
    assert lines[1:4] == [
        "why:        rank 1 out of memory",
        "try first:  halve the micro-batch (frees about 1.00 GiB) micro_batch=1.",
        "details:    ftmon oom demo-1",
    ]
    without = list(narrate.closing_lines(run, end, model_with(alert)))
    assert without[1:] == ["why:        rank 1 out of memory", f"logs:       {run.logs}"], "ftmon oom knows no more"


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed")])
def test_a_run_directory_that_is_gone_is_reported_instead_of_its_files(tmp_path: Path, code: int, state: str) -> None:
    run = RunDir(tmp_path / "runs" / "demo-1")
    lines = list(narrate.closing_lines(run, ExitFile(code, 0.0, state, f"exit code {code}"), RunModel()))
    assert lines == [
        f"demo-1 {state}: exit code {code}",
        f"directory:  {run.path} was moved or removed during the run: no recording and no logs are there",
    ]


@pytest.mark.parametrize(("cause", "status"), list(exits.CAUSES.items()))
def test_a_run_that_did_not_end_by_itself_has_a_status_of_its_own(cause: str, status: int) -> None:
    assert exits.of_run(ExitFile(-9, 1.0, "failed", "", cause)) == status
