"""Out of memory, failures, deaths, losses, and a run that ends before its first step."""

from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.deaths import detector
from ftmon.protocol.analysis.findings.finding import Condition, Finding, Resolution
from ftmon.protocol.analysis.hub_facts import NoStepFacts
from ftmon.protocol.analysis.oom.detector import OomDetector
from ftmon.protocol.messages.control import Command, ExporterState, HubStats, RankState
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.telemetry import Failure, Goodbye, LogLine, Oom
from ftmon.protocol.run.end import ending_in_words

LOST = "RuntimeError: Connection closed by peer"


def gone(rank: int, signal: int | None = None, code: int | None = None) -> RankState:
    return RankState(rank, "gone", 0.0, pid=100 + rank, signal=signal, exit_code=code)


def test_a_death_is_found_with_how_the_process_ended_and_what_followed_from_it():
    deaths = detector.DeathDetector(OomDetector())
    deaths.log(LogLine(1, 0.0, "err", "last words"))
    assert deaths.failure(10.0, Failure(0, 7, "backward", 10.0, LOST), set()) == [], "it waits for its cause"
    found, follows = deaths.process_gone(10.5, gone(1, signal=11), set())
    assert (found.condition, found.ranks, found.severity) == (Condition("died", 1), (1,), "error")
    assert found.facts == detector.ProcessDeath(101, None, 11, "", ["last words"])
    assert (follows.condition, follows.state) == (found.condition, "added")
    assert follows.facts == detector.Followed({0: detector.Follower(0.0, [LOST])})
    (later,) = deaths.process_gone(11.5, gone(0, code=1), set())
    assert later.facts == detector.Followed({0: detector.Follower(0.0, [LOST, detector.Ended(1, None)])})
    assert [one.facts for one in deaths.tick(10.6 + detector.HELD_S)] == [detector.LastLog(["last words"])]


def test_a_rank_ended_after_one_that_lost_its_peer_follows_from_it_unless_a_library_aborted_it():
    deaths = detector.DeathDetector(OomDetector())
    deaths.failure(10.0, Failure(1, 7, "backward", 10.0, LOST), set())
    assert deaths.process_gone(10.4, gone(1, code=1), set()) == []
    found, follows = deaths.process_gone(10.8, gone(0, signal=15), set())
    assert (found.condition, found.ranks, found.severity) == (Condition("failure", 1, "backward"), (1,), "error")
    assert list(follows.facts.followers) == [0]
    assert follows.facts.followers[0].events == [detector.Ended(None, 15)]
    assert deaths.tick(20.0) == []
    deaths = detector.DeathDetector(OomDetector())
    for line in (*GLOO, *["frame"] * 20):
        deaths.log(LogLine(0, 0.0, "err", line))
    deaths.failure(10.0, Failure(1, 7, "generate", 10.0, LOST), set())
    assert deaths.process_gone(10.4, gone(1, code=1), set()) == []
    found, follows = deaths.process_gone(10.8, gone(0, signal=6), set())
    assert (found.condition, found.facts.reason, found.facts.generating) == (Condition("died", 0), REASON, True)
    assert list(follows.facts.followers) == [1]


GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at /gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Mismatch?",
)
REASON = "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4. Mismatch?"


@pytest.mark.parametrize(("ended", "reason"), [({"code": -6}, REASON), ({"signal": 9}, "")])
def test_a_reason_that_is_read_after_an_abort_is_added_to_it_with_what_followed(ended, reason):
    deaths = detector.DeathDetector(OomDetector())
    (found,) = deaths.process_gone(10.0, gone(0, **ended), set())
    assert found.facts.reason == ""
    for line in GLOO:
        deaths.log(LogLine(0, 0.0, "err", line))
    deaths.failure(10.5, Failure(1, 7, "eval", 10.5, LOST, "File, line 2, in generate\n"), set())
    *explained, last = (one for one in deaths.tick(11.0, over=True) if one.facts.__class__ is not detector.Followed)
    assert last.facts == detector.LastLog(list(GLOO))
    assert [(one.state, one.facts.reason, one.facts.generating) for one in explained] == (
        [("explained", reason, True)] if reason else []
    )


