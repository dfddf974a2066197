"""The supervisor sees a rank's process stop, go on and die, and how it died."""

import contextlib
import os
import platform
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from eventually import eventually
from ftmon.protocol.analysis.stalls.tracker import ProcessFact
from ftmon.protocol.host.process import start_ticks
from ftmon.trainer.host import processes
from ftmon.trainer.host.supervisor import Supervisor

KERNEL = tuple(int(number) for number in platform.release().split(".")[:2])
SLEEP = "import time; print('ready', flush=True); time.sleep(600)"


class Watch:
    def __init__(self) -> None:
        self.ready: queue.Queue[None] = queue.Queue()
        self.supervisor = Supervisor(lambda: self.ready.put(None))
        self.supervisor.start()

    def change(self) -> ProcessFact:
        self.ready.get(timeout=200)
        return self.supervisor.poll()[-1]

    def death(self) -> ProcessFact:
        while (fact := self.change()).alive:
            pass
        return fact


@pytest.fixture
def watch():
    made = Watch()
    yield made
    made.supervisor.stop()
    made.supervisor.join(200)  # it may still have descriptors to close


def begin(watch: Watch, process) -> ProcessFact:
    watch.supervisor.watch(3, process.pid, start_ticks(process.pid) or 0)
    return watch.change()


def test_a_living_process_is_alive_and_stopping_and_going_on_are_seen(watch, spawn):
    fact = begin(watch, spawn(SLEEP))
    assert (fact.rank, fact.alive) == (3, True)
    assert fact.proc_state in "RSD"
    child = spawn(SLEEP)
    begin(watch, child)
    os.kill(child.pid, signal.SIGSTOP)
    assert watch.change().proc_state == "T"
    os.kill(child.pid, signal.SIGCONT)
    fact = watch.change()
    assert fact.alive
    assert fact.proc_state != "T"


TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, int(sys.argv[1]), 0, 0):  # PTRACE_SEIZE
    sys.exit(os.strerror(ctypes.get_errno()))
