"""A look at a rank's native stacks, on a real process."""

import os
import signal
import subprocess
import time
from typing import Any

from eventually import eventually
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import loop, processes
from ftmon.trainer.host.end.kill import Target
from ftmon.trainer.host.inspection import inspect
from stall_bench import Bench


def test_that_py_spy_pauses_a_rank_is_no_work_of_it(run: RunDir, monkeypatch: Any) -> None:
    bench = Bench(run, monkeypatch)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            process = processes.read(child.pid)
            eventually(lambda: "nanosleep" in inspect.wchan(child.pid, child.pid), "it sleeps")
            target = Target(0, child.pid, process.start_ticks)
            bench.parts.targets = lambda: [target]

            def observe() -> None:
                found = inspect.measure(child.pid, None, processes.table(), time.monotonic())
                bench.patch("_activity_of", lambda _: found)
                bench.look({})

            def is_in(state: str) -> bool:
                now = processes.read(child.pid)
                return now is not None and now.state == state

            def pause(process: processes.Process) -> tuple[str, str]:
                for _ in range(3):
                    os.kill(process.pid, signal.SIGSTOP)
                    eventually(lambda: is_in("T"), "it is stopped")
                    os.kill(process.pid, signal.SIGCONT)
                    eventually(lambda: is_in("S"), "it sleeps again")
                return "Process 1: native", ""

            monkeypatch.setattr("ftmon.trainer.host.inspection.inspect.native", pause)
            observe()
            before = inspect.switches(child.pid, child.pid)
            loop.start(bench.stall_probe.read_native([0], "why"))
            eventually(lambda: bench.emitted, "its stacks")
            assert inspect.switches(child.pid, child.pid) > before
            observe()
        finally:
            child.kill()
    assert bench.rank.evidence.work == ""