@pytest.mark.parametrize(("peer_gone_at", "signal"), [(10.8, 15), (None, 15), (10.4, 11)])
def test_a_death_that_may_have_come_first_or_that_no_launcher_causes_is_the_alert(peer_gone_at, signal):
    deaths = detector.DeathDetector(OomDetector())
    deaths.failure(10.0, Failure(1, 7, "backward", 10.0, LOST), set())
    if peer_gone_at is not None:
        deaths.process_gone(peer_gone_at, gone(1, code=1), set())
    found, follows = deaths.process_gone(10.8, gone(0, signal=signal), set())
    assert (found.condition, found.severity) == (Condition("died", 0), "error")
    assert list(follows.facts.followers) == [1]


@pytest.mark.parametrize(
    ("ended", "phase", "asked", "end", "succeeded", "resolves"),
    [
        (gone(1, signal=15), "forward", set(), 20.0, True, True),
        (gone(1, code=1), "idle", set(), 20.0, True, True),
        (gone(1, code=1), "forward", set(), 20.0, True, False),
        (gone(1, signal=15), "forward", set(), 20.0, False, False),
        (gone(1, signal=15), "forward", set(), 75.0, True, False),
        (gone(1, signal=15), "forward", {1}, 20.0, True, False),
        (gone(1, signal=9), "idle", set(), 20.0, True, False),
        (gone(1, code=-11), "idle", set(), 20.0, True, False),
    ],
)
def test_a_rank_ended_by_what_started_it_is_no_trouble_of_a_success(ended, phase, asked, end, succeeded, resolves):
    deaths = detector.DeathDetector(OomDetector())
    (found,) = deaths.process_gone(10.0, ended, asked, phase=phase)
    over = [one for one in deaths.tick(end, over=True, succeeded=succeeded) if one.state == "resolved"]
    assert [(one.condition, one.facts) for one in over] == [(found.condition, Resolution("run_ended"))] * resolves


@pytest.mark.parametrize("lost_first", [True, False], ids=["in an earlier poll", "in the same poll"])
def test_a_rank_whose_script_had_ended_is_the_one_that_ended_early_however_its_process_ends(lost_first):
    deaths = detector.DeathDetector(OomDetector(), lambda: {1: 39})
    deaths.failure(10.0, Failure(0, 40, "backward", 10.0, LOST), set())
    if lost_first:
        assert deaths.process_gone(10.9, gone(0, code=1), set()) == []
    found, ended = deaths.process_gone(11.0, gone(1, signal=15), set())
    assert (found.condition, found.ranks) == (Condition("ended_early", 1), (1,))
    assert found.facts == detector.EndedEarly({1: 39}, 0, LOST, "", [])
    assert (ended.condition, ended.facts) == (found.condition, detector.Ended(None, 15))
    assert deaths.tick(20.0, over=True) == []
    both = detector.DeathDetector(OomDetector(), lambda: {2: 6, 1: 5})
    both.failure(10.0, Failure(0, 7, "backward", 10.0, LOST), set())
    (found,) = both.tick(11.0, over=True)
    assert (found.condition, found.ranks) == (Condition("ended_early"), (1, 2))
    assert found.facts == detector.EndedEarly({1: 5, 2: 6}, 0, LOST, "", []), "the step of each"


def test_what_becomes_known_after_a_restart_of_the_hub_is_added_to_the_alerts_of_the_recording(make_sim):
    old = make_sim(2)
    old.begin()
    old.train(1, 6)
    old.feed(Failure(0, 7, "data", old.now, "KeyError: 'ids'", "Traceback"), Goodbye(0, old.now, 6, "failed"))
    (before,) = old.alerts("failure")
    new = make_sim(2)
    new.seq, new.now = old.seq, old.now + 1
    new.tracker.restore(old.frames)
    new.detectors.restore(old.frames)
    new.fact(0, alive=False, exit_code=1)
    new.fact(1, alive=False, signal=15)
    new.wait(8)
    (after,) = new.alerts("failure")
    assert (after.id, after.evidence["ended"], list(after.evidence["then"])) == (before.id, "exit code 1", ["1"])
    assert after.evidence["error"] == "KeyError: 'ids'"
    assert new.alerts("died") == []


