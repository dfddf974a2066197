"""Exit statuses and closing lines."""

from pathlib import Path

import pytest
from ftmon.protocol.rundir import ExitFile, RunDir
from ftmon.tui.cli import outcome


@pytest.mark.parametrize(
    ("code", "state", "status"),
    [
        (0, "finished", 0),
        (0, "stopped", 0),
        (1, "failed", 1),
        (-9, "failed", 1),
        (3, "failed", 1),
        (-2, "stopped", 130),
        (1, "stopped", 130),
    ],
)
def test_exit_status_follows_the_job(code: int, state: str, status: int) -> None:
    assert outcome.exit_status(ExitFile(code, 0.0, state)) == status


def test_closing_lines_say_where_everything_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs" / "demo-1")
    run.logs.mkdir(parents=True)
    run.recording.touch()
    output = tmp_path / "out"
    for file, text in (("model/config.json", "{}"), ("checkpoints/latest", "step-8\n")):
        (output / file).parent.mkdir(parents=True)
        (output / file).write_text(text)
    lines = list(outcome.closing_lines(run, ExitFile(0, 0.0, "finished", "exit code 0"), str(output)))
    assert lines == [
        "demo-1 finished: exit code 0",
        f"model:      {output}/model",
        f"checkpoint: {output}/checkpoints/step-8  "
        f"(resume: ftmon train CONFIG.yaml checkpoint.resume={output}/checkpoints/step-8)",
        f"recording:  {run.recording}",
        "replay it:  ftmon replay demo-1",
    ]


def test_a_failed_run_shows_its_last_words(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    (run.logs / "launcher.log").write_text("".join(f"line {n}\n" for n in range(100)) + "ValueError: \x1b[1mno\n\n")
    lines = list(outcome.closing_lines(run, ExitFile(1, 0.0, "failed", "exit code 1")))
    assert lines[14] == "  ValueError: no"
    assert lines[15] == "demo-1 failed: exit code 1".replace("demo-1", run.id)
    assert lines[-1] == f"logs:       {run.logs}"
