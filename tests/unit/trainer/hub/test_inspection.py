"""What is kept of a rank's answers from one look to the next."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.evidence import ASLEEP_S, Activity
from ftmon.protocol.analysis.stalls.judge import Verdict, by_rank
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host.inspection.inspect import Inspection
from stall_bench import STACKS, Bench

RECORDED = {"source": "recorder", "recent": [["0", 9, "all_reduce", 64, False]], "counted": {"0": 9}, "ranks": {}}
COUNTED = {"source": "calls", "recent": [["0", 9, "all_reduce", 64, None]], "counted": {"0": 9}, "ranks": {}}


@pytest.fixture
def bench(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(run, monkeypatch)


def test_what_the_flight_recorder_said_stays_while_the_rank_stands_and_says_less(bench):
    assert [bench.look(calls) for calls in (RECORDED, COUNTED, {})] == ["recorder"] * 3
    bench.rank.progress.moved(time.time() + 1.0)
    assert bench.look(COUNTED) == "calls"


WAITS_FOR_WORKER = """Current thread 0x00007f (most recent call first):
  File "/site-packages/torch/utils/data/dataloader.py", line 1291 in _try_get_data
  File "train.py", line 7 in main
"""


def asleep(at: float, **more: Any) -> Activity:
    return Activity(at, "S", "futex_do_wait", 1.0, 0, False, 10)._replace(**more)


def test_stacks_written_on_a_signal_stand_while_the_training_thread_has_not_run(bench):
    inspected(bench, ({0: STACKS}, asleep(1.0)))
    for at in (2.0, 5.0):
        inspected(bench, ({}, asleep(at)))
        assert bench.rank.evidence.place.text == "train.py:7 in main"
    assert (bench.rank.evidence.by, bench.rank.evidence.is_asleep) == ("signal", True)
    for at in (6.0, 7.0):
        inspected(bench, ({}, asleep(at, switches=11)))
        assert bench.rank.evidence.place.text == ""


def test_an_answer_that_comes_late_leaves_a_rank_asleep_that_has_not_run(bench):
    bench.patch("_text_of", lambda answer: (STACKS, "", "probe") if answer else ("", "", ""))
    seen: list[tuple[str, float, bool]] = []
    for calls, each in (({}, asleep(1.0)), ({}, asleep(5.0)), (None, asleep(6.0)), ({}, asleep(7.0))):
        bench.inspected = Inspection({}, {}, {0: each})
        bench.look(calls)
        found = bench.rank.evidence
        seen.append((found.by, found.asleep, found.is_asleep))
    assert seen[1:] == [("probe", 4.0, True), ("probe", 5.0, True), ("probe", 6.0, True)]


def inspected(bench: Bench, *looks: tuple[dict[int, str], Activity]) -> None:
    for stacks, activity in looks:
        bench.inspected = Inspection(stacks, {}, {0: activity})
        bench.look(None)


def judged(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftmon.trainer.host.inspection.inspect.py_spy", lambda: "")
    views = by_rank([RankView(0, step=3, phase="forward", age=5.0, limit=4.0)])
    bench.tracker.verdict = Verdict(kind="alone", waiting=(), hung=(0,), sure=True, age=5.0, views=views)


def test_stacks_that_a_named_rank_writes_after_the_verdict_are_saved_and_none_from_before_it_ran(bench, monkeypatch):
    later = STACKS.replace("line 7", "line 99")
    inspected(bench, ({0: STACKS}, asleep(1.0)), ({}, asleep(2.0, switches=50)))
    judged(bench, monkeypatch)
    inspected(bench, *((stacks, asleep(3.0, switches=50)) for stacks in ({}, {0: later})))
    bench.stall_probe.tick()
    assert [(one.rank, one.taken_by, one.text) for one in bench.emitted] == [(0, "signal", later)]


def observe(bench: Bench, *activities: Activity, stacks: str = "", calls: Any = None) -> Any:
    if stacks:
        bench.patch("_text_of", lambda _: (stacks, "", "probe"))
    for each in activities:
        bench.patch("_activity_of", lambda _, found=each: found)
        bench.look(calls or {})
    return bench.rank.evidence


def test_sleep_and_rest_are_measured_from_one_observation_to_the_next(bench):
    found = observe(bench, asleep(1.0), asleep(2.0), asleep(6.0))
    assert (found.asleep, found.quiet, found.work, found.is_asleep) == (5.0, 5.0, "", True)


def test_what_wakes_up_again_is_restless_and_so_is_a_retry_before_a_whole_sleep_was_observed(bench):
    bench.patch("WORK_KEPT_SECONDS", 1e9)
    found = observe(bench, asleep(1.0), asleep(5.0), asleep(6.0, switches=11), asleep(10.0, switches=11))
    assert (found.restless, found.is_asleep, found.work, found.quiet) == (True, False, "works", 4.0)
    switches = {1.5: 10, 2.25: 10, 3.0: 11, 3.75: 11, 4.5: 11, 6.0: 12, 9.0: 13, 11.8: 13}
    found = observe(bench, *(asleep(at, switches=count) for at, count in switches.items()))
    assert (found.asleep >= ASLEEP_S, found.is_asleep) == (True, False)


@pytest.mark.parametrize(
    ("wchan", "naps", "place", "timed"),
    [
        ("hrtimer_nanosleep", 0, STACKS, True),
        ("futex_do_wait", 0, STACKS, False),
        ("futex_do_wait", 7, STACKS, False),
        ("poll_schedule_timeout", 7, WAITS_FOR_WORKER, True),
        ("poll_schedule_timeout", 0, WAITS_FOR_WORKER, False),
    ],
)
def test_a_sleep_for_a_set_time_is_seen_in_the_rank_and_in_the_worker_it_waits_for(bench, wchan, naps, place, timed):
    assert observe(bench, asleep(1.0, wchan=wchan, worker_naps=naps), stacks=place).timed is timed


def test_a_rank_that_sleeps_much_longer_than_before_it_woke_is_no_longer_restless(bench):
    bench.patch("WORK_KEPT_SECONDS", -1.0)
    woken = [asleep(1.0), asleep(4.0), asleep(5.0, switches=11)]  # after at most 4 s
    found = observe(bench, *woken, asleep(21.0, switches=11))
    assert (found.asleep, found.is_asleep) == (16.0, False)
    found = observe(bench, *woken, asleep(21.5, switches=11))
    assert (found.asleep, found.is_asleep) == (16.5, True)
    # Waits that double never reach it.
    doubling = [asleep(at * 2.0**wait, switches=wait) for wait in range(1, 9) for at in (1.0, 1.25)]
    found = observe(bench, *doubling, asleep(511.0, switches=8))
    assert (found.asleep, found.is_asleep) == (255.0, False)


BACKWARD = """Current thread 0x00007f (most recent call first):
  File "/site-packages/torch/autograd/__init__.py", line 10 in backward
  File "train.py", line 7 in main