libc.ptrace(0x4207, int(sys.argv[1]), 0, 0)  # PTRACE_INTERRUPT
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("name", "is_told"), [("gdb", True), ("py-spy", False)])
def test_a_debugger_that_stops_a_process_is_told_and_a_profiler_is_not(watch, spawn, tmp_path, name, is_told):
    child = spawn(SLEEP)
    begin(watch, child)
    program = tmp_path / name
    program.symlink_to(os.path.realpath(sys.executable))
    with subprocess.Popen([program, "-c", TRACE, str(child.pid)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as by:
        try:
            if by.stdout.readline() != b"ready\n":
                pytest.skip(f"no process may be traced here: {by.stderr.read().decode().strip()}")
            eventually(lambda: processes.tracer(child.pid) == name, "the tracer")
            eventually(lambda: (found := processes.read(child.pid)) is not None and found.state == "t", "its stop")
            watch.supervisor.poll()  # facts of the time before, one a second
            facts: list[ProcessFact] = []
            eventually(lambda: facts.extend(watch.supervisor.poll()) or len(facts) > 2, "three facts")
        finally:
            by.kill()
    assert ("t" in [fact.proc_state for fact in facts]) is is_told, facts


@pytest.mark.parametrize(
    ("end", "expected"), [("os._exit(3)", (3, None)), ("os.kill(os.getpid(), 9)", (None, 9)), ("pass", (0, None))]
)
def test_a_death_is_read_from_the_zombie(watch, spawn, end, expected):
    child = spawn(f"import os, sys; print('ready', flush=True); sys.stdin.readline(); {end}")
    begin(watch, child)
    child.stdin.close()
    fact = watch.death()
    assert (fact.exit_code, fact.signal) == expected
    assert watch.supervisor.alive() == []


def test_a_process_that_was_gone_before_the_look_is_dead_without_a_reason_until_its_launcher_tells(watch, spawn):
    child = spawn(SLEEP)
    ticks = start_ticks(child.pid) or 0
    child.kill()
    child.wait()
    watch.supervisor.watch(3, child.pid, ticks)
    fact = watch.change()
    assert (fact.alive, fact.exit_code, fact.signal) == (False, None, None)
    watch.supervisor.read_words(f"E1121 failed (exitcode: -9) local_rank: 0 (pid: {child.pid}) of binary: python")
    assert watch.supervisor.poll()[-1].signal == 9


def test_a_launchers_line_about_a_process_of_the_same_pid_on_another_host_is_ignored(watch, spawn):
    child = spawn(SLEEP)
    begin(watch, child)
    watch.supervisor.read_words(f"E1121 failed (exitcode: -9) local_rank: 0 (pid: {child.pid}) of binary: python")
    assert all(fact.alive for fact in watch.supervisor.poll())
    assert [pid for _, pid, _ in watch.supervisor.alive()] == [child.pid]
    child.kill()
    assert watch.death().signal == 9


def pidfds() -> int:
    """Count this process's descriptors of processes. Other threads may open and close files meanwhile."""
    count = 0
    for info in Path("/proc/self/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            count += "\nPid:" in info.read_text()
    return count


def test_a_process_whose_launcher_told_its_end_first_is_no_longer_polled(spawn):
    child = spawn(SLEEP)
    supervisor = Supervisor(lambda: None)
    opened = pidfds()
    supervisor.watch(3, child.pid, start_ticks(child.pid) or 0)
    assert pidfds() == opened + 1
    child.kill()
    child.wait()
    supervisor.read_words(f"E1121 failed (exitcode: -9) local_rank: 0 (pid: {child.pid}) of binary: python")
    assert [(fact.alive, fact.signal) for fact in supervisor.poll()] == [(False, 9)]
    assert pidfds() == opened, "a ready descriptor would wake the thread without end"


def test_a_process_that_ftmon_itself_killed_was_killed_though_its_parent_reaped_it_first(watch, spawn):
    child = spawn(SLEEP)
    process = processes.read(child.pid)
    assert processes.send_signal(process, signal.SIGKILL)
    child.wait()
    watch.supervisor.watch(3, child.pid, process.start_ticks)
    fact = watch.change()
    assert (fact.alive, fact.exit_code, fact.signal) == (False, None, 9)


def test_a_pid_that_was_reused_is_not_the_rank(watch, spawn):
    child = spawn(SLEEP)
    watch.supervisor.watch(3, child.pid, 1)
    assert watch.change().alive is False
    assert child.poll() is None


@pytest.mark.parametrize("end", ["sys.exit(3)", "os.kill(os.getpid(), 6)"])
def test_how_a_process_ended_is_known_though_its_parent_was_there_first(spawn, end):
    child = spawn(f"import os, sys; print('ready', flush=True); sys.stdin.readline(); {end}")
    supervisor = Supervisor(lambda: None)
    supervisor.watch(0, child.pid, start_ticks(child.pid) or 0)
    child.stdin.close()
    status = child.wait()  # reaped before anybody looks
    facts: list[ProcessFact] = []
    supervisor.start()
    try:
        eventually(lambda: facts.extend(supervisor.poll()) or facts, "the look")
    finally:
        supervisor.stop()
    told = (facts[0].exit_code, facts[0].signal)
    if told == (None, None) and KERNEL < (6, 15):
        pytest.skip("a kernel before 6.15 forgets how a process ended once it is reaped")
    assert told == ((status, None) if status >= 0 else (None, -status))


def test_the_death_that_woke_it_is_told_as_earlier_than_those_it_finds_then(spawn, monkeypatch):
    children = [spawn(SLEEP) for _ in range(3)]
    supervisor = Supervisor(lambda: None)
    for rank, child in enumerate(children):
        supervisor.watch(rank, child.pid, start_ticks(child.pid) or 0)
    read = processes.read

    def dead(child) -> bool:
        found = read(child.pid)
        return found is not None and not found.alive

    def read_after_the_others_died(pid: int):
        for child in children[:2]:
            if not dead(child):
                child.kill()
                eventually(lambda child=child: dead(child), "its death")
        return read(pid)

    children[2].kill()
    eventually(lambda: dead(children[2]), "its death")
    monkeypatch.setattr(processes, "read", read_after_the_others_died)
    facts: list[ProcessFact] = []
    supervisor.start()
    try:
        eventually(lambda: facts.extend(supervisor.poll()) or len(facts) == 3, "all three")
    finally:
        supervisor.stop()
    times = {fact.rank: fact.time for fact in facts if not fact.alive}
    assert sorted(times) == [0, 1, 2]
    assert times[2] < min(times[0], times[1])
