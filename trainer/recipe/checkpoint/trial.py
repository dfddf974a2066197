"""The rehearsal's checkpoint: checks the disk space, and that it is read back as it was written."""

import shutil
import time
from pathlib import Path

from ....protocol.errors import FtmonError
from ....protocol.text import duration
from ..config.schema import Config
from ..engine.distributed import World
from ..state import TrainState
from .save import Checkpoints

_GIB = 2**30
_MARGIN = 1.02
"""Files are a little larger than their tensors."""


def rehearse_checkpoint(checkpoints: Checkpoints, state: TrainState, config: Config, world: World) -> str:
    """Write a checkpoint, read it back, compare and delete it; return a note for the log. All ranks call this.

    If no checkpoint is planned (a stop or a best evaluation still writes one), a failure is a printed note.

    Raises:
        FtmonError: the disk lacks the space, or what is read back is not what was written; in all ranks.
    """
    began = time.perf_counter()
    folder = checkpoints.folder
    needed = checkpoints.measure(state)
    problem, compared = world.share_text(_lacking(folder, needed) if world.is_first else ""), 0
    if not problem:
        problem, compared = checkpoints.try_out(state)
        problem = f"a checkpoint could not be written to {folder}: {problem}" if problem else ""
    if not problem:
        seconds = duration(time.perf_counter() - began)
        return (
            f"; a checkpoint of {_size(needed)} was written, read back and compared ({compared} tensors) in {seconds}"
        )
    planned = config.checkpoint.every > 0 or config.checkpoint.at_end
    fix = "free space, set output.dir to another disk, or leave this check out with checkpoint.rehearse=false"
    if planned:
        raise FtmonError(f"rehearsal: {problem}; {fix}")
    if world.is_first:
        checkpoints.report_failure(folder, problem, state.step)
    best = " or a best evaluation" if config.evaluation.on and config.checkpoint.keep_best else ""
    world.log(f"note: rehearsal: {problem}; none is planned, but a stop{best} would write one")
    return ""


def _lacking(folder: Path, needed: int) -> str:
    """Return the lack of space for ``needed`` bytes, or an empty text."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free >= needed * _MARGIN:
        return ""
    return f"a checkpoint takes {_size(needed)}, and the disk of {folder} has {_size(free)} free"


def _size(count: int) -> str:
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:,.1f} MiB"
