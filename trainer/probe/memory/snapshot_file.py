"""Writes memory snapshots into the run's folder, of limited size; a failure is returned, not raised."""

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

MOST_BYTES = 512 * 2**20
"""Limit of one snapshot; beyond it the oldest entries of the trace are left out."""
SPARE_BYTES = 512 * 2**20
"""Space left on the disk for the run itself."""


def write_snapshot(path: Path, found: dict[str, Any]) -> tuple[Path | None, int, str]:
    """Write a snapshot as ``torch.cuda.memory._dump_snapshot`` does.

    Returns:
        The file (None when there is none), its bytes, and the problem in words; empty without one.
    """
    note = ""
    data = pickle.dumps(found, protocol=4)
    while len(data) > MOST_BYTES and any(len(trace) > 1000 for trace in found["device_traces"]):
        share = MOST_BYTES / len(data) * 0.9
        found["device_traces"] = [trace[-max(1000, int(len(trace) * share)) :] for trace in found["device_traces"]]
        data = pickle.dumps(found, protocol=4)
        note = (
            f"only its last {max(map(len, found['device_traces'])):,} entries, to keep it under {MOST_BYTES >> 20} MiB"
        )
    try:
        free = shutil.disk_usage(path.parent).free
        if free < len(data) + SPARE_BYTES:
            return None, 0, f"no snapshot: {len(data) >> 20} MiB, and only {free >> 20} MiB of the disk are free"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return None, 0, f"no snapshot: {error.strerror or error}"
    return path, len(data), note
