"""Processes are named by pid and start time, found by descent and by mark, and signalled without a miss."""

import errno
import os
import signal

import pytest
from ftmon.protocol.host.process import start_ticks
from ftmon.trainer.host import processes

SLEEP = "import time; print('ready', flush=True); time.sleep(600)"
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); import sys; sys.stdin.read()"],
                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # ends with its parent
child.stdout.readline()
print('ready', flush=True)
time.sleep(600)
"""


def test_a_process_is_read_with_parent_group_and_start_and_an_earlier_one_s_signal_is_not_sent(spawn):
    child = spawn(SLEEP)
    found = processes.read(child.pid)
    assert (found.parent, found.group, found.session) == (os.getpid(), child.pid, child.pid)
    assert found.alive
    assert found.start_ticks > 0
    assert processes.read(2**22 + 1) is None
    found = processes.read(child.pid)
    assert processes.send_signal(found._replace(start_ticks=found.start_ticks - 1), signal.SIGKILL) is False
    assert child.poll() is None
    assert processes.send_signal(found, signal.SIGKILL) is True
    assert child.wait(200) == -signal.SIGKILL
    assert processes.send_signal(found, signal.SIGKILL) is False


@pytest.mark.parametrize("name", [rb"a) R (b", rb"a\xff\n", rb"\xff) R 1 ("])
def test_a_process_name_that_is_no_text_or_looks_like_other_fields_can_be_read(spawn, name: bytes):
    child = spawn(f"import ctypes; ctypes.CDLL(None).prctl(15, b'{name.decode()}', 0, 0, 0); " + SLEEP)
    found = processes.read(child.pid)
    assert found.alive
    assert (found.name == "a) R (b") is (name == b"a) R (b")
    assert (found.parent, found.start_ticks) == (os.getpid(), start_ticks(child.pid))
    assert processes.status(child.pid)["Pid"] == processes.status(child.pid, child.pid)["Pid"] == str(child.pid)
    assert processes.tracer(child.pid) == ""


def test_descendants_are_found_though_they_left_the_session(spawn):
    parent = spawn(PARENT)
    table = processes.table()
    assert os.getpid() in table
    below = processes.descendants([parent.pid], table)
    assert len(below) == 1
    assert below[0].session != parent.pid


def test_marked_processes_are_found_by_the_run_in_their_environment(spawn, run):
    child = spawn(SLEEP, FTMON_RUN=str(run.path), FTMON_RANK_PID="77")
    stranger = spawn(SLEEP, FTMON_RUN=str(run.path) + "-other")
    table = processes.table()
    assert {p.pid for p in processes.marked(run.path, table.values())} == {child.pid}
    assert {p.pid for p in processes.marked(run.path, table.values(), [76, 77])} == {child.pid}
    assert processes.marked(run.path, table.values(), [78]) == []
    assert stranger.poll() is None


def test_of_run_includes_what_descends_from_a_marked_process_and_leaves_out_the_spared(spawn, run):
    parent = spawn(PARENT, FTMON_RUN=str(run.path))
    child = processes.descendants([parent.pid], processes.table())[0]
    assert {p.pid for p in processes.of_run(run.path, [], [])} == {parent.pid, child.pid}
    assert {p.pid for p in processes.of_run(run.path, [], [parent.pid])} == {child.pid}


def test_without_pidfds_a_process_that_ends_before_the_signal_counts_as_gone(spawn, monkeypatch):
    def unsupported(_pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    child = spawn(SLEEP)
    found = processes.read(child.pid)
    monkeypatch.setattr(os, "pidfd_open", unsupported)
    assert processes.send_signal(found, signal.SIGKILL) is True
    child.wait(200)
    monkeypatch.setattr(processes, "same", lambda process: process)  # it ends right after the check
    assert processes.send_signal(found, signal.SIGKILL) is False


def test_a_zombie_tells_how_it_ended():
    for end, expected in (("os._exit(7)", (7, None)), ("os.kill(os.getpid(), 9)", (None, 9))):
        pid = os.fork()
        if pid == 0:
            exec(end)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        found = processes.read(pid)
        assert not found.alive
        assert processes.exit_of(found.wait_status) == expected
        os.waitpid(pid, 0)
