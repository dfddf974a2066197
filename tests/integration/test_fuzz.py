"""Broken frames against a real hub and the real app, for some seconds; ``bench/fuzz.py`` throws a million of them."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from eventually import eventually
from ftmon.protocol.errors import ProtocolError
from ftmon.protocol.host.process import this_process
from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import RunDir, RunFile
from ftmon.tui.app import FtmonApp
from ftmon.tui.model.run import RunModel
from ftmon.tui.source.replay import ReplaySource
from hostile import Frames
from hub_client import App
from scenes import settled

SEED = int(os.environ.get("FUZZ_SEED", "20261121"))
FRAMES = {"telemetry": 16_000, "ranks": 300, "control": 600, "query": 600}
KEYS = (*"vvv", "enter", "escape", "a", "enter", "escape", "escape", "l", "escape", "m", "escape", "e", "escape", "o",
        "escape", "s", "escape", "left_curly_bracket", "n")  # fmt: skip
RUN = RunFile("fuzz", "fuzz", 1.78e9, ["true"], "/", "here", "run")


def test_a_hub_lives_answers_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    run = rundir.create("fuzz", ["true"], "run")
    run.write_run(msgspec.structs.replace(run.read_run(), launcher=this_process()))
    log = (run.logs / "hub.log").open("wb")
    hub = subprocess.Popen([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], stderr=log)
    context: zmq.Context[Any] = zmq.Context()
    try:
        frames = Frames(SEED)
        makers = {
            "telemetry": frames.telemetry(),
            "ranks": frames.control(),
            "control": frames.control(),
            "query": frames.queries(),
        }
        with App(run) as app:
            for channel, count in FRAMES.items():
                line = peer_socket(context, channel, b"rank-0-1000-5000" if channel == "ranks" else None)
                line.connect(run.ipc_address(channel))
                for number, envelope in enumerate(itertools.islice(makers[channel], count)):
                    if number % 500 == 0:  # otherwise the hub's memory is that of what waits in its sockets
                        assert app.command("ping").ok, channel
                    assert line.poll(200_000, zmq.POLLOUT), f"{channel} is stuck"
                    line.send_multipart(envelope)
                    while line.poll(0):
                        line.recv_multipart()
                assert app.command("ping").ok, channel
                line.close(linger=60_000)  # what a loaded hub has not received yet waits in this socket
            eventually(lambda: recorded(run) > 1000, "the messages that can be read", every=0.5)
            assert psutil.Process(hub.pid).memory_info().rss < 200e6
    finally:
        context.destroy(linger=0)
        hub.terminate()
        hub.wait(200)
        log.close()
    assert "Traceback" not in (run.logs / "hub.log").read_text()
    with Reader(run.recording) as reader:
        assert reader.state_at(time.time() + 1)


def recorded(run: RunDir) -> int:
    with Reader(run.recording) as reader:
        return reader.info().last_seq


async def test_the_app_draws_a_recording_of_nonsense_on_every_screen(tmp_path: Path) -> None:
    frames, model = Frames(SEED), RunModel()
    writer = Writer(tmp_path / "nonsense.sqlite", RUN)
    seq = 0
    for _ in range(20_000):
        try:
            message = wire.decode_body(frames.body())
        except ProtocolError:
            continue
        if message is not None:
            seq += 1
            model.apply(Frame(seq, 1.78e9 + seq / 100, message))
            writer.append(seq, 1.78e9 + seq / 100, message)
    writer.close()
    assert seq > 3_000
    assert model.last_seq == seq
    source = ReplaySource(tmp_path / "nonsense.sqlite", at_end=True)
    try:
        app = FtmonApp(source)
        async with app.run_test(size=(120, 40)) as pilot:
            await settled(pilot)
            for key in KEYS:
                await pilot.press(key)
                await pilot.pause(0.02)
            assert source.model.ranks
    finally:
        source.close()
