"""What an agent leaves on its host when it ends."""

import signal
from collections.abc import Iterator

import msgspec
import pytest
from ftmon.protocol.link import keys
from ftmon.protocol.link.sockets import JoinFile, read_join, write_join
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.agent.agent import Agent
from ftmon.trainer.host import loop


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def agent(run: RunDir) -> Agent:
    pair, server = keys.agent_pair(run), keys.server_pair(run)
    join = JoinFile(str(run.path), run.id, "nodea", "boot", [], 1, server.public, pair.public, pair.secret, "0")
    path = write_join(run, msgspec.structs.replace(join, pushed=True))
    return Agent(run, read_join(path), path)


def test_the_key_stays_for_the_next_agent_where_this_one_failed_and_goes_with_an_orderly_end(run, monkeypatch):
    def fail(*_: object) -> None:
        raise ValueError("too many failures")

    failing = agent(run)
    monkeypatch.setattr(loop, "serve", fail)
    with pytest.raises(ValueError, match="too many failures"):
        failing.run()
    assert (run.path / "join.json").exists()
    orderly = agent(run)
    monkeypatch.setattr(loop, "serve", lambda *_: None)
    assert orderly.run() == 0
    assert not (run.path / "join.json").exists()
