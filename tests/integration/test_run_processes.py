"""Processes that a run directory names."""

import subprocess
import sys

from ftmon.protocol.host.process import ProcessId, is_alive, start_ticks
from ftmon.protocol.run.rundir import HubFile, RunDir


def test_a_hub_that_died_is_not_alive(run: RunDir) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId(child.pid, start_ticks(child.pid) or 0)
    run.write_hub(HubFile(process, {}, "0.1.0", "here", 0.0))
    assert run.living_hub() is not None
    child.communicate(b"\n")
    assert run.living_hub() is None
    assert not is_alive(process)


def test_a_process_whose_name_is_no_text_can_be_named() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) R 1 (', 0, 0, 0); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        assert start_ticks(child.pid)
    finally:
        child.communicate(b"\n")
    assert start_ticks(child.pid) is None