def test_what_ended_an_earlier_job_is_not_the_matter_of_a_later_one_after_a_restart_of_the_hub(make_sim):
    old = make_sim(1)
    old.begin()
    old.feed(Job(number=1, time=old.now, state="training", started=old.now))
    old.train(1, 3)
    old.fact(0, alive=False, exit_code=3)
    old.wait(5)
    (first,) = old.alerts("died")
    old.sent += old.detectors.begin_job(old.now)
    old.feed(Job(number=2, time=old.now, state="training", started=old.now))
    old.feed(old.step(0, 1))
    assert not old.store.resolve_past(old.now)
    new = make_sim(1)
    new.seq, new.now = old.seq, old.now + 1
    new.detectors.restore(old.frames)
    assert not new.store.resolve_past(new.now), "it is over already"
    new.begin()
    new.train(1, 3)
    new.fact(0, alive=False, exit_code=3)
    new.wait(5)
    (second,) = new.alerts("died")
    assert second.id > first.id
    assert (second.time > first.time, second.count) == (True, 1)


@pytest.mark.parametrize(
    ("ends", "signal", "error", "exits"),
    [
        ([Failure(0, 0, "init", 1.0, "KeyError: 'ids'")], None, "KeyError: 'ids'", 0),
        ([Failure(0, 0, "init", 1.0, LOST)], None, "KeyError: 'ids'", 1),
        ([Failure(0, 0, "init", 1.0, LOST)], None, LOST, 0),
        ([], None, "KeyError: 'ids'", 1),
        ([], 11, "", 0),
        ([], 11, LOST, 0),
        ([], 11, "KeyError: 'ids'", 1),
    ],
    ids=["the same error", "a nearer cause", "the same lost peer", "nothing else", "died", "died, lost peer", "nearer"],
)
def test_a_run_that_ended_before_its_first_step_repeats_no_alert_of_a_failure(make_sim, ends, signal, error, exits):
    sim = make_sim(2)
    sim.begin()
    sim.feed(*ends)
    if signal is not None:
        sim.fact(0, alive=False, signal=signal)
        sim.wait(1)
        assert sim.alerts("died")
    facts = NoStepFacts("exit code 1", 1, 1, error)
    sent = sim.detectors.put(sim.now, Finding("no_step", facts, severity="error"))
    assert [alert.kind for alert in sent if alert.kind == "exit"] == ["exit"] * exits


GIB = 2**30
MIB = 2**20
OOM_SIZES = {"requested_bytes": int(4.64 * GIB), "device_free_bytes": int(1.54 * GIB), "device_total_bytes": 20 * GIB}
HELD_SIZES = {"allocated_bytes": int(18.28 * GIB), "reserved_bytes": int(18.28 * GIB) + 183 * MIB}
OOM = Oom(0, 7, "backward", 0.0, **OOM_SIZES, **HELD_SIZES, batch_shape=[2, 4096])
"""The public sample: qwen1.5-0.5b, ZeRO-2, micro-batch 2, length 4096, 20 GiB allowed."""


def play(make_sim: Any, ranks: int, *events: Any, cuda: bool = False) -> Any:
    """Return a run after six steps and these events: messages, dead processes (rank, fields), seconds to wait."""
    sim = make_sim(ranks, cuda=cuda)
    sim.begin()
    sim.train(1, 6)
    for event in events:
        if isinstance(event, float):
            sim.wait(event)
        elif isinstance(event, tuple):
            rank, fields = event
            sim.fact(rank, alive=False, **fields)
        else:
            sim.feed(msgspec.structs.replace(event, time=sim.now) if hasattr(event, "time") else event)
    return sim


def lost(rank: int, error: str = LOST) -> Failure:
    return Failure(rank, 7, "backward", 0.0, error)


@pytest.mark.parametrize("world", [1, 2])
def test_a_death_by_an_own_exit_status_names_other_ranks_only_if_there_are_some(make_sim, world):
    sim = play(make_sim, world, Goodbye(0, 0.0, 6, "failed", "sys.exit(3)"), (0, {"exit_code": 3}), 5.0)
    (alert,) = sim.alerts("died")
    assert ("other ranks" in alert.text) == (world > 1)
    assert (alert.rank, alert.evidence["exit_code"]) == (0, 3)


