"""Stack captures, with the real phase machine and a recorder whose entries the test writes."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.protocol.messages.memory import Cause
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.guard import Guard
from ftmon.trainer.probe.link.publisher import step_message
from ftmon.trainer.probe.memory.snapshots import CaptureContext, Recording
from ftmon.trainer.probe.memory.stacks import StackCapture
from ftmon.trainer.probe.phases.budget import Budget
from ftmon.trainer.probe.phases.tracker import Counts, Pace, Tracker
from ftmon.trainer.probe.rank.model import Trained

MIB = 2**20


class Recorder(Recording):
    """Keeps what it is switched to, and entries that a test adds, with stacks only while they are on."""

    mode: Any = "off"
    by_script: Any = False

    def __init__(self, keeps_history: bool = True) -> None:
        super().__init__()
        self.trace: list[dict[str, Any]] = []
        self.switched: list[str] = []
        self.keeps_history = keeps_history

    def numbers(self) -> bool:
        return self._to("numbers")

    def stacks(self, *, long: bool = False, frees: bool = False) -> bool:
        return self._to("long" if long else "stacks", clear=long)

    def off(self) -> bool:
        return self._to("off", clear=True)

    def read(self, device: int) -> list[dict[str, Any]]:
        return self.trace

    def _to(self, mode: Any, clear: bool = False) -> bool:
        if self.by_script:
            return False
        self.switched.append(mode)
        self.mode = "stacks" if mode == "long" else mode
        self.entries = 1000
        if clear or not self.keeps_history:
            self.cleared += 1
            self.trace.clear()
        return True


class Memory:
    measure: Any = "cuda"
    device_index = 0

    def __init__(self) -> None:
        self.now = self.peak = 5000 * MIB

    def sample(self) -> Any:
        taken = (self.now, self.peak)
        self.peak = self.now
        return taken

    def read(self, sample: Any) -> Reading:
        return Reading(sample[0], sample[1], sample[0], sample[1])


class Rig:
    def __init__(self, keeps_history: bool = True) -> None:
        self.memory = Memory()
        self.recorder = Recorder(keeps_history)
        self.recorder.numbers()
        self.steps: list[Any] = []
        self.sent: list[Any] = []
        self.answers: list[tuple[bool, str]] = []
        self.tracker = Tracker(self.memory, lambda: None, Counts(), self.steps.append, Guard(), Budget(0))
        model = torch.nn.Linear(64, 1024)
        rank: Any = SimpleNamespace(rank=3, world_size=2, device=SimpleNamespace(memory=self.memory))
        trained = Trained()
        trained.model, trained.partitions = (lambda: model), 2
        pace = Pace()
        pace.note(0.01)
        context = CaptureContext(rank, self.tracker, trained, pace, self.recorder, self.sent.append)
        self.stack_capture = StackCapture(context)

    def want(self, phase: str, steps: int = 1, from_step: int = 0, reason: str = "spike") -> None:
        self.stack_capture.want(phase, steps, from_step, reason, lambda ok, text, _: self.answers.append((ok, text)))

    def allocate(self, address: int, mib: int, *stack: str) -> None:
        self.memory.now += mib * MIB
        self.memory.peak = max(self.memory.peak, self.memory.now)
        frames = [{"filename": "loop.py", "line": 7, "name": name} for name in stack]
        self._note("alloc", address, mib, frames if self.recorder.mode == "stacks" else [])

    def free(self, address: int, mib: int) -> None:
        self.memory.now -= mib * MIB
        self._note("free_completed", address, mib, [])

    def run(self, count: int, **step: int) -> None:
        for _ in range(count):
            self.step(**step)

    def step(self, mib: int = 900, left: int = 0) -> None:
        """Forward, two occurrences of backward and an optimizer update that takes ``mib`` and leaves ``left``."""
        tracker = self.tracker
        for _ in range(2):
            tracker.enter("forward")
            self.allocate(1, 10, "forward")
            tracker.enter("backward")
            self.free(1, 10)
        tracker.enter("optimizer")
        self.allocate(2, mib, "_multi_tensor_adamw", "step")
        self.allocate(3, 1, "norm")
        self.free(3, 1)
        self.free(2, mib)
        if left:
            self.allocate(1000 + self.tracker.step, left, "remember")
        tracker.end_step()
        self.stack_capture.note(step_message(self.steps[-1], 3, self.memory.read, 0))
        self.stack_capture.tick()

    def _note(self, action: str, address: int, mib: int, frames: list[Any]) -> None:
        entry = {"action": action, "addr": address, "size": mib * MIB, "time_us": time.time_ns() // 1000}
        self.recorder.trace.append({**entry, "frames": frames})
        while time.time_ns() // 1000 <= entry["time_us"]:
            pass  # entries of different phases have different times, as a kernel launch between them would see to


@pytest.mark.parametrize("keeps_history", [True, False])
def test_stacks_are_on_for_one_phase_of_the_next_whole_step_and_name_what_came_and_went(keeps_history: bool) -> None:
    rig = Rig(keeps_history)
    rig.run(3)
    rig.tracker.enter("forward")
    rig.want("optimizer")
    rig.tracker.enter("optimizer")
    assert rig.recorder.mode == "numbers", "the step under way is half over"
    rig.tracker.end_step()
    rig.step(mib=930)
    (cause,) = rig.sent
    assert isinstance(cause, Cause)
    assert (cause.rank, cause.step, cause.phase, cause.reason) == (3, 5, "optimizer", "spike")
    sizes = (cause.transient_bytes, cause.attributed_bytes, cause.peak_bytes)
    assert sizes == (931 * MIB, 931 * MIB, 5931 * MIB)
    first, second = cause.groups
    assert (first.bytes, first.count, second.bytes) == (930 * MIB, 1, MIB)
    assert first.frames == ["loop.py:7 step", "loop.py:7 _multi_tensor_adamw"]
    assert (cause.parameter_bytes, cause.trainable) == (65 * 1024 * 4, 65 * 1024 // 2)
    assert min(cause.usual_us, cause.armed_us) > 0
    assert (cause.note, rig.tracker.watchers, rig.recorder.mode) == ("", (), "numbers")
    ((ok, text),) = rig.answers
    assert ok
    assert "_multi_tensor_adamw" in text


def test_of_several_occurrences_the_highest_counts_and_what_steps_left_is_told_from_what_is_freed():
    rig = Rig()
    rig.step()
    rig.want("forward")
    cleared = rig.recorder.cleared
    rig.run(2)
    (cause,) = rig.sent
    assert (cause.note, cause.transient_bytes) == ("the highest of 2 occurrences", 0)
    (group,) = cause.groups
    assert group.kept_bytes == group.bytes == 10 * MIB
    assert (rig.recorder.cleared, rig.recorder.switched.count("stacks")) == (cleared, 2)
    rig = Rig()
    rig.step()
    rig.want("", steps=3, reason="leak")
    rig.run(5, left=8)
    (cause,) = rig.sent
    assert (cause.reason, cause.phase, cause.transient_bytes) == ("leak", "", 16 * MIB)
    (group,) = cause.groups
    assert (group.count, group.frames) == (2, ["loop.py:7 remember"])
    assert rig.recorder.switched[-2:] == ["long", "off"]


def test_a_phase_that_does_not_come_is_waited_for_so_long_and_what_is_near_goes_first():
    rig = Rig()
    rig.want("checkpoint")
    rig.run(30)
    assert (rig.sent, rig.tracker.watchers) == ([], ())
    assert rig.answers == [(False, "phase 'checkpoint' did not occur in 24 steps")]
    assert rig.recorder.claim("another")
    rig = Rig()
    rig.want("optimizer", from_step=9)
    rig.want("optimizer")
    rig.want("", steps=2, reason="leak")
    assert rig.recorder.owner == "arm"
    rig.run(12, left=8)
    assert [(cause.step, cause.reason) for cause in rig.sent] == [(2, "spike"), (6, "leak"), (9, "spike")]
    assert rig.recorder.owner == ""
    assert rig.recorder.mode in ("numbers", "off")


def test_arming_is_refused_in_words_where_it_cannot_be() -> None:
    rig = Rig()
    rig.memory.measure = "glibc"
    rig.want("optimizer")
    rig.memory.measure = "cuda"
    for _ in range(5):
        rig.want("optimizer")
    assert [text for _, text in rig.answers] == [
        "this rank computes on the CPU: its allocations leave no trace to read",
        "4 recordings of stacks are waiting already",
    ]
    script = Rig()
    script.recorder.by_script = True
    script.want("optimizer")
    assert script.answers == [(False, "the script records memory history itself; it is left alone")]


def test_a_step_can_be_named_in_advance_and_the_recorder_is_free_for_others_until_it_is_near() -> None:
    rig = Rig()
    rig.want("optimizer", from_step=20)
    rig.step()
    assert (rig.recorder.owner, rig.tracker.watchers) == ("", ())
    rig.run(16)
    rig.stack_capture.tick()
    assert rig.recorder.owner == "arm"
    rig.run(4)
    assert [cause.step for cause in rig.sent] == [20]
