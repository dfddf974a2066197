"""A hub leaves when the end was told, apps have had their time, and nothing is under way or still to come."""

import pytest
from ftmon.protocol.run.rundir import ExitFile
from ftmon.trainer.hub.agents import BACK_SECONDS
from ftmon.trainer.hub.end import AGENTS_END_SECONDS, LINGER_SECONDS, SETTLE_SECONDS, RunEnd


class Run:
    """A run whose end and whose agents are what a test says."""

    def __init__(self, state: str) -> None:
        self.end: ExitFile | None = None
        self._end = ExitFile(1, 0.0, state)
        self.told: list[ExitFile] = []
        self.busy = self.connected = self.absent = False
        self.run_end = RunEnd(self, lambda: self.end, self.told.append, lambda now: self.busy)

    def ends(self) -> None:
        self.end = self._end

    def reachable(self) -> bool:
        return self.connected

    def missed(self) -> bool:
        return self.absent

    def run_is_over(self, grace: float) -> None:
        self.grace = grace


@pytest.mark.parametrize(("state", "settles"), [("failed", SETTLE_SECONDS), ("finished", 0.0)])
def test_the_end_is_told_once_and_the_hub_stays_a_while(state: str, settles: float) -> None:
    run = Run(state)
    assert not run.run_end.tick(0.0)
    run.ends()
    assert not run.run_end.tick(1.0)
    assert bool(run.told) == (not settles)
    assert not run.run_end.tick(1.0 + settles)
    assert [end.state for end in run.told] == [state]
    assert not run.run_end.tick(1.0 + settles)
    assert not run.run_end.tick(1.0 + settles + LINGER_SECONDS - 0.1)
    assert run.run_end.tick(1.0 + settles + LINGER_SECONDS)
    assert len(run.told) == 1


def test_agents_that_are_connected_may_send_the_rest_but_not_for_ever() -> None:
    run = Run("stopped")
    run.connected = True
    run.ends()
    assert not run.run_end.tick(0.0)
    assert not run.run_end.tick(AGENTS_END_SECONDS - 0.1)
    assert not run.told
    assert not run.run_end.tick(AGENTS_END_SECONDS)
    assert run.told


def test_the_hub_stays_while_it_is_busy_and_for_hosts_that_may_come_back() -> None:
    run = Run("finished")
    run.busy = run.absent = True
    run.ends()
    run.run_end.tick(0.0)
    run.run_end.tick(0.0)
    assert not run.run_end.tick(LINGER_SECONDS)
    run.busy = False
    assert not run.run_end.tick(LINGER_SECONDS)
    assert run.run_end.tick(BACK_SECONDS)
