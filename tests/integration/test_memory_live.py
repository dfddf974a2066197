"""Explanations of memory of a run that is on: shown as they come, asked for by keys, followed on the command line."""

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eventually import SECONDS, eventually
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.messages.control import Result, RunState
from ftmon.protocol.messages.telemetry import AllocatorEvents, Stacks
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.run.rundir import ExitFile, RunDir
from ftmon.tui.app import FtmonApp
from ftmon.tui.screens.lists import StackList, StacksScreen
from ftmon.tui.screens.memory import EventsScreen, MemoryScreen
from ftmon.tui.source.live import LiveSource
from ftmon.tui.widgets import state
from ftmon.tui.widgets.base import Canvas
from ftmon_process import Ftmon
from peaks import Explained
from scenes import STACKS, until
from small_hub import SmallHub
from streams import RUN

FRAMES = list(Explained(2, steps=24).frames())
HALF = next(index for index, frame in enumerate(FRAMES) if getattr(frame.message, "step", 0) == 12)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    monkeypatch.setattr(state, "MESSAGE_SECONDS", SECONDS)
    run = RunDir(tmp_path / "runs" / RUN.id)
    run.path.mkdir(parents=True, mode=0o700)
    for folder in (run.logs, run.snapshots):
        folder.mkdir()
    run.write_run(RUN)
    return run


@pytest.fixture
def hub(run: RunDir) -> Iterator[SmallHub]:
    with SmallHub(run) as hub:
        yield hub


def put(hub: SmallHub, frames: list[Frame]) -> None:
    for frame in frames:
        hub.put(frame.message)


def shown(app: Any) -> str:
    return "\n".join(widget.plain for widget in app.screen.query(Canvas) if widget.display)


async def test_what_comes_is_shown_and_what_is_asked_for_is_told(run, hub):
    put(hub, FRAMES[:HALF])
    source = LiveSource(run)
    app = FtmonApp(source)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: len(app.app_state.model.ranks) == 2 and source.can_command, "both ranks")
            await pilot.press("m")
            await until(pilot, lambda: isinstance(app.screen, MemoryScreen) and app.screen.is_mounted, "the memory")
            await until(pilot, lambda: "of step 8" in shown(app), "the composition recorded before")
            put(hub, FRAMES[HALF:])
            await until(pilot, lambda: "of step 24" in shown(app), "the composition that came")
            assert "c parts" in shown(app)
            for key, verb, words in (
                ("c", "compose", "a step was analysed"),
                ("x", "arm", "stacks were recorded"),
                ("t", "snapshot", "done"),
            ):
                await pilot.press("down" if key == "x" else "up", key)
                await until(pilot, lambda v=verb: hub.commands and hub.commands[-1].verb == v, verb)
                await until(pilot, lambda w=words: w in shown(app).splitlines()[-1], words)
            asked = {command.verb: command.args for command in hub.commands}
            assert asked["compose"] == {"ranks": [0]}
            assert asked["arm"] == {"ranks": [1], "phase": asked["arm"]["phase"]}
            assert asked["arm"]["phase"] in ("backward", "optimizer")
            await pilot.press("e")
            await until(pilot, lambda: isinstance(app.screen, EventsScreen), "the events")
            await until(pilot, lambda: "step 24: 9,120 entries" in shown(app), "the sampled step")
    finally:
        source.close()


async def test_a_read_only_app_asks_for_nothing(run, hub):
    put(hub, FRAMES[:HALF])
    source = LiveSource(run)
    app = FtmonApp(source, read_only=True)
    try:
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.app_state.model.ranks, "a rank")
            await pilot.press("m")
            await until(pilot, lambda: isinstance(app.screen, MemoryScreen) and app.screen.is_mounted, "the memory")
            await pilot.press("x")
            await until(pilot, lambda: "read-only: arm is refused" in shown(app), "the refusal")
            assert hub.commands == []
    finally:
        source.close()


