"""What a rank gives as evidence of a stall: its collectives, the loops of its script, waits that end by themselves."""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from eventually import eventually
from ftmon.trainer.hub import inspection
from ftmon.trainer.probe.link import stacks
from ftmon.trainer.probe.link.stacks import seconds_until_awake, waits_for_a_time
from ftmon.trainer.probe.phases.tracker import Counts


def entry(number: int, name: str, sizes: list[list[int]], group: str = "0", **more: Any) -> dict[str, Any]:
    call = {"collective_seq_id": number, "profiling_name": name, "input_sizes": sizes, "process_group": [group, "x"]}
    return {**call, "is_p2p": False, "retired": False, "state": "scheduled", **more}


RECORDED = json.dumps(
    {
        "entries": [
            entry(1, "nccl:_all_gather_base", [[4, 5]], state="completed"),
            entry(2, "gloo:all_reduce", [[3]], retired=True),
            entry(3, "gloo:barrier", [], "7"),
            entry(3, "gloo:barrier", [[1]], "7"),
            {"collective_seq_id": 0, "p2p_seq_id": 1, "is_p2p": True, "profiling_name": "nccl:send"},
        ]
    }
)


def test_collectives_of_the_flight_recorder_are_read_whole_and_the_newest_of_each_group_are_told():
    expected = [["0", 1, "all_gather_base", 20, True], ["0", 2, "all_reduce", 3, True], ["7", 3, "barrier", 0, False]]
    assert stacks.parse(RECORDED) == expected
    entries = [entry(number, "gloo:x", [[1]], group) for number in range(1, 200) for group in ("a", "b")]
    found = stacks.parse(json.dumps({"entries": entries}))
    assert (len(found), found[0][1]) == (2 * stacks.KEPT, 200 - stacks.KEPT)
    assert found[-1][:2] == ["b", 199]


def test_a_recorder_that_is_missing_or_does_not_answer_is_replaced_by_counted_calls_and_holds_one_thread(monkeypatch):
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
    with monkeypatch.context() as without_recorder:
        without_recorder.setattr(stacks, "_DUMPS", ())
        found = stacks.calls(counts)
    assert (found["source"], found["recent"]) == ("calls", [["0", 5, "all_reduce", 12, None]])
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


SCRIPT = """
def main(inside, behind):
    for epoch in range(1):
        for batch in range(1):
            inside()
    behind()
"""


def run_code(path: Path, code: str = "look()") -> list[dict[str, list[tuple[int, int]]]]:
    """Run code as that of a file; return the loops found on the stack at each ``look()``."""
    found: list[dict[str, list[tuple[int, int]]]] = []
    look = {"look": lambda: found.append(stacks.around(threading.get_ident()))}
    exec(compile(code, str(path), "exec"), look)
    return found


def test_a_line_has_the_loops_around_it_and_a_file_that_is_gone_or_does_not_answer_is_left_out(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    inside, behind = run_code(path, SCRIPT + "main(look, look)")
    assert inside[f"{tmp_path}/train.py:5"] == [(4, 5), (3, 5)]
    assert behind[f"{tmp_path}/train.py:6"] == []
    assert f"{tmp_path}/gone.py:1" not in run_code(tmp_path / "gone.py")[0]
    os.mkfifo(tmp_path / "slow.py")
    assert f"{tmp_path}/slow.py:1" not in run_code(tmp_path / "slow.py")[0]
    (tmp_path / "slow.py").open("w").close()  # its reader ends


EVENT = threading.Event()
EMPTY: "queue.Queue[int]" = queue.Queue()


@pytest.mark.parametrize(
    ("wait", "timed"),
    [
        (lambda: EVENT.wait(60), True), (lambda: EVENT.wait(timeout=60.0), True),
        (lambda: EMPTY.get(timeout=60), True), (lambda: EVENT.wait(), False), (lambda: EMPTY.get(), False),
    ],
    ids=["event", "seconds by name", "queue", "event without a limit", "queue without a limit"],
)  # fmt: skip
def test_a_wait_with_a_limit_is_told_from_one_without(wait, timed):
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
    threading.Thread(target=lambda: (found.append(threading.get_native_id()), sleep()), daemon=True).start()
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
def test_the_end_of_a_sleep_is_read_from_the_kernel(sleep, known):
    thread = thread_asleep(sleep)
    if not known:
        assert seconds_until_awake(os.getpid(), thread) is None
        return
    eventually(lambda: seconds_until_awake(os.getpid(), thread) is not None, "the sleep")
    left = seconds_until_awake(os.getpid(), thread)
    assert left is not None
    assert 400.0 < left < 500.5


def test_a_thread_that_runs_or_is_gone_does_not_sleep():
    assert seconds_until_awake(os.getpid(), threading.get_native_id()) is None
    assert seconds_until_awake(os.getpid(), 1 << 22) is None
