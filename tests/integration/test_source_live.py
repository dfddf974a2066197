"""A live source on real sockets: joining late, holes in the stream, rewinding, a hub that dies, a run that ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq
from eventually import SECONDS, eventually
from ftmon.protocol.host.process import ProcessId, start_ticks, this_process
from ftmon.protocol.link import sockets
from ftmon.protocol.messages import control
from ftmon.protocol.messages.control import Alert, HubStats
from ftmon.protocol.messages.telemetry import Heartbeat, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import ExitFile, HubFile, RunDir
from ftmon.tui.model import RunModel
from ftmon.tui.model.run import status
from ftmon.tui.source import live as feed_module
from ftmon.tui.source.live import LiveSource
from ftmon.tui.source.ssh import TIMEOUT_S
from models import folded
from small_hub import SmallHub
from streams import Stream


@pytest.fixture
def process() -> Iterator[ProcessId]:
    """A process that stands for the hub's, so that a test can end it."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = start_ticks(child.pid)
    assert ticks is not None
    yield ProcessId(child.pid, ticks)
    child.kill()
    child.wait(timeout=SECONDS)


def pump(source: LiveSource, until: Callable[[], bool]) -> None:
    eventually(until, "what was to be shown", each=source.pump, state=lambda: source.connection, every=0.002)


def settle(source: LiveSource) -> None:
    pump(source, lambda: not source.transport.seeking)


def now_frames(steps: int, *, heartbeats: bool = False, finished: bool = False) -> list[Frame]:
    """A stream whose last message is of this moment."""
    length = 0.05
    stream = Stream(ranks=2, steps=steps, step_s=length, heartbeats=heartbeats, finished=finished)
    stream.started = time.time() - steps * length * 1.1
    return list(stream.frames())


def feed(hub: SmallHub, frames: list[Frame], *, published: bool = True) -> list[Frame]:
    return [hub.put(frame.message, frame.t, published=published) for frame in frames]


def beat(step: int) -> Heartbeat:
    return Heartbeat(0, step, "forward", time.time(), step, time.time())


def stats(error: str) -> HubStats:
    return HubStats(time.time(), 1, 0, 0, 0, {}, 0, 0, 0, error)


def same(source: LiveSource, frames: list[Frame]) -> None:
    expected, model = folded(frames), source.model
    assert model.last_seq == expected.last_seq
    left, right = status(model), status(expected)
    for rank in left["ranks"] + right["ranks"]:
        del rank["tokens_per_second"]
    # The clock of a live view runs on, and speed is taken against it.
    about = {"time", "seconds_left", "steps_per_second", "tokens_per_second"}
    about |= {"id", "name", "kind", "command", "created"}
    assert {name for name in left if left[name] != right[name]} <= about
    for number, rank in expected.ranks.items():
        assert model.ranks[number].last == rank.last
        assert [step.step for step in model.ranks[number].steps] == [step.step for step in rank.steps]


@contextmanager
def watching(run: RunDir, sent: list[Frame] | None = None) -> Generator[LiveSource]:
    """Follow a run; its hub is connected, and ``sent`` is shown."""
    with closing(LiveSource(run)) as source:
        source.start()
        pump(source, lambda: source.connection.state == "live")
        shows(source, sent or [])
        yield source


def shows(source: LiveSource, sent: list[Frame], model: Callable[[], RunModel] | None = None) -> None:
    found = model or (lambda: source.model)
    pump(source, lambda: not sent or found().last_seq == sent[-1].seq)


def test_a_late_join_shows_history_the_live_tail_and_what_a_hole_left_out_of_it(run):
    frames = now_frames(200)
    with SmallHub(run) as hub:
        sent = feed(hub, frames[:100])
        with watching(run) as source:
            sent += feed(hub, frames[100:200])
            shows(source, sent)
            same(source, sent)
            sent += feed(hub, frames[200:390], published=False)
            sent += feed(hub, frames[390:])
            shows(source, sent)
            same(source, sent)


def test_what_is_published_while_joining_is_there_once(run):
    # Fewer numbers than a join looks back: it is complete however late it comes.
    frames = now_frames(100, heartbeats=True)
    with SmallHub(run) as hub, closing(LiveSource(run)) as source:
        sent = feed(hub, frames[:300])
        rest: list[Frame] = []

        def publish() -> None:
            for frame in frames[300:]:
                rest.append(hub.put(frame.message, frame.t))
                time.sleep(0.0002)

        publisher = threading.Thread(target=publish)
        publisher.start()
        source.start()
        pump(source, lambda: not publisher.is_alive() and source.model.last_seq == rest[-1].seq)
        steps = [frame.message for frame in sent + rest if isinstance(frame.message, Step)]
        for number in (0, 1):
            mine = [step.step for step in steps if step.rank == number]
            assert [step.step for step in source.model.ranks[number].steps] == mine[-240:]


