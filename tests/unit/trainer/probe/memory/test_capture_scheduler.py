"""Step captures of a rank, on a simulated allocator and real clocks."""

import time
from types import SimpleNamespace

import pytest
from caching_allocator import CachingAllocator
from ftmon.protocol.analysis.allocator.composition import messages_of
from ftmon.protocol.messages.memory import Composition, StepTrace
from ftmon.protocol.messages.telemetry import AllocatorEvents
from ftmon.protocol.run.rundir import RunOptions
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.guard import Guard
from ftmon.trainer.probe.memory import capture_scheduler
from ftmon.trainer.probe.memory.capture_scheduler import FIRST_STEPS, CaptureScheduler
from ftmon.trainer.probe.memory.snapshots import CaptureContext
from ftmon.trainer.probe.phases.budget import Budget
from ftmon.trainer.probe.phases.tracker import Counts, Pace, Tracker
from ftmon.trainer.probe.rank.model import Trained

MIB = 2**20


class Device(CachingAllocator):
    """The memory back end of a simulated device; its trace carries this machine's time."""

    measure, device_index = "cuda", 0

    def __init__(self):
        super().__init__()
        self.since = 0

    def record(self, *fields, **more):
        super().record(*fields, time_us=time.time_ns() // 1000, **more)

    def sample(self):
        now = self.now()
        peak = max([now.allocated, *(figure.allocated for figure in self.figures[self.since :])])
        self.since = len(self.figures)
        return Reading(now.allocated, peak, now.reserved, now.reserved)

    def read(self, sample):
        return sample


class Recorder:
    """The recorder of that device: what has been recorded since it was switched on."""

    def __init__(self, device):
        self.device, self.mode, self.owner, self.by_script = device, "off", "", False
        self.cleared, self.entries, self.begun, self.whole, self.fitted = 0, 0, 0, False, 0

    def numbers(self, *, whole=False):
        self.mode, self.whole, self.entries = "numbers", whole, 100_000 if whole else 25_000
        self.cleared += 1
        self.begun = len(self.device.trace)
        return True

    def fit(self, entries):
        self.fitted = entries

    def off(self):
        self.mode = "off"
        return True

    def snapshot(self):
        return self.device.snapshot(len(self.device.trace) - self.begun)


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(capture_scheduler, "MIN_SECONDS", 0.0)
    device, sent = Device(), []
    tracker = Tracker(device, lambda: None, Counts(), lambda _: None, Guard(), Budget(0))
    context = SimpleNamespace(
        device=SimpleNamespace(memory=device, info=SimpleNamespace(capacity_bytes=0)),
        rank=5,
        world_size=1,
        options=RunOptions(),
    )
    pace = Pace()
    pace.note(0.01)
    recorder = Recorder(device)
    watch = CaptureScheduler(CaptureContext(context, tracker, Trained(), pace, recorder, sent.append))
    watch.note_sent(1 << 62)
    device.alloc(30 * MIB)

    def step(during=lambda: None):
        tracker.enter("forward")
        kept = [device.alloc(2 * MIB) for _ in range(50)]
        during()
        device.free(device.alloc(7 * MIB))
        tracker.enter("backward")
        for block in kept:
            device.free(block)
        device.free(device.alloc(20 * MIB))
        tracker.enter("optimizer")
        device.free(device.alloc(9 * MIB))
        tracker.end_step()

    def steps(count):
        for _ in range(count):
            watch.tick()
            step()

    def want(reason):
        answers = []
        watch.want(reason, lambda *answer: answers.append(answer))
        return answers

    return SimpleNamespace(
        tracker=tracker, watch=watch, sent=sent, step=step, steps=steps, recorder=recorder, pace=pace, want=want
    )


def found(rank, kind=Composition):
    """Find what the hub does in the traces that were sent."""
    return [message for trace in rank.sent for message in messages_of(trace) if isinstance(message, kind)]


def test_the_first_steps_are_captured_each_by_one_trace_that_serves_both_messages(rank):
    rank.steps(10)
    assert [(one.reason, one.step) for one in found(rank)][:3] == [("first", 1), ("first", 3), ("first", 5)]
    events = found(rank, AllocatorEvents)
    assert [one.step for one in events] == [one.step for one in found(rank)]
    for one in found(rank):
        phases = {phase.name: phase.parts for phase in one.phases}
        assert phases["forward"] == {"other": 30 * MIB, "activations": 100 * MIB, "temporaries": 7 * MIB}
        assert phases["backward"] == {"other": 30 * MIB, "activations": 100 * MIB}
        assert phases["optimizer"] == {"other": 30 * MIB, "temporaries": 9 * MIB}
        assert (one.rank, one.note) == (5, "")
        assert one.walk_us >= 0
        assert one.read_us > 0
    allocations = {phase.name: phase.allocations for phase in events[-1].phases}
    assert allocations == {"forward": 51, "backward": 1, "optimizer": 1}
    assert rank.recorder.fitted == 2 * (51 + 1 + 1), "every allocation and free of a step"
    assert rank.tracker.watchers == () or rank.watch._capture in rank.tracker.watchers


@pytest.mark.parametrize(("share", "hub_seconds"), [(1e-9, 0.0), (1e9, 1.0)], ids=["the ranks' time", "the hub's"])
def test_later_captures_wait_until_the_last_one_is_paid_for(rank, monkeypatch, share, hub_seconds):
    monkeypatch.setattr(capture_scheduler, "TIME_SHARE", share)
    monkeypatch.setattr(capture_scheduler, "HUB_SECONDS", hub_seconds)
    rank.steps(20)
    assert (len(found(rank)), rank.tracker.watchers, rank.recorder.whole) == (FIRST_STEPS, (), False)
    answers = rank.want("spike")
    rank.steps(3)
    rank.watch.tick()
    assert found(rank)[-1].reason == "spike"
    assert answers == [(True, f"step {found(rank)[-1].step}", {})]
    assert len(found(rank)) == FIRST_STEPS + 1


def test_another_user_of_the_recorder_gets_it_and_the_capture_comes_later(rank):
    rank.watch.tick()
    rank.step(during=lambda: setattr(rank.recorder, "owner", "arm"))
    rank.steps(1)
    rank.watch.tick()
    assert (rank.sent, rank.tracker.watchers) == ([], ())
    rank.recorder.owner = ""
    rank.steps(3)
    assert len(found(rank)) == 1


def test_a_script_that_records_for_itself_is_left_alone_and_the_asker_is_told(rank):
    rank.recorder.by_script = True
    assert rank.want("asked") == [(False, "the script records memory history itself; it is left alone", {})]
    rank.steps(3)
    assert rank.sent == []


def test_with_events_off_a_rank_is_captured_on_request_and_the_recorder_is_off_again(rank):
    rank.watch._wanted = False
    rank.steps(3)
    assert (rank.sent, rank.recorder.mode) == ([], "off")
    rank.want("asked")
    rank.steps(3)
    rank.watch.tick()
    assert [one.reason for one in found(rank)] == ["asked"]
    assert rank.recorder.mode == "off"


def test_an_asker_hears_when_no_step_ends(rank, monkeypatch):
    monkeypatch.setattr(capture_scheduler, "PATIENCE_SECONDS", -1.0)
    rank.pace.usual = 0.0
    answers = rank.want("asked")
    rank.watch.tick()
    time.sleep(0.01)
    rank.watch.tick()
    assert answers == [(False, "no step ended in time", {})]


def test_what_is_found_in_a_step_follows_the_step_s_own_message(rank):
    rank.watch.note_sent(0)
    rank.watch.tick()
    rank.step()
    for _ in range(3):
        rank.watch.tick()
    assert rank.sent == []
    rank.watch.note_sent(1)
    rank.watch.send_ready()
    assert [(type(message), message.step) for message in rank.sent] == [(StepTrace, 1)]
