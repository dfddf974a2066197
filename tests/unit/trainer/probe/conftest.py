"""The training thread of a rank without a publisher, as all tests of hooks and loops have it."""

import pytest
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.probe import active
from ftmon.trainer.probe.events import TorchEvents
from ftmon.trainer.probe.loop.training import Training
from ftmon.trainer.probe.phases import tracker
from ftmon.trainer.probe.phases.tracker import Counts, StopRequest
from ftmon.trainer.probe.probe import Probe
from ftmon.trainer.probe.rank.context import RankContext


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    """What this process's hooks report to; phases of any length count, however fast this machine is."""
    monkeypatch.setattr(tracker, "SLIVER_NS", -1)
    training = Training(RankContext(0, 0, 1, RunDir("run")), Counts())
    monkeypatch.setattr(active, "events", TorchEvents(training))
    monkeypatch.setattr(active, "probe", Probe(training, StopRequest()))
    return training
