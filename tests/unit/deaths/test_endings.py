"""Out of memory, failures, deaths, losses, and a run that ends before its first step."""

from typing import Any

import pytest
from ftmon.protocol.messages.control import Command, HubStats
from ftmon.protocol.messages.telemetry import Failure, Goodbye, LogLine, Oom
from ftmon.protocol.run.end import ending_in_words

GIB = 2**30
MIB = 2**20


def a_run(make_sim: Any, ranks: int, **fields: Any) -> Any:
    sim = make_sim(ranks, **fields)
    sim.begin()
    sim.train(1, 6)
    return sim


def oom(sim: Any, **fields: Any) -> Oom:
    # The public sample: qwen1.5-0.5b, ZeRO-2, micro-batch 2, length 4096, 20 GiB allowed.
    given = {
        "requested_bytes": int(4.64 * GIB),
        "device_free_bytes": int(1.54 * GIB),
        "device_total_bytes": 20 * GIB,
        "allocated_bytes": int(18.28 * GIB),
        "reserved_bytes": int(18.28 * GIB) + 183 * MIB,
        "batch_shape": [2, 4096],
        **fields,
    }
    return Oom(0, 7, "backward", sim.now, **given)


def test_an_oom_gives_the_allocators_numbers_and_a_verdict(make_sim: Any):
    sim = a_run(make_sim, 1)
    sim.feed(oom(sim))
    (alert,) = sim.alerts("oom")
    assert (alert.severity, alert.rank, alert.step, alert.phase) == ("error", 0, 7, "backward")
    evidence = alert.evidence
    assert (evidence["verdict"], evidence["batch_shape"]) == ("activations", [2, 4096])
    assert (evidence["requested_bytes"], evidence["device_free_bytes"]) == (int(4.64 * GIB), int(1.54 * GIB))
    assert evidence["reserved_unallocated_bytes"] == 183 * MIB
    assert "micro_batch" in [remedy["kind"] for remedy in evidence["remedies"]]


def test_fragmentation_and_other_processes_are_told_apart(make_sim: Any):
    sim = a_run(make_sim, 1)
    sim.feed(oom(sim, requested_bytes=GIB, allocated_bytes=12 * GIB, reserved_bytes=18 * GIB))
    assert sim.alerts("oom")[0].evidence["verdict"] == "fragmentation"
    sim = a_run(make_sim, 1)
    sim.feed(oom(sim, allocated_bytes=8 * GIB, reserved_bytes=8 * GIB, device_free_bytes=2 * GIB))
    assert sim.alerts("oom")[0].evidence["verdict"] == "outside"


def test_a_step_from_before_the_oom_that_comes_in_late_resolves_nothing(make_sim: Any):
    sim = a_run(make_sim, 1)
    sim.feed(oom(sim), sim.step(0, 6))
    assert sim.alerts("oom")[0].resolved is None


def test_on_the_host_an_allocation_that_a_limit_refused_is_told_as_that(make_sim: Any):
    sim = a_run(make_sim, 1, cuda=False)
    sim.feed(oom(sim, requested_bytes=8 * GIB, device_free_bytes=15 * GIB, device_total_bytes=24 * GIB))
    (alert,) = sim.alerts("oom")
    assert alert.evidence["verdict"] == "limit"


def test_an_oom_that_the_script_catches_is_resolved_by_its_next_step(make_sim: Any):
    sim = a_run(make_sim, 1)
    sim.feed(oom(sim))
    sim.train(8, 8)
    assert sim.alerts("oom")[0].resolved is not None


