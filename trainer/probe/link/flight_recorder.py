"""Collectives that this rank has entered, for comparison with other ranks: read only when a stall is suspected.

PyTorch's flight recorder has all of them, including those that DDP issues from C++, and their completion. If it has
none (it is off, or does not support gloo), the probe's own count of calls is used.
"""

import json
import os
import sys
import threading
from typing import Any

from ..phases.tracker import Counts

KEPT = 64
"""Newest collectives reported of each process group."""
READ_SECONDS = 0.25
"""The recorder asks the device whether events have passed. If the driver does not answer, the wait ends after this:
the hub waits half a second for a rank (``hub.stall_probe``), and its other evidence must arrive within that."""

_reader: threading.Thread | None = None
_RAS_ADDRESS = "localhost:28028"
"""NCCL's default."""
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def calls(counts: Counts) -> dict[str, Any]:
    """Return the collectives that were entered, as plain data for a message.

    Returns:
        ``source``: ``recorder`` or ``calls``; ``counted``: the probe's count of each group; ``ranks``: the
        global ranks of each process group, by its name; ``recent``: (group, number within the group, name, elements,
        done) of the last collectives, oldest first, where done is None when it is not known.
    """
    recorded = _in_time()
    recent = recorded or _newest([[group, number, name, size, None] for group, number, name, size in _copy(counts)])
    source = "recorder" if recorded else "calls"
    return {"source": source, "counted": dict(counts.groups), "ranks": members(), "recent": recent}


def members() -> dict[str, list[int]]:
    """Return the global ranks of every process group of this rank, by PyTorch's name for the group."""
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if core is None:
        return {}
    try:
        ranks = core._world.pg_group_ranks
        return {str(name): sorted(ranks.get(group, ())) for group, name in list(core._world.pg_names.items())}
    except Exception:  # a group made or destroyed at this moment, or names that another version does not have
        return {}


def ras_address() -> str:
    """Return where NCCL's RAS service of this process answers (``NCCL_RAS_ADDR``); empty if it does not use NCCL."""
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if core is None or os.environ.get("NCCL_RAS_ENABLE") == "0":
        return ""
    try:
        backends = [str(found[0]) for found in list(core._world.pg_map.values())]
    except Exception:  # names that another version does not have
        return ""
    return os.environ.get("NCCL_RAS_ADDR", _RAS_ADDRESS) if any("nccl" in name for name in backends) else ""


def parse(trace: bytes | str) -> list[list[Any]]:
    """Read the flight recorder's JSON: collectives only, see ``calls``."""
    found: list[list[Any]] = []
    for entry in json.loads(trace).get("entries", []):
        number = int(entry.get("collective_seq_id") or 0)
        if entry.get("is_p2p") or not number:
            continue
        name = str(entry.get("profiling_name", "")).rpartition(":")[2].lstrip("_")
        sizes = entry.get("input_sizes") or []
        size = _elements(sizes[0]) if len(sizes) == 1 else 0
        # gloo's entries stay "scheduled" for good; "retired" is valid for both.
        done = bool(entry.get("retired")) or entry.get("state") == "completed"
        group: Any = entry.get("process_group") or [""]
        call = [str(group[0]), number, name, size, done]
        if found and found[-1][:2] == call[:2]:
            continue  # one coalesced collective has an entry for each of its tensors
        found.append(call)
    return _newest(found)


def _in_time() -> list[list[Any]]:
    global _reader
    found: list[list[Any]] = []

    def read() -> None:
        try:
            found.extend(_read())
        except Exception:
            found.clear()

    if _reader is not None and _reader.is_alive():
        return []  # the previous read still waits for the driver
    _reader = threading.Thread(target=read, name="ftmon-flight", daemon=True)
    _reader.start()
    _reader.join(READ_SECONDS)
    return [] if _reader.is_alive() else found


def _read() -> list[list[Any]]:
    core: Any = sys.modules.get("torch._C._distributed_c10d") or getattr(
        getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None
    )
    for name in _DUMPS:
        dump: Any = getattr(core, name, None)
        if dump is not None:
            recorded = parse(dump())
            if recorded:
                return recorded
    return []


def _copy(counts: Counts) -> list[tuple[str, int, str, int]]:
    for _ in range(3):
        try:
            return list(counts.recent)
        except RuntimeError:  # the training thread has added one meanwhile
            continue
    return []


def _newest(found: list[list[Any]]) -> list[list[Any]]:
    left: dict[str, int] = {}
    kept: list[list[Any]] = []
    for call in reversed(found):
        left[call[0]] = left.get(call[0], 0) + 1
        if left[call[0]] <= KEPT:
            kept.append(call)
    return kept[::-1]


def _elements(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= int(length)
    return count
