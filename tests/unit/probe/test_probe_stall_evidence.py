"""What a rank gives as evidence of a stall: its collectives, and its stacks although native code holds the lock."""

import sys
import threading
import time
from types import SimpleNamespace

import pytest
from eventually import eventually
from ftmon.trainer.hub import inspection
from ftmon.trainer.probe.link import stacks
from ftmon.trainer.probe.phases.tracker import Counts

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
    assert stacks.parse(RECORDED) == [
        ["0", 1, "all_gather_base", 20, True],
        ["0", 2, "all_reduce", 3, True],
        ["7", 3, "barrier", 0, False],
    ]


def test_the_newest_collectives_of_each_group_are_told():
    entry = '{"collective_seq_id": %d, "input_sizes": [[1]], "process_group": ["%s"], "profiling_name": "gloo:x"}'
    entries = [entry % (number, group) for number in range(1, 200) for group in ("a", "b")]
    found = stacks.parse('{"entries": [' + ",".join(entries) + "]}")
    assert len(found) == 2 * stacks.KEPT
    assert found[0][1] == 200 - stacks.KEPT
    assert found[-1][:2] == ["b", 199]


def test_without_a_recorder_the_counted_calls_serve(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stacks, "_DUMPS", ())
    counts = Counts()
    counts.recent.append(("0", 5, "all_reduce", 12))
    found = stacks.calls(counts)
    assert (found["source"], found["recent"]) == ("calls", [["0", 5, "all_reduce", 12, None]])


def test_a_recorder_that_does_not_answer_costs_an_answer_little_and_holds_one_thread(monkeypatch: pytest.MonkeyPatch):
    asked, answers = [], threading.Event()

    def dump():
        asked.append(threading.current_thread())
        answers.wait(200)
        return RECORDED

    if stacks._reader is not None:
        stacks._reader.join()  # an earlier test's: while it runs, no other is sent
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace_json=dump))
    counts = Counts()
    counts.recent.append(("0", 5, "all_reduce", 12))
    began = time.monotonic()
    assert stacks.calls(counts)["source"] == "calls"
    assert time.monotonic() - began >= stacks.READ_SECONDS
    assert stacks.READ_SECONDS < inspection.AGAIN_SECONDS
    eventually(lambda: asked, "the question to the recorder")
    assert stacks.calls(counts)["source"] == "calls"
    assert len(asked) == 1, "another one was sent after the one that waits"
    answers.set()
    asked[0].join(200)
    monkeypatch.setattr(stacks, "READ_SECONDS", 200.0)
    assert stacks.calls(counts)["source"] == "recorder"