def test_an_oom_that_ends_the_script_is_one_alert_with_the_traceback_and_the_exit_status(make_sim: Any):
    sim = a_run(make_sim, 2)
    sim.feed(
        oom(sim),
        Failure(0, 7, "backward", sim.now, "OutOfMemoryError: CUDA out of memory. Tried ...", "Traceback ..."),
        Goodbye(0, sim.now, 6, "failed"),
    )
    sim.fact(0, alive=False, exit_code=1)
    sim.fact(1, alive=False, signal=15)
    sim.wait(10)
    (alert,) = sim.alerts("oom")
    assert alert.evidence["traceback"] == "Traceback ..."
    assert alert.evidence["ended"] == "exit code 1"
    assert list(alert.evidence["then"]) == ["1"]
    assert sim.alerts("failure") == []
    assert sim.alerts("died") == []


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried ...",
        "MemoryError: Unable to allocate 8.00 TiB",
        "OutOfMemoryError: CUDA out of memory.",
    ],
)
def test_memory_that_ran_out_without_an_allocator_message_is_an_oom_too(make_sim: Any, error: str):
    sim = a_run(make_sim, 1, cuda=False)
    sim.feed(Failure(0, 7, "optimizer", sim.now, error, "Traceback ..."))
    (alert,) = sim.alerts("oom")
    assert alert.severity == "error"
    assert sim.alerts("failure") == []


def test_a_death_names_its_signal_and_carries_the_last_lines(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    for number in range(20):
        sim.feed(LogLine(1, sim.now, "err", f"line {number}"))
    sim.fact(1, alive=False, signal=9)
    sim.wait(1.5)
    sim.feed(LogLine(1, sim.now, "err", "last words"))
    sim.wait(5)
    (alert,) = sim.alerts("died")
    assert alert.evidence["log"][-2:] == ["line 19", "last words"]
    assert (alert.rank, alert.evidence["signal"], alert.evidence["pid"]) == (1, 9, 101)


def test_what_a_launcher_ends_after_the_first_death_is_evidence_not_alerts(make_sim: Any):
    sim = a_run(make_sim, 8)
    sim.fact(5, alive=False, exit_code=17)
    sim.wait(0.5)
    for rank in {0, 1, 2, 3, 4, 6, 7}:
        sim.fact(rank, alive=False, signal=15)
    sim.wait(8)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"]) == (5, 17)
    assert sorted(alert.evidence["then"]) == ["0", "1", "2", "3", "4", "6", "7"]


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [gloo/tcp/pair.cc:553] Connection closed by peer",
        "DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
    ],
)
def test_the_peers_broken_connection_is_blamed_on_the_rank_that_died_first(make_sim: Any, error: str):
    sim = a_run(make_sim, 2, cuda=False)
    # The survivor's exception arrives before anybody has looked at the dead process.
    sim.feed(Failure(0, 7, "backward", sim.now, error))
    sim.fact(1, alive=False, signal=9)
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert alert.rank == 1
    assert error[:40] in alert.evidence["then"]["0"]
    assert sim.alerts("failure") == []


def test_a_peer_lost_to_a_kill_that_was_asked_for_is_information(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    sim.feed(Command("c", "kill", {"ranks": [1], "signal": "INT"}))
    # A rank that INT ends says goodbye: there is no death of it that the broken connection could follow from.
    sim.feed(Goodbye(1, sim.now, 6, "stopped", "interrupted"))
    sim.feed(Failure(0, 7, "backward", sim.now, "RuntimeError: Connection closed by peer"))
    sim.wait(6)
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.severity) == (0, "info")