def test_after_a_hole_too_long_to_be_fetched_the_charts_have_their_past(run, monkeypatch):
    monkeypatch.setattr(feed_module, "_MAX_FETCHED", 100)
    frames = now_frames(900)
    with SmallHub(run) as hub:
        feed(hub, frames[:100])
        with watching(run) as source:
            pump(source, lambda: source.model.step > 0)
            joined = source.model
            feed(hub, frames[100:-10], published=False)
            sent = feed(hub, frames[-10:])
            pump(source, lambda: source.model.last_seq == sent[-1].seq and source.model is not joined)
            pump(source, lambda: source.model.moments[0].first_step in range(10))


def test_heartbeats_that_did_not_come_are_no_loss(run, process):
    frames = now_frames(60)
    hub = SmallHub(run, process)
    sent = feed(hub, frames[:100])
    hub.put(beat(20), published=False)  # before the app was there
    with watching(run) as source:
        sent += feed(hub, frames[100:110])
        shows(source, sent)
        hub.put(beat(21), published=False)  # while it was busy
        sent += feed(hub, frames[110:120])
        shows(source, sent)
        assert source.connection.lost == 0
        run.write_exit(ExitFile(0, time.time(), "finished"))
        end(hub, process)
        pump(source, lambda: source.connection.state == "ended")
        assert source.connection.lost == 0


def test_what_was_neither_published_nor_recorded_is_told_as_lost_at_once(run):
    frames = now_frames(60)
    with SmallHub(run) as hub:
        feed(hub, frames[:100])
        with watching(run) as source:
            hub.put(stats("no space left on the device"), recorded=False)
            for frame in frames[100:107]:
                hub.put(frame.message, frame.t, published=False, recorded=False)
            hub.put(stats(""))
            pump(source, lambda: source.connection.lost == 7)
            assert source.connection.state == "live"
            hub.put(beat(21), published=False)
            shows(source, feed(hub, frames[107:110]))
            assert source.connection.lost == 7


def test_without_a_hub_a_command_is_refused_in_words_and_with_one_it_gets_both_answers(run):
    with closing(LiveSource(run)) as source:
        source.start()
        record = source.commands[source.send(control.Kill())]
        pump(source, lambda: record.done)
        assert "hub is gone" in record.accepted.text
        assert source.connection.state == "connecting"
    with SmallHub(run) as hub:
        feed(hub, now_frames(5))
        with watching(run) as source:
            pump(source, lambda: source.can_command)
            record = source.commands[source.send(control.Stacks([1]))]
            # The result is published too, and that may come before both.
            pump(source, lambda: record.done and record.accepted is not None)
            assert hub.commands[0].args == {"ranks": [1]}
            assert record.accepted.ok
            assert record.result.text == "done"
            pump(source, lambda: len(source.model.results) == 1)


def test_rewinding_a_live_run_and_returning_loses_nothing(run):
    frames = now_frames(120)
    with SmallHub(run) as hub:
        sent = feed(hub, frames[:200])
        with watching(run, sent) as source:
            step = source.model.step
            source.transport.step(-10)
            settle(source)
            assert (source.transport.mode, source.transport.playing) == ("rewound", False)
            assert source.model.step == step - 10
            sent += feed(hub, frames[200:])
            shows(source, sent, lambda: source.live_model)
            assert source.model.step == step - 10
            source.transport.step(1)
            settle(source)
            assert source.model.step == step - 9
            source.transport.live()
            source.pump()
            assert source.transport.mode == "live"
            same(source, sent)


def test_pausing_holds_the_view_while_the_run_goes_on(run):
    frames = now_frames(100)
    with SmallHub(run) as hub:
        sent = feed(hub, frames[:200])
        with watching(run, sent) as source:
            source.transport.toggle()
            settle(source)
            held = source.model.step
            assert not source.transport.playing
            sent += [hub.put(frame.message) for frame in frames[200:]]
            shows(source, sent, lambda: source.live_model)
            assert source.model.step == held
            assert source.transport.last >= source.transport.position
            for _ in range(6):
                source.transport.faster()
            source.transport.play()
            pump(source, lambda: source.transport.mode == "live")
            same(source, sent)


def test_from_the_live_end_the_alert_before_is_reached_and_nothing_is_ahead(run):
    with SmallHub(run) as hub:
        sent = feed(hub, now_frames(120))
        with watching(run, sent) as source:
            source.transport.skip(10)
            source.pump()
            assert source.transport.mode == "live"
            assert source.transport.message
            raised: dict[int, float] = {}
            for frame in sent:
                if isinstance(frame.message, Alert):
                    raised.setdefault(frame.message.id, frame.t)
            assert len(source.transport.marks) == len({mark.alert_id for mark in source.transport.marks}) > 0
            source.transport.previous_alert()
            settle(source)
            assert source.transport.mode == "rewound"
            assert source.transport.position == list(raised.values())[-1]


