"""The same training across two hosts, and what is struck only there: the agent of the other host, and the cable."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir

from .. import hosts
from .scene import ChaosError, Scene
from .training import steps_done

AGENT = "ftmon.trainer.agent"
CUT_SECONDS = (2.0, 8.0)


class TwoHostScene(Scene):
    """A rank on each of two hosts; which one is on the hub's is drawn."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.rank_there = draw.randrange(2)
        self._stack = contextlib.ExitStack()
        self._hosts: hosts.Hosts | None = None

    @property
    def hosts(self) -> hosts.Hosts:
        """The hosts, once they were made."""
        if self._hosts is None:
            raise ChaosError("no hosts were made")
        return self._hosts

    def begin(self, *arguments: str) -> RunDir:
        self._hosts = self._stack.enter_context(hosts.made(self.folder, self.environment, self.rank_there))
        return self.hosts.start("chaos", self.script, *arguments)

    def words(self, *words: str) -> list[str]:
        return self.hosts.words(*words)

    def rank_here(self) -> int:
        return 1 - self.rank_there

    def pid(self, rank: int) -> int:
        pid = super().pid(rank)
        return self.hosts.two.pid_from_b(pid) if rank == self.rank_there else pid

    def agent(self) -> int:
        """Give the pid of the other host's agent."""
        pids = self.hosts.two.pids_on_b(AGENT)
        if len(pids) != 1:
            raise ChaosError(f"{len(pids)} agents")
        return pids[0]

    def monitor(self) -> list[int]:
        return [*super().monitor(), self.agent()]

    def wait_recorded(self) -> None:
        """Wait until what the rank of the other host has done by now is recorded."""
        now = steps_done(self.folder, self.rank_there)
        after = 0

        def arrived() -> bool:
            nonlocal after
            found = False
            with Reader(self.run.recording) as reader:
                while frames := reader.frames(after, 5000):
                    after = frames[-1].seq
                    steps = [frame.message for frame in frames if isinstance(frame.message, Step)]
                    found = found or any(step.rank == self.rank_there and step.step >= now for step in steps)
            return found

        self.wait(arrived, 40, f"step {now} of the other host in the recording")

    def sockets(self) -> list[str]:
        return [*super().sockets(), *self.hosts.sockets_there()]

    def clean(self) -> None:
        try:
            super().clean()
        finally:
            self._stack.close()


def kill_agent(scene: TwoHostScene) -> None:
    pid = scene.agent()
    os.kill(pid, signal.SIGKILL)
    scene.wait(lambda: scene.hosts.two.pids_on_b(AGENT) not in ([], [pid]), 40, "another agent")
    scene.wait_recorded()


def stop_agent(scene: TwoHostScene) -> None:
    scene.freeze(scene.agent())
    scene.wait_recorded()
    scene.wait_quiet()


def cut_link(scene: TwoHostScene) -> None:
    """The cable is out for seconds, and the hub may die meanwhile; nothing is on a way that both ends know of."""
    two, begun = scene.hosts.two, time.time()
    end = scene.draw.choice(("nodea", "nodeb"))
    seconds = scene.draw.uniform(*CUT_SECONDS)
    kill = scene.draw.uniform(0.0, seconds) if scene.draw.random() < 0.3 else None
    two.cable("down", end)
    if kill is not None:
        time.sleep(kill)
        os.kill(scene.hub(), signal.SIGKILL)
    time.sleep(max(0.0, begun + seconds - time.time()))
    two.cable("up", end)
    scene.wait_steps(20)
    scene.excused.append((begun, time.time()))
    scene.wait_recorded()
    scene.wait_quiet()


HOSTS: dict[str, Callable[[TwoHostScene], None]] = {
    "kill agent": kill_agent,
    "stop agent": stop_agent,
    "cut link": cut_link,
}
"""None of them ends the training; only a cut link may hold it up."""