def test_a_broken_connection_with_no_other_trouble_is_a_failure_of_its_own(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    sim.feed(Failure(0, 7, "backward", sim.now, "RuntimeError: Connection reset by peer"))
    sim.wait(5)
    assert [alert.rank for alert in sim.alerts("failure")] == [0]


def test_two_different_failures_are_two_alerts(make_sim: Any):
    sim = a_run(make_sim, 2)
    for rank in range(2):
        sim.feed(Failure(rank, 7, "data", sim.now, f"KeyError: 'field {rank}'", "Traceback"))
    found = [(alert.rank, alert.phase, alert.evidence["error"]) for alert in sim.alerts("failure")]
    assert found == [(0, "data", "KeyError: 'field 0'"), (1, "data", "KeyError: 'field 1'")]


def test_a_kill_that_was_asked_for_is_information(make_sim: Any):
    sim = a_run(make_sim, 2)
    sim.feed(Command("c", "kill", {"ranks": [1], "signal": "KILL"}))
    sim.fact(1, alive=False, signal=9)
    sim.wait(3)
    (alert,) = sim.alerts("died")
    assert (alert.severity, alert.rank, alert.evidence["signal"]) == ("info", 1, 9)


def test_lost_telemetry_is_one_alert_that_counts_and_ends(make_sim: Any):
    sim = a_run(make_sim, 2)

    def stats(**lost: int) -> HubStats:
        return HubStats(sim.now, 1, 10, 10, 10, {name.replace("_", "-"): count for name, count in lost.items()})

    sim.feed(stats())
    assert sim.alerts("dropped") == []
    sim.feed(stats(rank_1_4711_99=12))
    (alert,) = sim.alerts("dropped")
    assert alert.evidence["total"] == 12
    sim.wait(10)
    sim.feed(stats(rank_1_4711_99=20))
    sim.wait(10)
    (alert,) = sim.alerts("dropped")
    assert (alert.count, alert.evidence["total"]) == (2, 20)
    sim.wait(60)
    sim.feed(stats(rank_1_4711_99=20))
    assert sim.alerts("dropped")[0].resolved is not None


def test_a_recording_that_cannot_be_written_is_told_and_resolved(make_sim: Any):
    sim = a_run(make_sim, 1)
    for _ in range(5):
        sim.feed(HubStats(sim.now, 1, 10, 10, 10, recording_error="No space left on device"))
        sim.tick()
    (alert,) = sim.alerts("disk")
    assert (alert.severity, alert.count) == ("error", 1)
    assert alert.evidence["error"] == "No space left on device"
    sim.feed(HubStats(sim.now, 1, 10, 10, 10))
    assert sim.alerts("disk")[0].resolved is not None


def test_an_ordinary_end_raises_nothing(make_sim: Any):
    sim = a_run(make_sim, 2)
    for rank in range(2):
        sim.feed(Goodbye(rank, sim.now, 6, "finished"))
        sim.fact(rank, alive=False, exit_code=0)
    sim.wait(2)
    sim.sent += sim.tracker.ended(sim.now, "finished", 0)
    sim.wait(10)
    assert [alert for kind in ("died", "failure", "exit", "hang", "note", "slow") for alert in sim.alerts(kind)] == []


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        (0, None, "exit code 0"),
        (None, 11, "killed by SIGSEGV"),
        (-9, None, "killed by SIGKILL"),
        (137, None, "exit code 137, SIGKILL"),
        (None, None, "exit status unknown"),
        (None, 77, "killed by signal 77"),
    ],
)
def test_endings_are_said_in_words(code: int | None, signal: int | None, words: str):
    assert ending_in_words(code, signal) == words


def test_of_two_deaths_in_a_row_the_first_is_told_though_only_the_second_said_goodbye(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    sim.fact(1, alive=False, signal=11)
    sim.now += 0.1
    error = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
    sim.feed(Failure(0, 7, "backward", sim.now, error + "\nmore"), Goodbye(0, sim.now, 6, "failed", error))
    sim.fact(0, alive=False, exit_code=1)
    sim.wait(8)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["signal"]) == (1, 11)
    assert list(alert.evidence["then"]) == ["0"]
    assert sim.alerts("failure") == []
    assert "\n" not in sim.state(0).text


def test_a_script_that_leaves_with_a_status_of_its_own_died_of_it(make_sim: Any):
    sim = a_run(make_sim, 1)
    sim.feed(Goodbye(0, sim.now, 6, "failed", "sys.exit(3)"))
    sim.fact(0, alive=False, exit_code=3)
    sim.wait(2)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"]) == (0, 3)


def test_ranks_of_a_job_that_slurm_cancelled_died_of_nothing(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    words = "slurmstepd: error: *** STEP 5.0 ON nodea CANCELLED AT 2026-11-21T12:00:00 DUE TO TIME LIMIT ***"
    sim.feed(LogLine(-1, sim.now, "launcher", words))
    assert (sim.tracker.run_state.state, sim.tracker.run_state.text) == ("stopping", "cancelled by SLURM: time limit")
    sim.fact(0, alive=False, signal=15)
    sim.fact(1, alive=False, signal=15)
    sim.wait(6)
    assert sim.alerts("died") == []


@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_seen_dead_at_one_look_the_one_that_was_not_asked_to_end_is_where_it_began(make_sim: Any, first: int):
    sim = a_run(make_sim, 2, cuda=False)
    sim.fact(1 - first, alive=False, signal=15)
    sim.fact(first, alive=False, signal=6)
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["signal"]) == (first, 6)
    assert list(alert.evidence["then"]) == [str(1 - first)]


