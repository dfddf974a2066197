"""Ranks of other hosts that nobody hears of."""

from typing import Any

import pytest
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello
from ftmon.protocol.run.rundir import RunFile
from ftmon.trainer.hub.analyses import Analysis
from ftmon.trainer.hub.detect import PATIENCE_SECONDS, MissingRanks
from ftmon.trainer.hub.ranks import RankHosts


def hello(rank: int, world: int) -> Hello:
    return Hello(rank, 0, world, "node", 10 + rank, 5, DeviceInfo("cpu", 0, "x", 1), "glibc", 1.0)


@pytest.mark.parametrize("listen", ["0.0.0.0:7420", ""])
def test_ranks_that_are_missing_for_a_minute_are_told_of_until_they_come(listen: str) -> None:
    said: list[Any] = []
    analysis = Analysis(
        RunFile("r", "r", 1.0, [], "/", "node", "run"), lambda message: said.append(message) or (1, 1.0)
    )
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
    assert alert.title == "1 of 3 ranks have not reported"
    assert alert.evidence["missing"] == [1]
    assert listen in alert.text
    rank_hosts.register(hello(1, 3), away=True)
    missing.tick(20.0 + PATIENCE_SECONDS)
    assert said[-1].resolved is not None
