import os
import time

import msgspec
import pytest
from ftmon.protocol.host.process import ProcessId, this_process
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Evaluation, Hello, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import ExitFile, Recipe, RunDir
from ftmon.tui.model.runs import RunList, recorded_entry, script_words
from streams import Stream, write

pytestmark = pytest.mark.usefixtures("private_home")


def made(name: str, launcher: ProcessId | None = None) -> RunDir:
    run = rundir.create(name, ["train.py", "--lr", "1"], "run")
    if launcher is not None:
        run.write_run(msgspec.structs.replace(run.read_run(), launcher=launcher))
    return run


def test_a_run_that_ended_has_its_end_from_the_exit_file_and_its_steps_from_the_recording() -> None:
    run = made("done")
    write(run.recording, Stream(ranks=2, steps=30).frames())
    run.write_exit(ExitFile(3, time.time(), "failed", "rank 1 died"))
    (entry,) = RunList().entries()
    assert (entry.state, entry.live, entry.exit_code, entry.step, entry.ranks) == ("failed", False, 3, 30, 2)
    assert entry.ended is not None
    assert (entry.recording_bytes, entry.problem) == (run.recording.stat().st_size, "")


def test_a_run_is_live_with_its_launcher_before_any_hub_has_written_and_lost_where_nobody_saw_its_end() -> None:
    made("young", this_process())
    lost = made("lost", ProcessId(2**22 + 1, 1))
    write(lost.recording, Stream(ranks=1, steps=5, finished=False).frames())
    made("bad").recording.write_bytes(b"this is no recording at all " * 100)
    entries = {entry.name: entry for entry in RunList().entries()}
    young = entries["young"]
    assert (young.live, young.state, young.ended, young.recording, young.problem) == (True, "starting", None, "", "")
    assert young.duration_s(young.created + 5) == pytest.approx(5)
    assert (entries["lost"].state, entries["lost"].live) == ("lost", False)
    assert "recording" in entries["bad"].problem
    os.utime(lost.path / "run.json", (1, 1))
    assert RunList().entries()[-1].id == lost.id, "the newest first"


def test_an_unchanged_recording_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = made("done")
    write(run.recording, Stream(ranks=1, steps=3).frames())
    listing = RunList()
    first = listing.entries()
    reads: list[RunDir] = []
    monkeypatch.setattr("ftmon.tui.model.runs._read_info", lambda run: reads.append(run) or (None, "read again"))
    assert listing.entries() == first
    assert reads == []
    with run.recording.open("ab") as file:
        file.write(b"\0" * 4096)
    listing.entries()
    assert [read.id for read in reads] == [run.id]


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("torchrun --nproc-per-node 2 train.py --lr 1", "train.py --lr 1"),
        ("/env/bin/deepspeed --num_gpus=8 src/train.py --deepspeed ds.json", "src/train.py --deepspeed ds.json"),
        ("accelerate launch --config_file a.yaml train.py", "train.py"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train.py"),
        ("python -u -m package.train --lr 1", "-m package.train --lr 1"),
        ("torchrun --nproc-per-node 2 -m package.train", "-m package.train"),
        ("bash sweep.sh", "sweep.sh"),
        ("./train.py", "./train.py"),
        ("program --lr 1", "program --lr 1"),
    ],
)
def test_a_script_is_shown_with_its_own_arguments_and_not_its_launchers(command, script) -> None:
    assert script_words(command.split()) == script.split()


def test_a_run_of_the_trainer_has_model_data_and_overrides_and_not_the_command_of_its_launcher() -> None:
    recipe = Recipe("train.yaml", ["zero.stage=3"], "Qwen/Qwen2.5-0.5B", ["/data/chats.jsonl"])
    run = rundir.create("tuned", ["python", "-m", "deepspeed.launcher.launch"], "train", recipe=recipe)
    frames = list(Stream(ranks=2, steps=4).frames())
    results = [Evaluation(0, step, 1.0, "chats", loss, None) for step, loss in ((2, 3.25), (4, 3.0))]
    write(
        run.recording, [*frames, *(Frame(frames[-1].seq + n, frames[-1].t, each) for n, each in enumerate(results, 1))]
    )
    (entry,) = RunList().entries()
    assert entry.subject == "Qwen/Qwen2.5-0.5B  chats.jsonl  train.yaml zero.stage=3"
    assert (entry.script, entry.overrides, entry.evaluation_loss) == ([], ["zero.stage=3"], 3.0)
    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
    losses = [step.loss for step in steps if step.step == 4 and step.loss is not None]
    assert entry.loss is not None
    assert min(losses) <= entry.loss <= max(losses)


def test_another_script_has_the_model_that_its_ranks_reported() -> None:
    run = rundir.create("other", ["torchrun", "train.py", "--lr", "1"], "run")
    frames = list(Stream(ranks=1, steps=2).frames())
    model = next(frame.message.model for frame in frames if isinstance(frame.message, Hello))
    write(run.recording, frames)
    (entry,) = RunList().entries()
    assert model
    assert entry.subject == f"{model}  train.py --lr 1"


def test_a_failed_run_has_its_reason_and_a_recording_in_its_directory_ends_when_it_did():
    run = made("broken")
    frames = list(Stream(ranks=1, steps=2, finished=False).frames())
    died = Alert(1, "died", "error", frames[-1].t, "rank 0 killed by SIGSEGV", rank=0)
    write(run.recording, [*frames, Frame(frames[-1].seq + 1, frames[-1].t, died)])
    run.write_exit(ExitFile(245, time.time(), "failed", "exit code 245"))
    (entry,) = RunList().entries()
    assert entry.reason == "rank 0 killed by SIGSEGV (exit code 245)"
    run = made("over")
    frames = list(Stream(ranks=1, steps=2).frames())
    write(run.recording, frames)
    of_stream = recorded_entry(run.recording)
    run.write_run(msgspec.structs.replace(run.read_run(), id=of_stream.id))
    run.write_exit(ExitFile(0, frames[-1].t - 3, "finished"))
    assert recorded_entry(run.recording).ended == pytest.approx(of_stream.ended - 3)
