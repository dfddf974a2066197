"""A process with PyTorch that was started without the import hook is found, and named with the way out."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ftmon.protocol.analysis.hub_facts import UnhookedFacts, without_hook
from ftmon.trainer.host.processes import INJECT_DIR, find_unhooked

MAPS = "import mmap; f = open('{}'); kept = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(flush=True); input()"


@contextmanager
def python(folder: Path, library: str, **variables: str) -> Generator[int]:
    """Run a child process that maps ``library``, as a process that imports PyTorch maps PyTorch's libraries."""
    file = folder / library
    file.write_bytes(b"code")
    environment = {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **variables}
    child = subprocess.Popen(
        [sys.executable, "-c", MAPS.format(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        child.stdout.readline()
        yield child.pid
    finally:
        child.communicate(b"\n")


def found(folder: Path, library: str, **variables: str) -> tuple[UnhookedFacts | None, int]:
    with python(folder, library, FTMON_RUN=str(folder), **variables) as pid:
        return find_unhooked(folder, os.getpid()), pid


def test_a_process_with_pytorch_whose_pythonpath_lacks_the_hook_is_found_and_no_other(tmp_path):
    facts, pid = found(tmp_path, "libtorch_cpu.so", PYTHONPATH=".:/mine")
    assert facts is not None
    assert facts == UnhookedFacts(pid, ".:/mine")
    assert "PYTHONPATH=.:/mine:$PYTHONPATH" in without_hook(facts).title
    facts, pid = found(tmp_path, "libtorch_cpu.so")
    assert facts is not None
    assert facts == UnhookedFacts(pid, None)
    assert f"pid {pid} was started without PYTHONPATH," in without_hook(facts).title
    assert found(tmp_path, "libtorch_cpu.so", PYTHONPATH=f".:{INJECT_DIR}")[0] is None
    assert found(tmp_path, "libother.so", PYTHONPATH=".")[0] is None
    with python(tmp_path, "libtorch_cpu.so", FTMON_RUN="/another", PYTHONPATH="."):
        assert find_unhooked(tmp_path, os.getpid()) is None, "of another run"
