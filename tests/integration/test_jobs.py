"""Several jobs in one run: a driver script, an elastic restart, two at the same time."""

import shlex
import sys
from pathlib import Path

import pytest
import start_ranks
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Closing, Step
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.model.runs import job_rows
from ftmon.tui.source.load import describe, load
from ftmon_process import Ftmon, lines_with
from hub_client import App, fake_ranks, hub_gone, started
from ports import free_port

SCRIPTS = Path(__file__).parent / "scripts"


def test_each_job_of_a_driver_script_has_its_own_steps_peaks_loss_and_end(home: Ftmon) -> None:
    words = [
        str(SCRIPTS / "sweep.sh"),
        sys.executable,
        str(free_port()),
        str(SCRIPTS / "short_loop.py"),
        start_ranks.__file__,
    ]
    done = home.run("run", "--plain", "--", "bash", *words, seconds=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    run = home.newest()
    told = home.status(run.id)
    jobs = told["jobs"]
    expected = [("finished", 6, 0), ("failed", 3, 0), ("finished", 5, 1)]
    assert [(job["state"], job["steps"], job["restart"]) for job in jobs] == expected
    assert "the first attempt fails" in jobs[1]["text"]
    assert [job["argv"][-3:] for job in jobs[:2]] == [["6", "32", "ok"], ["5", "16", "once"]]
    assert [rank["rank"] for rank in jobs[0]["ranks"]] == [0, 1]
    assert (told["job"], told["step"]) == (3, 5)
    assert told["alerts"] == [], "what ended the first attempt is over once the second has made a step"
    # Followed as lines: every job to its last step, though steps begin at 1 again.
    for number in (1, 2, 3):
        assert lines_with(done.stdout, [f"job {number} ", "steps  loss"]), done.stdout
    assert lines_with(done.stdout, ["job 3 step 5"])
    assert lines_with(done.stdout, ["  over: rank 1 failed"])
    assert lines_with(done.stdout, ["jobs:", "3, 1 failed"])
    assert lines_with(home.run("status", run.id).stdout, ["once, restart 1", "finished"])
    with Reader(run.recording) as reader:
        _the_recording_agrees(reader)


def _the_recording_agrees(reader: Reader) -> None:
    info = reader.info()
    frames = reader.frames(0, 10_000)
    first_seen: dict[int, int] = {}
    for frame in frames:
        if isinstance(frame.message, Job):
            first_seen.setdefault(frame.message.number, frame.seq)
    begins = list(first_seen.values())
    times = [frame.t for frame in frames]
    assert times == sorted(times), "a moment of the recording is one place in the stream"
    final = {frame.message.number: frame.message for frame in reader.jobs() if isinstance(frame.message, Job)}
    assert len(begins) == len(final)
    for number, (first, last) in enumerate(zip(begins, [*begins[1:], 1 << 60], strict=True), 1):
        steps = [f.message for f in frames if first < f.seq < last and isinstance(f.message, Step)]
        for rank in final[number].ranks:
            after = [
                f.message
                for f in frames
                if first < f.seq < last and isinstance(f.message, Closing) and f.message.rank == rank.rank
            ]
            own = [step for step in steps if step.rank == rank.rank]
            assert [step.step for step in own] == list(range(1, rank.steps + 1))
            assert rank.loss == own[-1].loss
            for phase in rank.phases:
                records = [record for each in (*own, *after) for record in each.phases if record.name == phase.name]
                assert phase.allocated_peak == max(record.allocated.peak for record in records)
                assert phase.reserved_peak == max(record.reserved.peak for record in records)
        # A seek into the job shows that job, as it was then.
        if not final[number].steps:
            continue
        model = load(reader, final[number].ended or info.last_t, describe(info))
        assert (model.job, model.leading_step) == (number, final[number].steps)
        assert model.peak.bytes <= final[number].peak, "what came after the last step counts for the job"
        assert [moment.step for moment in model.moments] == list(range(1, final[number].steps + 1))
    rows = job_rows(load(reader, info.last_t, describe(info)).jobs, info.last_t)
    assert [row.words for row in rows] == ["6 32 ok", "5 16 once", "5 16 once, restart 1"]


def test_trainings_one_after_the_other_in_one_plain_process_are_jobs(home: Ftmon) -> None:
    done = home.run("run", "--plain", "--", sys.executable, str(SCRIPTS / "three_trainings.py"), seconds=480)
    assert done.returncode == 0, done.stdout + done.stderr
    told = home.status(home.newest().id)
    # A new optimizer for the same model does not begin a job, nor does a training of less than 5 s.
    assert [(job["state"], job["steps"]) for job in told["jobs"]] == [("finished", 4), ("finished", 8), ("finished", 3)]
    assert told["step"] == 3
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "last loss" in line]
    assert [job["ranks"][0]["loss"] for job in told["jobs"]] == pytest.approx([*losses[:2], losses[3]], rel=1e-5)
    kept = [line.split()[-1] for line in done.stdout.splitlines() if "kept alive" in line]
    assert kept == ["0"], "a training's memory is free for the next one"


def test_two_jobs_at_the_same_time_are_not_mixed(tmp_path: Path) -> None:
    go = tmp_path / "go"
    quick, slow = (fake_ranks({"steps": steps, "rate": 5, "awaits": str(go)}) for steps in (15, 30))
    both = ["bash", "-c", f"{_shell(quick)} & {_shell(slow)} & wait"]
    with started(both) as run, App(run) as app:
        app.told(Alert, lambda alert: str(alert.evidence.get("rule")).startswith("beside "))
        go.touch()
        app.wait_for(Job, lambda job: job.is_over and job.steps == 30)
        app.wait_for(Job, lambda job: job.is_over and job.steps == 15)
        hub_gone(run)
    with Reader(run.recording) as reader:
        frames = reader.frames(0, 10_000)
    in_stream: list[int] = []
    shown = 0
    for frame in frames:
        message = frame.message
        if isinstance(message, Job) and message.shown and not message.is_over and message.number != shown:
            shown, in_stream = message.number, []
        elif isinstance(message, Step):
            assert not in_stream or message.step == in_stream[-1] + 1, "steps of two jobs are mixed"
            in_stream.append(message.step)


def _shell(words: list[str]) -> str:
    return shlex.join(words)
