"""Disk space of a run's output: what it will write, what is free, and which checkpoints are removed for it."""

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from .. import support
from ..config.schema import Config
from . import manifest

_GIB = 2**30
_MARGIN = 1.02  # Files are a little larger than their tensors
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Amount(NamedTuple):
    """Checkpoints and the final model that are on the disk at the same time."""

    checkpoints: int
    model: bool


class Plan(NamedTuple):
    """What a run will write."""

    checkpoint: int  # Bytes of a checkpoint, over all ranks
    model: int  # Bytes of the final model; 0: none is written
    saves: int  # How many checkpoints are planned at most
    kept: int  # How many complete ones are kept at most

    def bytes(self, amount: Amount) -> int:
        """Return the bytes of an amount."""
        return amount.checkpoints * self.checkpoint + amount.model * self.model

    @property
    def most(self) -> Amount:
        """What the run has on the disk at most; an old checkpoint is removed when the next one is complete."""
        saving = Amount(min(self.saves, self.kept + 1), model=False)
        return max(saving, Amount(min(self.saves, self.kept), self.model > 0), key=self.bytes)

    @property
    def least(self) -> Amount:
        """What has to fit, if the oldest are removed first: one complete checkpoint always stays."""
        return max(Amount(min(self.saves, 2), model=False), Amount(min(self.saves, 1), self.model > 0), key=self.bytes)

    def words(self, amount: Amount) -> str:
        """Return ``3 checkpoints of 1.0 GiB and the final model of 0.2 GiB take 3.2 GiB``."""
        parts: list[str] = []
        if amount.checkpoints:
            count = f"{amount.checkpoints} checkpoints" if amount.checkpoints > 1 else "a checkpoint"
            parts.append(f"{count} of {size_text(self.checkpoint)}")
        if amount.model:
            parts.append(f"the final model of {size_text(self.model)}")
        total = size_text(self.bytes(amount))
        if sum(amount) == 1:
            return f"{parts[0].partition(' of ')[0]} takes {total}"
        return f"{' and '.join(parts)} take {total}"


def plan(config: Config, steps: range, checkpoint: int, model: int) -> Plan:
    """Return what the steps of a run will write, with a checkpoint and a final model of these sizes in bytes."""
    saving, evaluation = config.checkpoint, config.evaluation
    regular = _multiples(steps, saving.every) + (saving.at_end and (not saving.every or steps.stop % saving.every != 1))
    # Without other checkpoints the best one is the newest.
    best = evaluation.on and saving.keep_best
    saves = regular + (_multiples(steps, evaluation.interval) + evaluation.at_end if best else 0)
    return Plan(checkpoint, model, saves, saving.keep + (best and regular > 0))


def _multiples(steps: range, every: int) -> int:
    return (steps.stop - 1) // every - (steps.start - 1) // every if every else 0


def check(folder: Path, planned: Plan, keep: int) -> tuple[str, str]:
    """Return why the disk of a folder of checkpoints is too small for a run, and a note if some will be removed early.

    Both are empty if it holds ``planned.most``; checkpoints that are there already count as part of it.
    """
    now = free(folder)
    room = now + sum(bytes_of(one) for one in manifest.complete(folder)[0])
    has = f"and the disk of {folder} has {size_text(now)} free"
    if room < planned.bytes(planned.least) * _MARGIN:
        return f"{planned.words(planned.least)}, {has}", ""
    if room < planned.bytes(planned.most) * _MARGIN:
        return "", (
            f"{planned.words(planned.most)} (checkpoint.keep={keep} and one being written), {has}: the oldest "
            "checkpoints will be removed before the next is written; free space, or lower checkpoint.keep"
        )
    return "", ""


def make_room(folder: Path, needed: int, kept: set[Path]) -> tuple[list[str], str]:
    """Remove the oldest complete checkpoints but ``kept`` until ``needed`` bytes are free.

    Return their names, and what is missing. If all of them are too little, none is removed.
    """
    needed = int(needed * _MARGIN)
    found, _ = manifest.complete(folder)
    old = [one for one in reversed(found) if one.path not in kept]
    gone: list[str] = []
    if free(folder) + sum(map(bytes_of, old)) >= needed:
        for one in old:
            if free(folder) >= needed:
                break
            with contextlib.suppress(OSError):
                support.replace_folder(one.path)
                gone.append(one.path.name)
    now = free(folder)
    missing = f"it takes {size_text(needed)}, and the disk of {folder} has {size_text(now)} free"
    return gone, missing if now < needed else ""


def free(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(place).free


def bytes_of(found: manifest.Found) -> int:
    """Return the size of a complete checkpoint, from its manifest."""
    return sum(file.bytes for file in found.manifest.files.values())


def reserve(path: Path, size: int) -> None:
    """Extend a file to ``size`` bytes on the disk without writing them, if the file system can.

    A quota, a limit of a file's size or a full disk is an ``OSError``.
    """
    with path.open("r+b") as file:
        # os.posix_fallocate would write to every block where the file system cannot.
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
        if call is not None and call(file.fileno(), 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        code = ctypes.get_errno()
        if call is not None and code in _FULL:
            raise OSError(code, os.strerror(code))
        file.truncate(size)


def size_text(count: int) -> str:
    """Return bytes as ``1.5 GiB`` or ``20.0 MiB``."""
    return f"{count / _GIB:,.1f} GiB" if count >= _GIB / 10 else f"{count / 2**20:,.1f} MiB"