@pytest.mark.parametrize("killed", [0, 1])
def test_of_ranks_seen_dead_at_one_look_the_one_of_which_nothing_is_known_follows(make_sim: Any, killed: int):
    sim = a_run(make_sim, 2, cuda=False)
    for rank in (0, 1):
        sim.fact(rank, alive=False, time=sim.now, **({"signal": 9} if rank == killed else {}))
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["signal"]) == (killed, 9)
    assert list(alert.evidence["then"]) == [str(1 - killed)]


@pytest.mark.parametrize("first", [0, 1])
def test_the_rank_that_was_seen_dead_first_is_where_it_began_even_if_nothing_is_known_of_it(make_sim: Any, first: int):
    sim = a_run(make_sim, 2, cuda=False)
    for rank in (0, 1):
        if rank == first:
            sim.fact(rank, alive=False, time=sim.now - 0.01)
        else:
            sim.fact(rank, alive=False, signal=6, time=sim.now)
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["exit_code"], alert.evidence["signal"]) == (first, None, None)


def test_a_run_that_ends_before_its_dead_were_told_has_them_in_the_order_of_their_deaths(make_sim: Any):
    sim = a_run(make_sim, 3, cuda=False)
    sim.fact(2, alive=False, signal=9, time=sim.now)
    sim.fact(1, alive=False, signal=15, time=sim.now + 0.1)
    sim.fact(0, alive=False, signal=15, time=sim.now + 0.2)
    sim.sent += sim.tracker.ended(sim.now, "failed", 137)
    sim.tick()
    (alert,) = sim.alerts("died")
    assert (alert.rank, list(alert.evidence["then"])) == (2, ["1", "0"])


def test_a_launcher_that_ends_before_its_ranks_is_the_trouble_and_no_rank_is_blamed_for_being_ended(make_sim: Any):
    sim = a_run(make_sim, 2, cuda=False)
    sim.sent += sim.detectors.job_ended_first(sim.now, -9, 2, ["100 (python)", "101 (python)"])
    sim.fact(1, alive=False, signal=15)
    sim.fact(0, alive=False, signal=15)
    sim.wait(6)
    (alert,) = sim.alerts("died")
    assert (alert.rank, alert.evidence["rule"], alert.evidence["left"]) == (None, "launcher", 2)
    assert sorted(alert.evidence["then"]) == ["0", "1"]


def test_a_lost_connection_to_a_rank_whose_script_ended_names_that_rank(make_sim: Any):
    sim = a_run(make_sim, 3)
    sim.feed(Goodbye(1, sim.now, 6, "finished"))
    for rank in (0, 2):
        sim.feed(Failure(rank, 7, "backward", sim.now, "RuntimeError: Connection closed by peer [127.0.0.1]:4711"))
    sim.wait(4)
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.step, alert.evidence["rule"]) == (1, 7, "ended-early")
    assert (alert.evidence["last_step"], alert.evidence["lost"]) == ({"1": 6}, 0)
    assert "2" in alert.evidence["then"], "rank 2 lost it too"


def test_a_run_that_ends_while_a_lost_connection_waits_for_its_cause_still_names_it(make_sim: Any):
    sim = a_run(make_sim, 2)
    sim.feed(Goodbye(1, sim.now, 6, "finished"))
    sim.feed(Failure(0, 7, "backward", sim.now, "RuntimeError: Connection closed by peer [127.0.0.1]:4711"))
    sim.fact(0, alive=False, exit_code=1)
    sim.sent += sim.tracker.ended(sim.now, "failed", 1)
    sim.tick()
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.evidence["last_step"], alert.evidence["lost"]) == (1, {"1": 6}, 0)


def test_a_failure_that_waits_for_its_cause_is_told_before_the_next_job_begins(make_sim: Any):
    sim = a_run(make_sim, 2)
    sim.feed(Failure(0, 7, "backward", sim.now, "RuntimeError: Connection closed by peer [127.0.0.1]:4711"))
    sim.sent += sim.detectors.begin_job(sim.now)
    (alert,) = sim.alerts("failure")
    assert (alert.rank, alert.kind) == (0, "failure")
