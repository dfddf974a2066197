"""Waits of the standard library with a time limit, as a data set's between two attempts."""

import importlib.util
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from eventually import eventually
from ftmon.trainer.hub import inspection
from ftmon.trainer.probe.link import stacks
from ftmon.trainer.probe.link.stacks import seconds_until_awake, waits_for_a_time
from ftmon.trainer.probe.phases.tracker import Counts

# What a rank gives as evidence of a stall: its collectives, and its stacks although native code holds the lock.


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


# Which loops of the script a thread is in.


SCRIPT = """
def main(inside, behind):
    for epoch in range(1):
        for batch in range(1):
            inside()
    behind()
"""


def script(folder: Path) -> ModuleType:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_has_the_loops_around_it_and_one_behind_them_has_none(tmp_path: Path) -> None:
    found: list[dict[str, list[tuple[int, int]]]] = []
    look = lambda: found.append(stacks.around(threading.get_ident()))  # noqa: E731
    script(tmp_path).main(look, look)
    inside, behind = found
    assert inside[f"{tmp_path}/train.py:5"] == [(4, 5), (3, 5)]
    assert behind[f"{tmp_path}/train.py:6"] == []


def run_code(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Run a line of a file that does not hold it; return what is found on the stack."""
    found: list[dict[str, list[tuple[int, int]]]] = []
    code = compile("look()", str(path), "exec")
    exec(code, {"look": lambda: found.append(stacks.around(threading.get_ident()))})
    return found[0]


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert f"{tmp_path}/gone.py:1" not in run_code(tmp_path / "gone.py")


def test_a_file_whose_disk_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.py")
    assert f"{tmp_path}/slow.py:1" not in run_code(tmp_path / "slow.py")
    (tmp_path / "slow.py").open("w").close()  # its reader ends


EVENT = threading.Event()
EMPTY: "queue.Queue[int]" = queue.Queue()


@pytest.mark.parametrize(
    ("wait", "timed"),
    [
        (lambda: EVENT.wait(60), True),
        (lambda: EVENT.wait(timeout=60.0), True),
        (lambda: EMPTY.get(timeout=60), True),
        (lambda: EVENT.wait(), False),
        (lambda: EMPTY.get(), False),
    ],
    ids=["event", "seconds by name", "queue", "event without a limit", "queue without a limit"],
)
def test_a_wait_with_a_limit_is_told_from_one_without(wait: Callable[[], object], timed: bool) -> None:
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    try:
        eventually(lambda: _waits(thread), "the wait")
        assert waits_for_a_time(thread.ident or 0) is timed
    finally:
        EVENT.set()
        EMPTY.put(1)
        thread.join()
        EVENT.clear()
        while not EMPTY.empty():
            EMPTY.get()
    assert not waits_for_a_time(threading.get_ident())


def _waits(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name == "wait"


def thread_asleep(sleep: Callable[[], object]) -> int:
    """Start a thread that sleeps; return its number in the kernel once it does."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: (found.append(threading.get_native_id()), sleep()), daemon=True)
    thread.start()
    eventually(lambda: bool(found) and state(found[0]) == "S", "the sleep")
    return found[0]


def state(thread: int) -> str:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the kernel does not show system calls")
@pytest.mark.parametrize(
    ("sleep", "known"),
    [
        (lambda: time.sleep(500.0), True),
        (lambda: threading.Event().wait(500.0), True),
        (lambda: threading.Event().wait(), False),
    ],
    ids=["sleep", "wait with a limit", "wait without one"],
)
def test_the_end_of_a_sleep_is_read_from_the_kernel(sleep: Callable[[], object], known: bool) -> None:
    thread = thread_asleep(sleep)
    if not known:
        assert seconds_until_awake(os.getpid(), thread) is None
        return
    eventually(lambda: seconds_until_awake(os.getpid(), thread) is not None, "the sleep")
    left = seconds_until_awake(os.getpid(), thread)
    assert left is not None
    assert 400.0 < left < 500.5


def test_a_thread_that_runs_or_is_gone_does_not_sleep() -> None:
    assert seconds_until_awake(os.getpid(), threading.get_native_id()) is None
    assert seconds_until_awake(os.getpid(), 1 << 22) is None
