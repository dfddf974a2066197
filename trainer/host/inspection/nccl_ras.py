"""Reads NCCL's RAS service: how many collectives each rank has launched on each communicator, without any hook.

Every process of a job that uses NCCL 2.28.7 or later answers on ``NCCL_RAS_ADDR`` with the state of the whole job in
JSON (NCCL's documentation, "RAS"; older versions only write text, which differs between releases). What was seen with
NCCL 2.28.9 on two H200s:

- A rank that still connects to its peers in a communicator's first collective waits inside the call, and that
  collective is not counted yet.
- All processes bind the same port (``SO_REUSEPORT``), so a connection may reach one that is stopped: then another
  connection, to another process, is tried.
- If a process is missing, the JSON lacks a comma before its ``status``.
"""

import contextlib
import json
import re
import socket
import time
from collections.abc import Mapping

import msgspec

from ....protocol.analysis.stalls.evidence import Call, Calls

_REQUEST = b"client protocol 2\ntimeout 1\nset format json\nstatus\n"
_ATTEMPTS, _ATTEMPT_SECONDS = 4, 0.5
_LARGEST_ANSWER = 16 << 20
_MISSING_COMMA = re.compile(r'("nvml_dev": -?\d+)(\s+"status")')


class _Rank(msgspec.Struct):
    pid: int
    collective_counts: dict[str, int] = {}


class _Communicator(msgspec.Struct):
    hash: str
    ranks: list[_Rank] = []


class _Job(msgspec.Struct):
    communicators: list[_Communicator] = []


def query(address: str) -> str:
    """Return the job's state as JSON from any process that answers; empty: none does. Blocks for 2 s at most."""
    host, _, port = address.rpartition(":")
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(OSError, ValueError):
            text = _ask(host.strip("[]") or "localhost", int(port))
            if "{" in text:
                return text[text.index("{") :]
    return ""


def _ask(host: str, port: int) -> str:
    deadline = time.monotonic() + _ATTEMPT_SECONDS
    answer = bytearray()
    with socket.create_connection((host, port), timeout=_ATTEMPT_SECONDS) as connection:
        connection.sendall(_REQUEST)
        while len(answer) < _LARGEST_ANSWER:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                break
            answer += part
    return answer.decode(errors="replace")


def launched(text: str, pids: Mapping[int, int]) -> dict[int, Calls]:
    """Return the collectives that each rank has launched, by NCCL's count.

    A rank's last collective of a communicator is not done if another of its ranks has launched fewer.

    ``pids`` are by rank. A process of another job, and a pid that two hosts have, are left out.
    """
    try:
        job = msgspec.convert(json.loads(_MISSING_COMMA.sub(r"\1,\2", text)), _Job)
    except (ValueError, msgspec.ValidationError):
        return {}
    ranks = {pid: rank for rank, pid in pids.items()}
    recent: dict[int, list[Call]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for communicator in job.communicators:
        here = [(ranks[one.pid], sum(one.collective_counts.values())) for one in communicator.ranks if one.pid in ranks]
        counts = dict(here)
        if len(counts) < max(2, len(here)):
            continue
        members[communicator.hash] = tuple(sorted(counts))
        fewest = min(counts.values())
        for rank, count in counts.items():
            done = False if count > fewest else None
            recent.setdefault(rank, []).append(Call(communicator.hash, count, "collective", 0, done))
    return {rank: Calls("nccl", tuple(calls), {}, members) for rank, calls in recent.items()}