async def test_native_frames_that_cannot_be_read_are_told_and_so_are_stacks_that_were_read(run, hub):
    put(hub, FRAMES[:HALF])
    hub.put(Stacks(0, RUN.created + 30, STACKS, "asked"))
    hub.completes = False
    source = LiveSource(run)
    app = FtmonApp(source)

    async def answered(pilot: Any, verb: str, data: dict[str, Any], text: str) -> None:
        command = await until(pilot, lambda: hub.commands and hub.commands.pop(), verb)
        assert command.verb == verb
        hub.put(Result(command.id, True, verb, text, data))

    try:
        async with app.run_test(size=(80, 24)) as pilot:

            def has_stacks() -> object:
                rank = app.app_state.model.ranks.get(0)
                return source.can_command and rank is not None and rank.stacks

            await until(pilot, has_stacks, "the stacks")
            await pilot.press("s")
            await until(pilot, lambda: isinstance(app.screen, StacksScreen) and app.screen.is_mounted, "the stacks")
            lines = app.screen.query_one(StackList)
            await until(pilot, lambda: lines.waiting, "the request on the screen")
            await answered(pilot, "stacks", {"answers": {"0": {"text": STACKS}}}, "stacks of rank 0")
            await until(pilot, lambda: not lines.waiting and "stacks of rank 0" in shown(app), "the answer")
            await pilot.press("t")
            await answered(pilot, "stacks", {"answers": {"0": {"text": STACKS, "no_native": "no py-spy"}}}, "stacks")
            await until(pilot, lambda: "rank 0, no native frames: no py-spy" in shown(app), "why there are none")
    finally:
        source.close()


def test_followed_events_come_through_a_pipe_and_end_with_the_run(run, tmp_path):
    hub = SmallHub(run)
    put(hub, FRAMES[:HALF])
    with Ftmon(tmp_path).start("events", str(run.path), "--follow", "--json") as process:
        first = json.loads(process.stdout.readline())
        assert (first["rank"], first["step"]) == (0, 1)
        put(hub, FRAMES[HALF:])
        seen = [json.loads(process.stdout.readline()) for _ in range(2 * 5 - 1)]
        assert sorted((each["step"], each["rank"]) for each in seen)[-1] == (24, 1)
        hub.put(RunState(state="failed", time=RUN.created + 60, exit_code=1))
        run.write_exit(ExitFile(1, RUN.created + 60, "failed"))
        hub.close()
        assert process.wait(timeout=200) == 1
        assert process.stdout.read() == ""


def test_ctrl_c_ends_following_with_130(run, hub, tmp_path):
    put(hub, FRAMES[:HALF])
    with Ftmon(tmp_path).start("events", run.id, "--follow") as process:
        assert "rank 0 step 1" in process.stdout.readline()
        # The events that follow are those of the source, which is up once the first of them came.
        hub.put(AllocatorEvents(rank=0, step=99, time=RUN.created + 600, phases=[], retries=2))
        eventually(lambda: "2 retries" in process.stdout.readline(), "the live event")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=200) == 130


def test_following_ends_once_the_runs_launcher_and_hub_are_gone(run, tmp_path):
    dead = ProcessId(1, 1)
    run.write_run(msgspec.structs.replace(RUN, launcher=dead))
    hub = SmallHub(run, dead)
    put(hub, FRAMES[:HALF])
    hub.close()
    ended = Ftmon(tmp_path).run("events", run.id, "--follow", seconds=200)
    assert ended.returncode == 1
    assert "rank 0 step 1" in ended.stdout
    assert "its launcher and its hub are gone" in ended.stderr


def test_a_run_directory_asks_the_ranks_of_its_run_for_their_stacks(run, hub, tmp_path):
    run.write_run(msgspec.structs.replace(RUN, host=socket.gethostname()))
    with Ftmon(tmp_path).start("stacks", str(run.path)) as process:
        eventually(lambda: [command.verb for command in hub.commands] == ["stacks"], "the command")
        process.terminate()