def test_an_oom_gives_the_allocators_numbers_and_is_resolved_by_the_next_step_and_no_earlier_one(make_sim):
    sim = play(make_sim, 1, OOM, cuda=True)
    (alert,) = sim.alerts("oom")
    assert (alert.severity, alert.rank, alert.step, alert.phase) == ("error", 0, 7, "backward")
    evidence = alert.evidence
    assert (evidence["verdict"], evidence["batch_shape"]) == ("activations", [2, 4096])
    assert evidence.items() >= {**OOM_SIZES, **HELD_SIZES, "reserved_unallocated_bytes": 183 * MIB}.items()
    assert "micro_batch" in [remedy["kind"] for remedy in evidence["remedies"]]
    sim.feed(sim.step(0, 6))
    assert sim.alerts("oom")[0].resolved is None, "a step from before the error that arrives late"
    sim.train(7, 7)
    over = sim.alerts("oom")[0]
    assert over.resolved is not None
    assert over.text.endswith("The script caught it and finished step 7.")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ...",
        "MemoryError: Unable to allocate 8.00 TiB",
        "OutOfMemoryError: CUDA out of memory.",
    ],
)
@pytest.mark.parametrize("report", [[], [OOM]], ids=["without an allocator's message", "with it"])
def test_an_oom_that_ends_the_script_is_one_alert_with_the_traceback_and_the_exit_status(make_sim, error, report):
    ends = (Failure(0, 7, "backward", 0.0, error, "Traceback ..."), Goodbye(0, 0.0, 6, "failed"))
    sim = play(make_sim, 2, *report, *ends, (0, {"exit_code": 1}), (1, {"signal": 15}), 10.0)
    (alert,) = sim.alerts("oom")
    expected = ("error", "Traceback ...", "exit code 1")
    assert (alert.severity, alert.evidence["traceback"], alert.evidence["ended"]) == expected
    assert list(alert.evidence["then"]) == ["1"]
    assert sim.alerts("failure") == sim.alerts("died") == []


def test_a_death_names_its_signal_and_last_lines_and_what_a_launcher_ends_after_it_is_evidence_not_alerts(make_sim):
    lines = (LogLine(1, 0.0, "err", f"line {number}") for number in range(20))
    sim = play(make_sim, 2, *lines, (1, {"signal": 9}), 1.5, LogLine(1, 0.0, "err", "last words"), 5.0)
    (alert,) = sim.alerts("died")
    assert alert.evidence["log"][-2:] == ["line 19", "last words"]
    assert (alert.rank, alert.evidence["signal"], alert.evidence["pid"]) == (1, 9, 101)
    others = [0, 1, 2, 3, 4, 6, 7]
    sim = play(make_sim, 8, (5, {"exit_code": 17}), 0.5, *((rank, {"signal": 15}) for rank in others), 8.0)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"]) == (5, 17)
    assert sorted(alert.evidence["then"]) == list(map(str, others))


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [gloo/tcp/pair.cc:553] Connection closed by peer\nmore",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
    ],
)
@pytest.mark.parametrize("exception_first", [True, False])
def test_the_peers_broken_connection_is_blamed_on_the_rank_that_died_first(make_sim, error, exception_first):
    first = [(1, {"signal": 11}), lost(0, error)]
    ends = (Goodbye(0, 0.0, 6, "failed", error), (0, {"exit_code": 1}), 8.0)
    sim = play(make_sim, 2, *(first[::-1] if exception_first else first), *ends)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["signal"]) == (1, 11)
    assert error[:40] in alert.evidence["then"]["0"]
    assert sim.alerts("failure") == []
    assert "\n" not in sim.state(0).text


def test_a_kill_that_was_asked_for_and_the_peer_lost_to_it_are_information(make_sim):
    sim = play(make_sim, 2, Command("c", "kill", {"ranks": [1], "signal": "KILL"}), (1, {"signal": 9}), 3.0)
    (alert,) = sim.alerts("died")
    assert (alert.severity, alert.rank, alert.evidence["signal"]) == ("info", 1, 9)
    # A rank that INT ends says goodbye: there is no death of it that the broken connection could follow from.
    interrupted = Command("c", "kill", {"ranks": [1], "signal": "INT"}), Goodbye(1, 0.0, 6, "stopped", "interrupted")
    (alert,) = play(make_sim, 2, *interrupted, lost(0), 6.0).alerts("failure")
    assert (alert.rank, alert.severity) == (0, "info")


