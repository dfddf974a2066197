"""The hub's report of an out-of-memory error: all ranks as they were, a verdict; and a held rank, which is no hang."""

from typing import Any

from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.messages.telemetry import DeviceSample, Oom, ProcessMemory

GIB = 2**30


def failed(sim: Any, **fields: Any) -> Oom:
    given: dict[str, Any] = {"batch_shape": [4, 9000], "held": True, "others": "the other ranks wait", **fields}
    return Oom(1, 7, "backward", sim.now, 2 * GIB, GIB, 80 * GIB, 70 * GIB, 71 * GIB, **given)


def test_the_report_has_all_ranks_at_that_moment_and_who_held_memory_of_the_device(make_sim: Any) -> None:
    sim = make_sim(ranks=2, capacity=80 * GIB)
    sim.begin()
    sim.train(1, 6)
    sim.feed(sim.beat(0, 7, "forward", moved=True, allocated=5 * GIB, collective="all_reduce"))
    mine, other = ProcessMemory(101, 72 * GIB, 1), ProcessMemory(99, 6 * GIB, None, "python")
    sim.feed(DeviceSample("host", "gpu", 1, "GPU", sim.now, 79 * GIB, 80 * GIB, processes=[other, mine]))
    sim.feed(failed(sim, capacity_bytes=80 * GIB, room_bytes=GIB))
    (report,) = [message for message in sim.sent if isinstance(message, OomReport)]
    expected = [(0, "forward", "all_reduce"), (1, "backward", "")]
    assert [(moment.rank, moment.phase, moment.collective) for moment in report.ranks] == expected
    assert report.ranks[0].allocated_bytes == 5 * GIB
    assert report.ranks[1].allocated_bytes == 70 * GIB  # its own word, not its last heartbeat
    assert (report.processes, report.verdict.kind) == ([mine, other], "other_process")
    (alert,) = sim.alerts("oom")
    assert alert.evidence["verdict"] == "other_process"
    assert alert.evidence["remedies"][0]["frees_bytes"] == 6 * GIB


def test_a_rank_that_is_held_is_no_hang_and_what_waits_for_it_is_evidence_of_its_own_alert(make_sim: Any) -> None:
    sim = make_sim(ranks=2, cuda=False)
    sim.begin()
    sim.train(1, 6)
    sim.feed(failed(sim, measure="glibc"))
    since = sim.now

    def beats() -> None:
        sim.feed(sim.beat(0, 7, "backward", collective="all_reduce", collectives=19, step_collectives=1))
        sim.feed(sim.beat(1, 7, "backward", collectives=18, held_since=since))
        sim.fact(0)
        sim.fact(1)

    sim.wait(120.0, beats)
    assert (sim.states(1)[-1], sim.states(0)[-1], sim.alerts("hang")) == ("held", "waiting", [])
    (alert,) = sim.alerts("oom")
    assert alert.evidence["held"] is True
    assert alert.evidence["waiting"] == [0]
    sim.feed(sim.beat(1, 7, "backward", moved=True))
    sim.wait(10.0)
    assert "held" in sim.states(1)
    assert sim.states(1)[-1] != "held"
    assert sim.alerts("oom")[0].evidence["held"] is False