"""


COLLECTIVE = """Current thread 0x00007f (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 5030 in barrier
  File "train.py", line 7 in main
"""


@pytest.mark.parametrize(("stacks", "work"), [(BACKWARD, "device"), (STACKS, ""), (COLLECTIVE, "")])
def test_a_device_that_computes_is_work_only_of_a_rank_that_waits_for_it_outside_of_a_collective(bench, stacks, work):
    bench.patch("DEVICE_FRESH_SECONDS", 1e9)
    sample: Any = SimpleNamespace(kind="gpu", utilization_percent=80.0, processes=[SimpleNamespace(rank=0)])
    bench.stall_probe.sample(sample)
    found = observe(bench, asleep(1.0), asleep(5.0), stacks=stacks)
    assert (found.work, found.quiet) == (work, 0.0 if work else 4.0)


SPINS = """Current thread 0x00007f (most recent call first):
  File "/site-packages/deepspeed/runtime/zero/stage_1_and_2.py", line 3248 in has_overflow
  File "train.py", line 7 in main
"""


@pytest.mark.parametrize(
    ("calls", "others", "found"),
    [
        (RECORDED, 0.0, ("", 4.0)),
        (RECORDED, 4.0, ("computes", 0.0)),
        ({**RECORDED, "recent": [["0", 9, "all_reduce", 64, True]]}, 0.0, ("computes", 0.0)),
    ],
    ids=["its collective is not finished", "other threads compute", "every collective is finished"],
)
def test_a_thread_that_spins_with_an_unfinished_collective_stands(bench, calls, others, found):
    spent = [Activity(at, "R", "", at + others * at, 0, False, 10, training_seconds=at) for at in (1.0, 5.0)]
    evidence = observe(bench, *spent, stacks=SPINS, calls=calls)
    assert (evidence.work, evidence.stands) == found
