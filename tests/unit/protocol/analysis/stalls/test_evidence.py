"""Stacks as faulthandler writes them, in a few words, a rank's answers, and how long its phases may last."""

import faulthandler
import tempfile
import threading
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls import evidence
from ftmon.protocol.analysis.stalls.progress import ROWS, RankProgress
from hypothesis import given
from hypothesis import strategies as st

TRAIN = "/home/me/train.py"
SITE = "/env/lib/python3.11/site-packages"
SHUTDOWN = evidence.Frame("/usr/lib/python3.11/threading.py", 1583, "_shutdown")
BUILD_WAIT = "a wait for another process to build a PyTorch extension, or for the lock file that one left behind"

COLLECTIVE = f"""\
Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/threading.py", line 1009 in _bootstrap

Thread 0x00007f0000000002 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 3800 in all_gather_into_tensor
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "{SITE}/ftmon/trainer/probe/hooks/collectives.py", line 84 in call
  File "{SITE}/deepspeed/comm/torch.py", line 120 in all_gather_into_tensor
  File "{SITE}/deepspeed/comm/comm.py", line 117 in log_wrapper
  File "{SITE}/deepspeed/runtime/zero/stage3.py", line 582 in gather
  File "{TRAIN}", line 40 in main
  File "{TRAIN}", line 60 in <module>
"""

DATA = f"""\
Thread 0x00007f0000000009 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 415 in select
  File "{SITE}/torch/utils/data/dataloader.py", line 1270 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 700 in __next__
  File "{SITE}/ftmon/trainer/probe/hooks/torch.py", line 88 in __next__
  File "{TRAIN}", line 38 in main
  File "{TRAIN}", line 60 in <module>
"""


LOADER = f"{SITE}/torch/utils/data/dataloader.py"

IN_THIS_PROCESS = [
    evidence.Frame(TRAIN, 12, "__getitem__"),
    evidence.Frame(f"{SITE}/torch/utils/data/_utils/fetch.py", 52, "fetch"),
    evidence.Frame(LOADER, 789, "_next_data"),
    evidence.Frame(LOADER, 733, "__next__"),
    evidence.Frame(TRAIN, 38, "main"),
]
BUILD_LOCK = [
    evidence.Frame(f"{SITE}/torch/utils/file_baton.py", 54, "wait"),
    evidence.Frame(f"{SITE}/torch/utils/cpp_extension.py", 2012, "_jit_compile"),
    evidence.Frame(f"{SITE}/deepspeed/ops/op_builder/builder.py", 560, "jit_load"),
    evidence.Frame(TRAIN, 12, "main"),
]
OF_LIBRARY = [evidence.Frame(f"{SITE}/requests/api.py", 59, "request"), evidence.Frame(TRAIN, 12, "load")]


@pytest.mark.parametrize(
    ("frames", "doing", "text"),
    [
        (evidence.parse(COLLECTIVE)[-1].frames, "collective", "all_gather_into_tensor in stage3.py:582 in gather"),
        (evidence.parse(DATA)[0].frames, "data", "next() of the dataloader in train.py:38 in main"),
        (IN_THIS_PROCESS, "data", "next() of the dataloader (train.py:12 in __getitem__) in train.py:38 in main"),
        ([evidence.Frame(TRAIN, 12, "load"), evidence.Frame(TRAIN, 60, "<module>")], "code", "train.py:12 in load"),
        (OF_LIBRARY, "code", "request (api.py:59) in train.py:12 in load"),
        ([], "", ""),
        ([SHUTDOWN], "exiting", "the end of the script: waits for a thread or a child"),
        (BUILD_LOCK, "waiting", f"{BUILD_WAIT} in train.py:12 in main"),
    ],
)
def test_a_stack_in_words(frames: Any, doing: str, text: str):
    place = evidence.where(frames)
    assert (place.doing, place.text) == (doing, text)


def test_the_training_thread_is_the_named_one_or_the_last_and_only_a_wait_for_a_worker_wakes_by_itself():
    threads = evidence.parse(COLLECTIVE)
    assert evidence.training_thread(threads, "0x7f0000000001").frames[0].function == "wait"
    assert evidence.training_thread(threads, "0x7") == threads[-1]
    assert evidence.training_thread([]) is None
    assert not evidence.waits_for_loader_worker(IN_THIS_PROCESS), "a retry every few seconds is the script's own"
    assert evidence.waits_for_loader_worker(evidence.parse(DATA)[0].frames)


def test_ranks_with_the_same_stack_are_one_group_and_an_answer_without_sense_is_no_evidence():
    groups = evidence.group({3: (DATA, ""), **dict.fromkeys((0, 1, 2, 4), (COLLECTIVE, "")), 5: ("", "")})
    assert [one.ranks for one in groups] == [[0, 1, 2, 4], [3], [5]]
    assert (groups[1].place.words, groups[2].frames) == ("next() of the dataloader", ())
    assert evidence.read_calls({"recent": 5}) == evidence.Calls()
    assert evidence.read_calls(None) == evidence.Calls()
    good = evidence.read_calls({"source": "calls", "recent": [["0", 3, "barrier", 0, None]], "ranks": {"0": [0, 1]}})
    assert (good.last("0"), good.members) == (3, {"0": (0, 1)})


