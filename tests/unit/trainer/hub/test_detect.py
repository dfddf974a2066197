"""Deaths reach the analysis whatever the launcher's files are like."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.analysis.stalls.tracker import ProcessFact
from ftmon.protocol.errors import RunDirError
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello
from ftmon.protocol.run.end import LAUNCHER, write_end_request
from ftmon.protocol.run.rundir import LeftoversFile, RunFile
from ftmon.trainer.host.supervisor import Supervisor
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.detect import PATIENCE_SECONDS, MissingRanks, ProcessFacts
from ftmon.trainer.hub.ranks import RankHosts


def hello(rank: int, world: int) -> Hello:
    return Hello(rank, 0, world, "node", 10 + rank, 5, DeviceInfo("cpu", 0, "x", 1), "glibc", 1.0)


@pytest.mark.parametrize("listen", ["0.0.0.0:7420", ""])
def test_ranks_that_are_missing_for_a_minute_are_told_of_until_they_come(listen):
    said: list[Any] = []
    file = RunFile("r", "r", 1.0, [], "/", "node", "run")
    analysis = Analysis(file, lambda message: said.append(message) or (1, 1.0))
    rank_hosts = RankHosts()
    missing = MissingRanks(analysis, rank_hosts, listen)
    missing.tick(0.0)
    rank_hosts.register(hello(0, 3))
    rank_hosts.register(hello(2, 3), away=True)
    missing.tick(10.0)
    missing.tick(10.0 + PATIENCE_SECONDS)
    assert not said
    missing.tick(11.0 + PATIENCE_SECONDS)
    missing.tick(12.0 + PATIENCE_SECONDS)
    if not listen:
        assert not said
        return
    (alert,) = said
    assert (alert.title, alert.evidence["missing"]) == ("1 of 3 ranks have not reported", [1])
    assert listen in alert.text
    rank_hosts.register(hello(1, 3), away=True)
    missing.tick(20.0 + PATIENCE_SECONDS)
    assert said[-1].resolved is not None


def test_a_death_counts_though_the_record_of_leftovers_cannot_be_read(run, monkeypatch):
    (run.path / "left.json").write_text("{")
    with pytest.raises(RunDirError):
        run.read_leftovers()
    found: list[ProcessFact] = []
    emit: Any = lambda _: (1, 1.0)  # noqa: E731
    analysis = Analysis(run.read_run(), emit)
    monkeypatch.setattr(analysis, "fact", found.append)
    core: Any = SimpleNamespace(run=run, analysis=analysis, emit=emit)
    supervisor = Supervisor(lambda: None)
    facts = ProcessFacts(core, supervisor)
    supervisor.watch(3, os.getpid(), 1)  # no such process: this one began later
    supervisor.start()
    try:
        eventually(lambda: facts.collect() or found, "the death")
    finally:
        supervisor.stop()
    assert [(fact.rank, fact.alive) for fact in found] == [(3, False)]


def test_what_a_job_left_behind_is_never_seen_without_the_request_to_end_it(run, monkeypatch):
    seen: list[str] = []
    emit: Any = lambda message: seen.append(message.verb)  # noqa: E731
    analysis: Any = SimpleNamespace(job_ended_first=lambda _: seen.append("left"), fact=lambda _: None)
    core: Any = SimpleNamespace(run=run, analysis=analysis, emit=emit)
    facts = ProcessFacts(core, Supervisor(lambda: None))
    read = run.read_leftovers

    def both_written_meanwhile() -> Any:
        """Read first, then stand still while the launcher writes both."""
        found = read()
        write_end_request(run, "SIGTERM", by=LAUNCHER)
        run.write_leftovers(LeftoversFile(1.0, None, 1, ["9 python"]))
        return found

    monkeypatch.setattr(run, "read_leftovers", both_written_meanwhile)
    facts.collect()
    assert seen == ["stop"], "what was left behind is read at the next look"
    facts.collect()
    assert seen == ["stop", "left"]
