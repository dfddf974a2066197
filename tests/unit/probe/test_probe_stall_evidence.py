"""What a rank gives as evidence of a stall: its collectives, and its stacks although native code holds the lock."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.trainer.hub import looking
from ftmon.trainer.probe import flight
from ftmon.trainer.probe.tracker import Counts

RECORDED = """
{"entries": [
 {"collective_seq_id": 1, "input_sizes": [[4, 5]], "is_p2p": false, "process_group": ["0", "default_pg"],
  "profiling_name": "nccl:_all_gather_base", "retired": false, "state": "completed"},
 {"collective_seq_id": 2, "input_sizes": [[3]], "is_p2p": false, "process_group": ["0", "default_pg"],
  "profiling_name": "gloo:all_reduce", "retired": true, "state": "scheduled"},
 {"collective_seq_id": 3, "input_sizes": [], "is_p2p": false, "process_group": ["7", "x"],
  "profiling_name": "gloo:barrier", "retired": false, "state": "scheduled"},
 {"collective_seq_id": 3, "input_sizes": [[1]], "is_p2p": false, "process_group": ["7", "x"],
  "profiling_name": "gloo:barrier", "retired": false, "state": "scheduled"},
 {"collective_seq_id": 0, "p2p_seq_id": 1, "is_p2p": true, "process_group": ["0", ""], "profiling_name": "nccl:send"}
]}
"""


def test_the_flight_recorders_collectives_are_read_with_group_number_size_and_whether_they_are_done():
    assert flight.parse(RECORDED) == [
        ["0", 1, "all_gather_base", 20, True],
        ["0", 2, "all_reduce", 3, True],
        ["7", 3, "barrier", 0, False],
    ]


def test_the_newest_collectives_of_each_group_are_told():
    entry = '{"collective_seq_id": %d, "input_sizes": [[1]], "process_group": ["%s"], "profiling_name": "gloo:x"}'
    entries = [entry % (number, group) for number in range(1, 200) for group in ("a", "b")]
    found = flight.parse('{"entries": [' + ",".join(entries) + "]}")
    assert len(found) == 2 * flight.KEPT
    assert found[0][1] == 200 - flight.KEPT
    assert found[-1][:2] == ["b", 199]


def test_without_a_recorder_the_counted_calls_serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flight, "_DUMPS", ())
    counts = Counts()
    counts.recent.append(("0", 5, "all_reduce", 12))
    found = flight.calls(counts)
    assert (found["source"], found["recent"]) == ("calls", [["0", 5, "all_reduce", 12, None]])


def test_a_recorder_that_does_not_answer_costs_an_answer_little_and_holds_one_thread(monkeypatch: pytest.MonkeyPatch):
    asked, answers = [], threading.Event()

    def dump():
        asked.append(threading.current_thread())
        answers.wait(30)
        return RECORDED

    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
    counts = Counts()
    counts.recent.append(("0", 5, "all_reduce", 12))
    began = time.monotonic()
    assert flight.calls(counts)["source"] == "calls"
    assert time.monotonic() - began >= flight.READ_SECONDS
    assert flight.READ_SECONDS < looking.AGAIN_SECONDS
    assert flight.calls(counts)["source"] == "calls"
    assert len(asked) == 1, "another one was sent after the one that waits"
    answers.set()
    asked[0].join(10)
    assert flight.calls(counts)["source"] == "recorder"


DUMPED = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from ftmon.trainer.probe.selfdump import Dumper
dumper = Dumper(Path(sys.argv[1]), threading.main_thread().ident)
told, go = [], threading.Event()
def publish():
    told.append(dumper.install(threading.main_thread().ident))
    go.set()
    while True:
        time.sleep(0.02)
        if dumper.lost(threading.main_thread().ident):
            told.append(dumper.install(threading.main_thread().ident))
threading.Thread(target=publish, daemon=True).start()
go.wait(10)
def stuck():
    ctypes.PyDLL(None).usleep(30_000_000)
first = told[0]
if sys.argv[2] == "takes":
    hits = []
    signal.signal(first.signal, lambda *_: hits.append(1))
    while len(told) < 2: time.sleep(0.01)
    os.kill(os.getpid(), first.signal)
    assert hits == [1], hits
    first = told[1]
print(first.signal, first.receiver, first.descriptor, first.thread, first.training, flush=True)
stuck()
"""


@pytest.mark.parametrize("script", ["leaves the signal alone", "takes"])
def test_a_signal_to_one_thread_has_the_stacks_written_while_native_code_holds_the_lock(tmp_path: Path, script: str):
    path = tmp_path / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DUMPED), str(path), script], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        number, receiver, descriptor = map(int, words[:3])
        assert os.readlink(f"/proc/{process.pid}/fd/{descriptor}") == str(path)
        assert int(words[4]) == process.pid
        time.sleep(0.2)  # into the native call
        libc: Any = ctypes.CDLL(None)
        assert libc.tgkill(process.pid, receiver, number) == 0
        deadline = time.monotonic() + 10
        while "in stuck" not in (text := path.read_text() if path.exists() else ""):
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
        assert words[3] in text
        assert process.poll() is None, "it lives on, and its native call was not interrupted"
    finally:
        process.kill()
        process.wait()
