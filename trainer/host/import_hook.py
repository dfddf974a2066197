"""The directory of ftmon's import hook, and a search for processes without it (whose command set ``PYTHONPATH``)."""

import os
from pathlib import Path

from ...protocol.analysis.hub_facts import UnhookedFacts
from . import processes

INJECT_DIR = Path(__file__).resolve().parent.parent / "probe" / "inject"
"""Put first on ``PYTHONPATH``: its ``sitecustomize`` installs the import hook in every Python process of the job."""

_PYTORCH = b"/libtorch"


def find_unhooked(run: Path, launcher: int) -> UnhookedFacts | None:
    """Return a process of ``run`` below ``launcher`` that has loaded PyTorch but not the import hook, else None."""
    for process in processes.marked(run, processes.descendants([launcher], processes.table())):
        given = processes.variable_of(process.pid, "PYTHONPATH")
        hooked = str(INJECT_DIR) in (given or "").split(os.pathsep)
        if not hooked and _has_pytorch(process.pid):
            return UnhookedFacts(process.pid, given)
    return None


def _has_pytorch(pid: int) -> bool:
    try:
        return _PYTORCH in Path(f"/proc/{pid}/maps").read_bytes()
    except OSError:
        return False
