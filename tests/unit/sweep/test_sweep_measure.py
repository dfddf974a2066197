"""What a sweep reads from the recording of a live run."""

from pathlib import Path

import msgspec
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.sweep.measure import progress
from streams import Stream, write

RESUMED_AT = 1000


def resumed(frame: Frame) -> Frame:
    """Return a frame as of a script that resumes from a checkpoint."""
    message = frame.message
    if not isinstance(message, Step):
        return frame
    message = msgspec.structs.replace(message, step=message.step + RESUMED_AT)
    return msgspec.structs.replace(frame, message=message)


def test_steps_of_a_resumed_script_are_counted_from_its_own_first(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    frames = [resumed(frame) for frame in Stream(ranks=2, steps=40).frames()]
    steps = [frame for frame in frames if isinstance(frame.message, Step)]
    # The last step of one rank is not recorded yet.
    write(run.recording, [frame for frame in frames if frame is not steps[-1]])
    assert progress(run, 0.0).steps == 39


def test_a_rank_without_a_step_holds_back_the_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    frames = Stream(ranks=2, steps=5).frames()
    write(run.recording, [frame for frame in frames if not (isinstance(frame.message, Step) and frame.message.rank)])
    assert progress(run, 0.0).steps == 0