def test_what_faulthandler_writes_here_is_read():
    ready, go = threading.Event(), threading.Event()

    def sleeper() -> None:
        ready.set()
        go.wait(200)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert ready.wait(200)
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        go.set()
        thread.join()
        file.seek(0)
        threads: list[Any] = evidence.parse(file.read().decode())
    names = {int(one.name, 16): one for one in threads}
    assert any(frame.function == "sleeper" for frame in names[thread.ident or 0].frames)
    main = evidence.training_thread(threads, hex(threading.get_ident()))
    assert main.frames[0].function == "test_what_faulthandler_writes_here_is_read"


FLOOR_S = {row.phase: row.computing_s for row in ROWS}
EARLY = next(row for row in ROWS if row.phase == "early")


def learned(make_sim: Any, seconds: list[float], phase: str = "forward") -> RankProgress:
    sim = make_sim()
    progress = RankProgress(sim.now)
    for number, duration in enumerate(seconds, 1):
        progress.step_done(sim.now, sim.step(0, number, [sim.phase(phase, ms=duration * 1000)]))
    progress.beat(sim.now, sim.beat(0, len(seconds) + 1, phase))
    return progress


@pytest.mark.parametrize(
    ("seconds", "phase", "least", "most"),
    [
        ([], "forward", 300.0, 300.0),
        *(([0.05] * 20, name, FLOOR_S[name], FLOOR_S[name]) for name in ("data", "forward", "backward", "optimizer")),
        ([300.0] + [6.0] * 20, "forward", 27.0, 33.0),
        ([120.0] + [0.05] * 10, "forward", FLOOR_S["forward"], FLOOR_S["forward"]),
        ([0.1] + [4.0] * 10 + [900.0], "forward", 0.0, 5 * 8.0),
        ([0.1] + [1.0] * 10 + [20.0] * 6, "forward", 5 * 20.0, 500.0),
    ],
    ids=["before the first step", *("short phases have their floor",) * 4, "five times the usual longest",
         "the first step teaches nothing", "one long step at most doubles it", "what becomes usual is learned"],
)  # fmt: skip
def test_the_limit_of_a_phase(make_sim: Any, seconds: list[float], phase: str, least: float, most: float):
    assert least <= learned(make_sim, seconds, phase).limit() <= most


def test_a_phase_may_take_twice_as_long_as_in_the_first_step_until_a_later_one_has_it(make_sim: Any):
    minutes = learned(make_sim, [100.0], "optimizer")
    assert minutes.limit() == minutes.working_limit() == 200.0
    assert minutes.asleep_limit() == learned(make_sim, [0.1], "optimizer").asleep_limit(), "a rank that waits"
    assert learned(make_sim, [1.0], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 0.1], "optimizer").limit() == EARLY.computing_s
    assert learned(make_sim, [100.0, 100.0], "optimizer").limit() == 500.0


def test_a_long_evaluation_seen_in_heartbeats_is_learned_and_steps_in_between_teach_nothing_of_it(make_sim):
    sim = make_sim()
    progress = learned(make_sim, [0.1] * 5)
    for start in range(3):
        at = sim.now + start * 1000
        progress.beat(at, sim.beat(0, 6, "eval", moved=True, phase_started=at))
        progress.beat(at + 400, sim.beat(0, 6, "forward", moved=True, phase_started=at + 400))
    progress.beat(sim.now, sim.beat(0, 6, "eval", moved=True))
    assert progress.limit() == pytest.approx(2000, rel=0.1)
    sim = make_sim()
    progress = learned(make_sim, [0.1] * 5)
    for number in range(3):
        at = sim.now + number * 1000
        progress.beat(at, sim.beat(0, 6, "idle", moved=True, phase_started=at))
        progress.step_done(at + 300, sim.step(0, 6, [sim.phase("forward", ms=100)]))
        progress.beat(at + 400, sim.beat(0, 7, "forward", moved=True, phase_started=at + 400))
        progress.step_done(at + 401, sim.step(0, 7, [sim.phase("forward", ms=100)]))
    progress.beat(sim.now, sim.beat(0, 8, "idle", moved=True))
    assert progress.limit() == FLOOR_S["idle"]


@given(st.lists(st.floats(0.001, 100.0), min_size=4, max_size=80))
def test_a_duration_that_was_usual_all_along_is_never_past_the_limit(make_sim: Any, seconds: list[float]):
    steady = [max(seconds)] * 8
    assert learned(make_sim, [1.0, *seconds, *steady]).limit() > max(seconds)
