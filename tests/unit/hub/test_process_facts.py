"""Deaths reach the analysis whatever the launcher's files are like."""

import os
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.analysis.stalls.rank_tracker import ProcessFact
from ftmon.protocol.errors import RunDirError
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host.supervisor import Supervisor
from ftmon.trainer.hub.analyses.analysis import Analysis
from ftmon.trainer.hub.detect.process_facts import ProcessFacts


def test_a_death_counts_though_the_record_of_leftovers_cannot_be_read(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.path / "left.json").write_text("{")
    with pytest.raises(RunDirError):
        run.read_leftovers()
    found: list[ProcessFact] = []
    emit: Any = lambda _: (1, 1.0)  # noqa: E731
    analysis = Analysis(run.read_run(), emit)
    monkeypatch.setattr(analysis, "fact", found.append)
    supervisor = Supervisor(lambda: None)
    facts = ProcessFacts(run, supervisor, analysis, emit)
    supervisor.watch(3, os.getpid(), 1)  # no such process: this one began later
    supervisor.start()
    try:
        eventually(lambda: facts.collect() or found, "the death")
    finally:
        supervisor.stop()
    assert [(fact.rank, fact.alive) for fact in found] == [(3, False)]
