"""A real run that rehearses, evaluates and saves: what is recorded, told and shown of it."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import start_ranks
from ftmon.protocol.run.rundir import RunDir
from ftmon.tui.app import FtmonApp
from ftmon.tui.screens.training import TrainingScreen
from ftmon.tui.source.replay import ReplaySource
from ftmon_process import Ftmon, ftmon_home
from scenes import until

SCRIPT = Path(__file__).parent / "scripts" / "lived_run.py"
STEPS, EVERY = 20, 8
FLOPS = 2 * (6 * 5712 * 16 + 384 * (15 + 66))
"""Of a step: two micro-batches of documents of 5 and 11 tokens; 5,712 parameters are multiplied (two layers of 2,592,
the last norm and the output), and a pair of query and key costs 12 FLOPs in each of two layers of 16."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ftmon, RunDir, str]]:
    folder = tmp_path_factory.mktemp("lived")
    with ftmon_home(folder / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="") as ftmon:
        job = start_ranks.command(2, SCRIPT, folder / "out")
        done = ftmon.run("run", "--plain", "--name", "lived", "--", *job, seconds=500)
        assert done.returncode == 0, done.stdout + done.stderr
        yield ftmon, ftmon.newest(), done.stdout


def rows(run: RunDir, query: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(run.recording)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def test_updates_of_a_rehearsal_are_no_steps_and_tokens_and_flops_are_those_of_the_loop(run):
    steps = rows(run[1], "SELECT rank, min(step), max(step), count(*) FROM steps GROUP BY rank")
    assert steps == [(0, 1, STEPS, STEPS), (1, 1, STEPS, STEPS)]
    figures = rows(run[1], "SELECT DISTINCT tokens, label_tokens, flops, mfu FROM throughput")
    assert figures == [(32, 28, FLOPS, None)], "a CPU has no MFU"


def test_evaluations_and_checkpoints_take_no_training_time_and_are_told_in_a_line_each(run):
    evaluations = rows(run[1], "SELECT step, name, best FROM evaluations ORDER BY step")
    assert evaluations == [(8, "validation", 1), (16, "validation", 0), (20, "validation", 0)]
    assert [row[:2] for row in rows(run[1], "SELECT step, bytes FROM checkpoints")] == [(16, 100)]
    query = "SELECT step, host_us - training_us FROM steps JOIN training_steps USING(seq) WHERE rank = 0"
    pauses = {step for step, pause in rows(run[1], query) if pause and pause > 150_000}
    assert pauses == {9, 17}, "an evaluation is part of the time before the next step's end"
    told = [line[9:] for line in run[2].splitlines()]
    assert sum(line.startswith("validation at step ") for line in told) == 3
    assert sum(line.startswith("checkpoint of step 16: ") for line in told) == 1
    assert sum(line == "rehearsal: the longest batch" for line in told) == 1


def test_status_has_the_evaluation_the_epoch_and_what_is_left(run: tuple[Ftmon, RunDir, str]) -> None:
    ftmon, folder, _ = run
    told = ftmon.status(folder.id)
    assert (told["epoch"], told["epochs"], told["mfu"]) == (2.0, 2.0, None)
    assert (told["evaluation"]["step"], told["evaluations_left"], told["activity"]) == (20, 0, None)
    ((shortest, longest),) = rows(folder, "SELECT min(host_us), max(host_us) FROM extra_phases WHERE phase = 'eval'")
    assert 0.2 <= shortest / 1e6 <= told["evaluation_seconds"] <= longest / 1e6
    assert [rank["tokens_per_second"] > 0 for rank in told["ranks"]] == [True, True]
    assert json.dumps(told)
    plain = ftmon.run("status", folder.id).stdout
    assert "validation at step 20: loss " in plain
    assert "epoch 2.00 / 2" in plain


def test_the_training_screen_shows_its_replay(run: tuple[Ftmon, RunDir, str]) -> None:
    source = ReplaySource(run[1].recording, at_end=True)
    app = FtmonApp(source)

    async def look() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: source.model.step == STEPS, "the replay's state")
            await pilot.press("t")
            await until(pilot, lambda: isinstance(app.screen, TrainingScreen), "the training screen")
            canvas = app.screen.canvas  # pyright: ignore[reportAttributeAccessIssue]
            await until(pilot, lambda: "newest: step 20" in canvas.plain, "the newest step")
            # Of a recording with many messages, the older evaluations come with its overview.
            await until(pilot, lambda: canvas.plain.count("◆") == 4, "three evaluations, and the sign in the title")
            await until(pilot, lambda: source.model.moments[0].first_step == 1, "all steps, after the newest")
            await pilot.press("home")
            await until(pilot, lambda: "at the cursor: step 1 " in canvas.plain, "the first step")
            source.transport.goto("10")
            await until(pilot, lambda: source.model.step == 10, "step 10")
            await pilot.press("end")
            # A rank may be ahead: what it has alone is not drawn, unless the other one's messages lag by many steps.
            newest = f"newest: step {source.model.complete_step}"
            await until(pilot, lambda: newest in canvas.plain, "the replay's position")
            assert source.model.step == 10
            assert canvas.plain.count("◆") == 2

    asyncio.run(look())
    source.close()
