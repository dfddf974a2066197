"""A hub that cannot be started is tried again until it can."""

import sys
import time

import pytest
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.launch.launcher import HubKeeper


def test_each_start_that_fails_is_followed_by_another_later(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    keeper = HubKeeper(run)
    keeper.start()
    delays: list[float] = []
    while len(delays) < 3:
        delay = keeper.tend()
        assert delay is not None, "the launcher would wait for a signal without end"
        delays.append(delay)
        if len(delays) < 3:
            time.sleep(delay)
    assert delays == sorted(delays)
    assert not keeper.alive
