"""Finds a rank's processes that no longer descend from it: daemons that forked twice, workers of a dead parent.

They are attributed to the rank by one of: its pid in their environment (``RANK_PID_ENV``, after an exec); the run's
environment with the same stack address (kept by a fork without exec; the kernel randomizes it for each exec); descent
from such a process.
"""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from . import processes
from .processes import RANK_PID_ENV, Process

_START_STACK = 25
"""Index of field 28 of /proc/PID/stat in the fields after the name."""


class Origin(NamedTuple):
    """Properties that identify the children of one rank's process; read while it lives."""

    rank: int
    pid: int
    start_ticks: int
    image: int
    """Address of its stack; 0: unknown, or shared with its parent and thus not specific to this rank."""


def origin(rank: int, pid: int, table: Mapping[int, Process]) -> Origin | None:
    """Return the properties that identify a rank's children; None if the process is gone."""
    process = table.get(pid)
    if process is None:
        return None
    image = _image(pid)
    if image and image == _image(process.parent):
        image = 0  # ranks that were forked from one process are alike
    return Origin(rank, pid, process.start_ticks, image)


def escaped(
    origins: Iterable[Origin], table: Mapping[int, Process], known: Mapping[tuple[int, int], int] | None = None
) -> dict[int, list[Process]]:
    """Return, by rank, the living processes that the ranks started and that no longer descend from them.

    ``known`` has the ranks of processes already attributed, by pid and start time.
    """
    wanted = list(origins)
    if not wanted:
        return {}
    by_pid = {one.pid: one for one in wanted}
    by_image = {one.image: one for one in wanted if one.image}
    oldest = min(one.start_ticks for one in wanted)
    below = {p.pid for p in processes.descendants(by_pid, dict(table))}
    found: dict[int, list[Process]] = {}
    for process in table.values():
        if process.pid in below or process.pid in by_pid or not process.alive or process.start_ticks < oldest:
            continue
        rank = (known or {}).get((process.pid, process.start_ticks))
        if rank is None:
            owner = _owner(process, by_pid, by_image)
            rank = owner.rank if owner is not None else None
        if rank is not None:
            found.setdefault(rank, []).append(process)
    return found


def _owner(process: Process, by_pid: Mapping[int, Origin], by_image: Mapping[int, Origin]) -> Origin | None:
    prefix = os.fsencode(f"{RANK_PID_ENV}=")
    for variable in processes.environment_of(process.pid):
        if variable.startswith(prefix) and variable[len(prefix) :].isdigit():
            return by_pid.get(int(variable[len(prefix) :]))
    return by_image.get(_image(process.pid)) if by_image else None


def _image(pid: int) -> int:
    read = processes.stat_fields(f"/proc/{pid}/stat")
    return int(read[1][_START_STACK]) if read is not None else 0