def test_two_failures_are_two_alerts_and_a_broken_connection_with_no_other_trouble_is_one_of_its_own(make_sim):
    sim = play(make_sim, 2, *(Failure(rank, 7, "data", 0.0, f"KeyError: 'field {rank}'") for rank in range(2)))
    found = [(alert.rank, alert.phase, alert.evidence["error"]) for alert in sim.alerts("failure")]
    assert found == [(0, "data", "KeyError: 'field 0'"), (1, "data", "KeyError: 'field 1'")]
    sim = play(make_sim, 2, lost(0, "RuntimeError: Connection reset by peer"), 5.0)
    assert [alert.rank for alert in sim.alerts("failure")] == [0]
    sim = play(make_sim, 2, lost(0))
    sim.sent += sim.detectors.begin_job(sim.now)
    assert [alert.rank for alert in sim.alerts("failure")] == [0], "reported before the next job begins"


def test_lost_telemetry_and_a_failing_recording_are_each_one_alert_that_counts_and_ends(make_sim):
    sim = play(make_sim, 2)

    def alerts(lost: int) -> list[Any]:
        sim.feed(HubStats(sim.now, 1, 10, 10, 10, {"rank-1-4711-99": lost} if lost else {}))
        sim.wait(10)
        return [(alert.count, alert.evidence["total"], alert.resolved is None) for alert in sim.alerts("dropped")]

    assert [alerts(lost) for lost in (0, 12, 20)] == [[], [(1, 12, True)], [(2, 20, True)]]
    sim.wait(60)
    assert alerts(20) == [(2, 20, False)]
    for _ in range(5):
        sim.feed(HubStats(sim.now, 1, 10, 10, 10, recording_error="No space left on device"))
        sim.tick()
    (alert,) = sim.alerts("disk")
    assert (alert.severity, alert.count, alert.evidence["error"]) == ("error", 1, "No space left on device")
    alerts(0)
    assert sim.alerts("disk")[0].resolved is not None


def test_a_target_of_an_exporter_that_fails_or_is_slow_is_one_alert_until_it_has_dropped_nothing_for_a_while(make_sim):
    sim = play(make_sim, 2)

    def alert(seconds: float, dropped: int = 0, error: str = "", target: str = "otel") -> list[tuple[str, bool]]:
        sim.wait(seconds)
        sim.feed(ExporterState(target, sim.now, dropped, error=error))
        sim.tick()
        found = [one for one in sim.alerts("note") if one.evidence["rule"].startswith("export ")]
        return [(one.title, one.resolved is None) for one in found]

    failed, slow = "not exported to otel: HTTP status 503", "not exported to otel: it is slower than the run"
    assert alert(0) == []
    assert alert(10, error="HTTP status 503") == [(failed, True)]
    assert alert(10, error="HTTP status 503") == [(failed, True)]
    assert alert(10) == [(failed, False)]
    assert alert(70, 500)[-1] == (slow, True)
    assert alert(10, 500)[-1] == (slow, True), "it may drop more in a moment"
    assert len(alert(10, 900)) == len(alert(30, 900))
    (wandb,) = [title for title, _ in alert(10, 3, target="wandb") if "wandb" in title]
    assert wandb == "not exported to wandb: it is slower than the run"
    assert [active for title, active in alert(70, 900) if title == slow] == [False]