def test_of_a_dead_hub_the_past_is_read_from_the_file_until_a_new_one_is_taken_up(run, process):
    frames = now_frames(100)
    hub = SmallHub(run, process)
    sent = feed(hub, frames[:200])
    with watching(run, sent) as source:
        end(hub, process)
        pump(source, lambda: source.connection.state == "hub-gone")
        assert "train on" in source.connection.text
        assert not source.can_command
        assert source.model.last_seq == sent[-1].seq
        source.transport.goto("20")
        settle(source)
        assert source.model.step == 20
        source.transport.live()
        with SmallHub(run) as second:
            sent += feed(second, frames[200:])
            pump(source, lambda: source.connection.state == "live" and source.model.last_seq == sent[-1].seq)
            same(source, sent)


def test_after_a_restart_of_the_hub_the_steps_before_it_are_shown_to_early_and_late(run, process):
    frames = now_frames(100)
    hub = SmallHub(run, process)
    sent = feed(hub, frames[:200])
    with watching(run) as early:
        for number in range(5):  # numbered, shown, and in no recording: the next hub counts from before them
            hub.put(beat(number), frames[199].t)
        pump(early, lambda: early.model.last_seq == sent[-1].seq + 5)
        end(hub, process)
        pump(early, lambda: early.connection.state == "hub-gone")
        with SmallHub(run) as second:
            pump(early, lambda: early.connection.state == "live")
            sent += feed(second, frames[200:])
            shows(early, sent)
            with watching(run, sent) as late:
                for rank in (*early.model.ranks.values(), *late.model.ranks.values()):
                    assert [step.step for step in rank.steps] == list(range(1, 101))


def test_a_hole_that_a_dying_hub_could_not_fill_is_filled_by_the_next(run, process):
    frames = now_frames(200)
    with SmallHub(run, process) as hub:
        sent = feed(hub, frames[:100])
        with watching(run) as source:
            sent += feed(hub, frames[100:110])
            shows(source, sent)
            hub.mute = True
            sent += feed(hub, frames[110:300], published=False)
            sent += feed(hub, frames[300:310])
            kill(process)
            pump(source, lambda: source.connection.state == "hub-gone")
            hub.mute = False
            run.write_hub(msgspec.structs.replace(hub.file, process=this_process()))
            pump(source, lambda: source.connection.state == "live" and source.model.last_seq == sent[-1].seq)
            same(source, sent)


def test_a_run_that_ends_while_watched_is_shown_to_its_end(run, process):
    frames = now_frames(60, finished=True)
    hub = SmallHub(run, process)
    sent = feed(hub, frames[:100])
    with watching(run) as source:
        sent += feed(hub, frames[100:], published=False)
        run.write_exit(ExitFile(0, time.time(), "finished"))
        end(hub, process)
        pump(source, lambda: source.connection.state == "ended")
        assert source.model.state == "finished"
        same(source, sent)
        source.transport.goto("0%")
        settle(source)
        assert source.model.step == 0


def test_a_run_that_was_over_before_opens_as_its_recording(run, process):
    hub = SmallHub(run, process)
    sent = feed(hub, now_frames(60, finished=True))
    end(hub, process)
    run.write_exit(ExitFile(0, time.time(), "finished"))
    with closing(LiveSource(run)) as source:
        source.start()
        pump(source, lambda: source.connection.state == "ended")
        same(source, sent)
        with Reader(run.recording) as reader:
            assert source.model.now == reader.info().last_t
        source.transport.play()
        settle(source)
        assert source.transport.playing
        assert source.model.step < 60


def test_a_hub_that_comes_up_after_the_job_is_waited_for_while_the_launcher_lives(run, process, monkeypatch):
    run.write_run(msgspec.structs.replace(run.read_run(), launcher=process))
    run.write_exit(ExitFile(1, time.time(), "failed"))
    looks: list[object] = []
    look = RunDir.living_hub
    monkeypatch.setattr(RunDir, "living_hub", lambda self: looks.append(self) or look(self))
    with closing(LiveSource(run)) as source:
        source.start()
        pump(source, lambda: len(looks) > 2)
        assert source.connection.state == "connecting"
        with SmallHub(run) as hub:
            sent = feed(hub, now_frames(60, finished=True))
            pump(source, lambda: source.model.ended)
            same(source, sent)


def kill(process: ProcessId) -> None:
    os.kill(process.pid, signal.SIGKILL)


def end(hub: SmallHub, process: ProcessId) -> None:
    hub.close()
    kill(process)


def test_a_source_closes_while_it_waits_for_a_hub_that_is_silent(run, process):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    silent = sockets.hub_socket(context, "query")
    sockets.bind(silent, run.ipc_address("query"))
    addresses = {channel: run.ipc_address(channel) for channel in sockets.CHANNELS}
    run.write_hub(HubFile(process, addresses, "0", "here", time.time()))
    source = LiveSource(run)
    source.start()
    assert silent.poll(int(SECONDS * 1000))  # it has asked
    begun = time.monotonic()
    source.close()
    assert time.monotonic() - begun < TIMEOUT_S
    context.destroy(linger=0)
