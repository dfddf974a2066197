"""The folder ``checkpoints/`` of an output folder: finds the newest and the best one, removes old ones."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from ....protocol.errors import ConfigError
from . import manifest
from .manifest import Manifest

_TAG = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"step-(\d+)\.(part|old)")
LATEST = "latest"
"""The file that names the newest checkpoint, for DeepSpeed's own tools; written after everything else."""

TRIAL = "rehearsal"
"""The folder of the rehearsal's checkpoint while it is being compared; no tool reads it as a checkpoint of the run."""


class Found(NamedTuple):
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


def tag(step: int) -> str:
    """Return the folder's name of the checkpoint of a step."""
    return f"step-{step}"


def complete(folder: Path) -> tuple[list[Found], list[str]]:
    """Return the complete checkpoints of a folder, newest first, and notes on those that are not."""
    found: list[Found] = []
    notes: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name):
            if path.suffix == ".part":
                notes.append(f"{path.name} was not finished")
        elif _TAG.fullmatch(path.name):
            one, problem = examine(path)
            if one is not None:
                found.append(one)
            else:
                notes.append(f"{path.name} is incomplete: {problem}")
    return sorted(found, key=lambda one: (one.manifest.time, one.manifest.state.step), reverse=True), notes


def examine(path: Path) -> tuple[Found | None, str]:
    """Return a checkpoint if it is complete, else None and the problem."""
    content = manifest.read(path)
    if content is None:
        return None, f"no {manifest.NAME}"
    problem = manifest.missing(path, content)
    return (None, problem) if problem else (Found(path, content), "")


def candidates(resume: str, output: Path) -> tuple[list[Found], list[str]]:
    """Return the checkpoints that a run may resume from, in the order to be tried, and notes on incomplete ones.

    ``resume`` is ``never``, ``auto``, or the path of a checkpoint (``step-N``), its parent, or an output folder.

    Raises:
        ConfigError: a path was given and no complete checkpoint is there.
    """
    if resume == "never":
        return [], []
    place = output if resume == "auto" else Path(resume)
    if _TAG.fullmatch(place.name) and resume != "auto":
        one, problem = examine(place)
        if one is None:
            others, _ = complete(place.parent)
            instead = f"; complete: {', '.join(other.path.name for other in others)}" if others else ""
            raise ConfigError(f"checkpoint.resume: {place} is not a complete checkpoint: {problem}{instead}")
        return [one], []
    notes: list[str] = []
    for folder in (place / "checkpoints", place):
        found, found_notes = complete(folder)
        notes += found_notes
        if found:
            return found, notes
    if resume == "auto":
        return [], notes
    why = f" ({'; '.join(notes)})" if notes else ""
    raise ConfigError(f"checkpoint.resume: {resume}: no complete checkpoint is there{why}")


def lowest(found: list[Found]) -> Found | None:
    """Return the checkpoint with the lowest evaluation loss; None without evaluations."""
    rated = [one for one in found if one.manifest.evaluation_loss is not None]
    return min(rated, key=lambda one: one.manifest.evaluation_loss or 0.0, default=None)


def prune(folder: Path, keep: int, keep_best: bool) -> None:
    """Remove complete checkpoints except the newest ``keep``, and with ``keep_best`` the best one."""
    found, _ = complete(folder)
    best = lowest(found) if keep_best else None
    for old in found[keep:]:
        if best is None or old.path != best.path:
            # Renamed first: an interrupted removal leaves no folder that looks like a checkpoint.
            going = old.path.with_name(old.path.name + ".old")
            shutil.rmtree(going, ignore_errors=True)
            old.path.rename(going)
            shutil.rmtree(going, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Remove files of killed writers; no process may be writing there."""
    for path in folder.iterdir() if folder.is_dir() else []:
        if _UNFINISHED.fullmatch(path.name) or path.name == TRIAL:
            shutil.rmtree(path, ignore_errors=True)
