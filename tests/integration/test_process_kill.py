"""A kill ends exactly the processes it means, with their workers, and says what it did."""

import os
import signal
import time

import pytest
from ftmon.protocol.host.process import start_ticks
from ftmon.trainer.host import processes
from ftmon.trainer.host.end import kill as killer
from ftmon.trainer.host.end.kill import Kill, KillScope, Outcome, Target, sweep
from ftmon.trainer.host.hardware.gpus import GpuUse, verdict

RANK = """
import os, signal, subprocess, sys
os.environ['FTMON_RANK_PID'] = str(os.getpid())
worker = subprocess.Popen([sys.executable, '-c', "print('up', flush=True); import sys; sys.stdin.read()"],
                          stdout=subprocess.PIPE, start_new_session=True)
worker.stdout.readline()
BEFORE
print('ready', flush=True)
BODY
sys.stdin.read()
"""
"""A rank and its worker: whoever is not killed lives until the test closes their standard input."""


def rank_code(before: str = "", body: str = "") -> str:
    return RANK.replace("BEFORE", before).replace("BODY", body)


def kill(run, targets, whole_run=False, number=None, others=()) -> Outcome:
    return Kill(KillScope(run.path, targets, [os.getpid()], whole_run, others=others), number, False).run()


def target(process, rank=0) -> Target:
    ticks = start_ticks(process.pid)
    assert ticks
    return Target(rank, process.pid, ticks)


def left_of(run) -> list[int]:
    return [p.pid for p in processes.marked(run.path, processes.table().values())]


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    monkeypatch.setattr(killer, "INT_SECONDS", 0.6)
    monkeypatch.setattr(killer, "TERM_SECONDS", 60.0)  # what TERM ends must not be killed because the host is slow
    monkeypatch.setattr(killer, "KILL_SECONDS", 60.0)
    monkeypatch.setattr(killer, "ONE_SIGNAL_SECONDS", 1.0)


NATIVE = "import ctypes; ctypes.PyDLL(None).sleep(100)"  # holds the GIL: no Python handler can run
DEAF = "signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("code", "ended_by"),
    [
        (rank_code(), "SIGTERM"),  # INT ends the rank, TERM its worker, which ignores nothing but hears no INT
        (rank_code(body=NATIVE), "SIGTERM"),
        (rank_code(before=DEAF), "SIGKILL"),
        (rank_code(before=DEAF, body=NATIVE), "SIGKILL"),
    ],
    ids=["ordinary", "stuck in native code", "ignores INT and TERM", "stuck and ignoring"],
)
def test_a_rank_and_its_worker_are_ended_whatever_it_does(run, spawn, monkeypatch, code, ended_by):
    if ended_by == "SIGKILL":
        monkeypatch.setattr(killer, "TERM_SECONDS", 0.6)
    rank = spawn(code, FTMON_RUN=str(run.path))
    assert len(left_of(run)) == 2
    outcome = kill(run, [target(rank)])
    assert outcome.ok, outcome.text
    assert (outcome.data["signal"], len(outcome.data["ended"])) == (ended_by, 2)
    assert left_of(run) == []


STARTS_ANOTHER = """
other = subprocess.Popen([sys.executable, '-c', OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
pid, worker = other.stdout.readline().split()[:2]
open(os.environ['WROTE'], 'w').write(pid + ' ' + worker)
"""
"""Rank 0 starts rank 1, as Lightning does, and so gives it its own mark."""
OTHER = """
import os, subprocess, sys, time
os.environ['FTMON_RANK_PID'] = str(os.getpid())
worker = subprocess.Popen(
    [sys.executable, '-c', "import time; print('up', flush=True); time.sleep(600)"], stdout=subprocess.PIPE
)
worker.stdout.readline()
print(os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_another_one_started_is_not_a_part_of_it_nor_the_other_way_round(run, spawn, tmp_path, number):
    wrote = tmp_path / "pids"
    code = rank_code(before=STARTS_ANOTHER).replace("OTHER", repr(OTHER), 1)
    first = spawn(code, FTMON_RUN=str(run.path), WROTE=str(wrote))
    pid, worker = map(int, wrote.read_text().split())
    ticks = start_ticks(pid)
    assert ticks
    ranks = [target(first), Target(1, pid, ticks)]
    theirs = [{p.pid for p in processes.marked(run.path, processes.table().values())} - {pid, worker}, {pid, worker}]
    assert [len(each) for each in theirs] == [2, 2]
    outcome = kill(run, [ranks[number]], number=signal.SIGKILL, others=[ranks[1 - number]])
    assert set(outcome.data["ended"]) == theirs[number]
    assert set(left_of(run)) == theirs[1 - number]
    assert kill(run, ranks, whole_run=True).ok


def test_a_stopped_rank_is_killed(run, spawn):
    rank = spawn(rank_code(), FTMON_RUN=str(run.path))
    os.kill(rank.pid, signal.SIGSTOP)
    outcome = kill(run, [target(rank)])
    assert outcome.ok, outcome.text
    assert outcome.data["signal"] != "SIGKILL"
    assert left_of(run) == []


def test_a_worker_whose_rank_is_long_gone_is_found_by_its_mark(run, spawn):
    rank = spawn(rank_code(), FTMON_RUN=str(run.path))
    gone = target(rank)
    rank.kill()
    rank.wait()
    assert len(left_of(run)) == 1
    outcome = kill(run, [gone])
    assert outcome.ok, outcome.text
    assert left_of(run) == []


def test_another_process_with_that_pid_is_never_touched(run, spawn):
    rank = spawn(rank_code())
    outcome = kill(run, [target(rank)._replace(start_ticks=1)])
    assert outcome.ok
    assert outcome.text == "no process of the run was left"
    assert rank.poll() is None


def test_a_process_found_after_all_time_has_passed_is_killed_all_the_same(spawn):
    rank = spawn(rank_code("signal.signal(signal.SIGTERM, signal.SIG_IGN)"))
    looks: list[float] = []

    def find() -> list[processes.Process]:
        looks.append(time.monotonic())
        if len(looks) == 1:
            time.sleep(0.5)
        if len(looks) == 3:
            rank.wait(200)  # the second look has killed it, whenever it dies
        process = processes.read(rank.pid)
        return [process] if process is not None and process.state != "Z" else []

    assert sweep(find, term_seconds=0.1, kill_seconds=0.2) == []
    assert rank.wait(200) == -signal.SIGKILL


def test_gpu_memory_is_called_free_only_where_the_processes_were_seen_holding_it():
    gib = 2**30
    seen = GpuUse({7: 3 * gib}, {0: 5 * gib, 1: gib}, frozenset({0}))
    free = GpuUse({}, {0: 2 * gib, 1: 9 * gib})
    expected = (False, "their GPU memory is free: the GPUs' memory in use went from 5.00 GiB to 2.00 GiB")
    assert verdict(seen, free) == expected
    assert verdict(seen, seen)[0] is True
    assert "does not list" in verdict(GpuUse({}, {0: 5 * gib}), free)[1]
    assert "cannot tell" in verdict(None, free)[1]
    assert "cannot tell" in verdict(seen, None)[1]
