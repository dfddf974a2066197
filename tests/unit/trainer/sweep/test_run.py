"""How a sweep waits for a run."""

import os
import socket
import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import RecordedRun
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.protocol.run.start import CommandEnd, LauncherMessage
from ftmon.protocol.sweep.rows import Planned
from ftmon.trainer.sweep import run
from ftmon.trainer.sweep.plan import LENGTH
from ftmon.trainer.sweep.run import Ending, Running, progress, why
from streams import Stream, write


def resumed(frame: Frame) -> Frame:
    """Return a frame as of a script that resumes from a checkpoint."""
    step = frame.message
    if not isinstance(step, Step):
        return frame
    return msgspec.structs.replace(frame, message=msgspec.structs.replace(step, step=step.step + 1000))


def test_steps_of_a_resumed_script_are_counted_from_its_own_first_and_by_the_rank_with_the_fewest(tmp_path):
    frames = [resumed(frame) for frame in Stream(ranks=2, steps=40).frames()]
    last = [frame for frame in frames if isinstance(frame.message, Step)][-1]
    (tmp_path / "other").mkdir()
    run, other = RunDir(tmp_path), RunDir(tmp_path / "other")
    write(run.recording, [frame for frame in frames if frame is not last])  # not recorded yet
    write(other.recording, [frame for frame in frames if not (isinstance(frame.message, Step) and frame.message.rank)])
    assert (progress(run, 0.0).steps, progress(other, 0.0).steps) == (39, 0)


def test_a_hang_is_the_one_for_which_the_run_was_ended_not_what_its_end_looks_like(tmp_path):
    run = RunDir(tmp_path)
    frames = list(Stream(ranks=2, steps=5, finished=False).frames())
    at = frames[-1].t

    def hang(number: int, rank: int) -> Frame:
        alert = Alert(number, "hang", "error", at + number, f"rank {rank} hangs", rank=rank, evidence={"hung": [rank]})
        return Frame(frames[-1].seq + number, at + number, alert)

    write(run.recording, [*frames, hang(1, 1), hang(9, 0)])
    recorded = RecordedRun(run.recording)
    for asked, rank in ((at + 5, 1), (at + 20, 0)):
        found = why(Ending(run, None, "hang", [], asked), recorded, 60.0)
        assert (found.verdict, found.rank) == ("hang", rank)


@pytest.mark.parametrize(("deadline", "why"), [(0.0, ""), (float("inf"), "hang")], ids=["deadline", "asked for"])
def test_a_run_that_ends_by_itself_while_it_is_waited_for_was_not_ended(deadline, why, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "_POLL_SECONDS", 200.0)  # the wait ends with the run, however late that is
    line = CommandEnd()
    launcher = socket.socket(fileno=os.dup(line.launchers_end))
    line.other.close()
    running = Running.__new__(Running)  # of a launcher that is this process
    running.run, running._line = RunDir(tmp_path), line
    end = ExitFile(0, 1.0, "finished")

    def launch() -> None:
        with launcher:
            launcher.send(msgspec.json.encode(LauncherMessage(end=end)) + b"\n")

    timer = threading.Timer(0.1, launch)
    timer.start()
    ending = running.wait(deadline, lambda: why)
    timer.join()
    assert (ending.ended_for, ending.exit) == ("", end)


def test_what_differs_in_more_than_its_length_has_a_process_of_its_own_and_so_has_what_follows_a_failure(monkeypatch):
    begun: list[list[tuple[object, object]]] = []

    class Process:
        def __init__(self, _session: object, runs: list[Planned], *_: object) -> None:
            begun.append([(one.settings["training.micro_batch"], one.settings[LENGTH]) for one in runs])

        def measure(self) -> int:
            return min(2, len(begun[-1]))

    monkeypatch.setattr(run, "Process", Process)
    plan = [Planned({LENGTH: length, "training.micro_batch": batch}) for length in (64, 16, 40) for batch in (1, 2)]
    run.measure_plan(cast("Any", SimpleNamespace(has=lambda *_: False)), plan, 0)
    whole = [[(batch, length) for length in (16, 40, 64)] for batch in (1, 2)]
    assert begun == [whole[0], whole[0][2:], whole[1], whole[1][2:]]