def test_an_ordinary_end_raises_nothing_and_ranks_of_a_job_that_slurm_cancelled_died_of_nothing(make_sim):
    ends = ((Goodbye(rank, 0.0, 6, "finished"), (rank, {"exit_code": 0})) for rank in range(2))
    sim = play(make_sim, 2, *(event for end in ends for event in end), 2.0)
    sim.sent += sim.tracker.ended(sim.now, "finished", 0)
    sim.wait(10)
    assert [alert for kind in ("died", "failure", "exit", "hang", "note", "slow") for alert in sim.alerts(kind)] == []
    words = "slurmstepd: error: *** STEP 5.0 ON nodea CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***"
    sim = play(make_sim, 2, LogLine(-1, 0.0, "launcher", words), (0, {"signal": 15}), (1, {"signal": 15}), 6.0)
    assert (sim.tracker.run_state.state, sim.tracker.run_state.text) == ("stopping", "cancelled by SLURM: time limit")
    assert sim.alerts("died") == []


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("ended", "follows"),
    [({"signal": 6}, {"signal": 15}), ({"signal": 9}, {}), ({"time": -0.01}, {"signal": 6})],
    ids=["the other was asked to end", "nothing is known of the other", "seen earlier, though nothing is known of it"],
)
def test_of_two_deaths_in_one_poll_the_known_or_earlier_one_is_where_it_began(make_sim, first, ended, follows):
    sim = play(make_sim, 2)
    for rank in (0, 1):
        fact = {"time": 0.0, **(ended if rank == first else follows)}
        sim.fact(rank, alive=False, **{**fact, "time": sim.now + fact["time"]})
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"], alert.evidence["signal"]) == (first, None, ended.get("signal"))
    assert list(alert.evidence["then"]) == [str(1 - first)]


def test_a_run_that_ends_before_its_dead_were_told_has_them_in_the_order_of_their_deaths(make_sim):
    sim = play(make_sim, 3)
    for after, rank in enumerate((2, 1, 0)):
        sim.fact(rank, alive=False, signal=15 if after else 9, time=sim.now + after / 10)
    sim.sent += sim.tracker.ended(sim.now, "failed", 137)
    sim.tick()
    (alert,) = sim.alerts("died")
    assert (alert.rank, list(alert.evidence["then"])) == (2, ["1", "0"])


def test_a_launcher_that_ends_before_its_ranks_is_the_trouble_and_no_rank_is_blamed_for_being_ended(make_sim):
    sim = play(make_sim, 2)
    sim.sent += sim.detectors.job_ended_first(sim.now, -9, 2, ["100 (python)", "101 (python)"])
    for rank in (1, 0):
        sim.fact(rank, alive=False, signal=15)
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["rule"], alert.evidence["left"]) == (None, "launcher", 2)
    assert sorted(alert.evidence["then"]) == ["0", "1"]


@pytest.mark.parametrize(("code", "ended", "alerts"), [(0, 2, 0), (0, 1, 1), (1, 2, 1)])
def test_helpers_that_outlive_every_rank_are_no_trouble(make_sim, code, ended, alerts):
    sim = play(make_sim, 2, *(Goodbye(rank, 0.0, 6, "finished") for rank in range(ended)))
    sim.sent += sim.detectors.job_ended_first(sim.now, code, 1, ["100 (python)"])
    assert len(sim.alerts("died")) == alerts


@pytest.mark.parametrize("how", ["waits", "the run ends", "its launcher ends it"])
def test_a_lost_connection_to_a_rank_whose_script_ended_names_that_rank(make_sim, how):
    ends = (Goodbye(0, 0.0, 6, "failed", LOST), (0, {"exit_code": 1}))
    sim = play(make_sim, 3, Goodbye(1, 0.0, 6, "finished"), lost(0), lost(2), *(ends if how != "waits" else [4.0]))
    if how == "the run ends":
        sim.sent += sim.tracker.ended(sim.now, "failed", 1)
        sim.tick()
    elif how == "its launcher ends it":
        sim.fact(1, alive=False, signal=15)
        sim.wait(5.0)
        assert sim.state(1).state == "gone", "after its script had succeeded"
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.step, alert.evidence["rule"]) == (1, 7, "ended-early")
    assert (alert.evidence["last_step"], alert.evidence["lost"]) == ({"1": 6}, 0)
    assert "2" in alert.evidence["then"], "rank 2 lost it too"


def test_endings_are_said_in_words():
    said = {
        (0, None): "exit code 0", (None, 11): "killed by SIGSEGV", (-9, None): "killed by SIGKILL",
        (137, None): "exit code 137, SIGKILL", (None, None): "exit status unknown",
        (None, 77): "killed by signal 77",
    }  # fmt: skip
    assert {end: ending_in_words(*end) for end in said} == said
