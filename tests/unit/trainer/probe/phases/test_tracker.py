"""Phases of a step, from the boundaries that a training thread passes to the message of the step."""

import pytest
from ftmon.protocol.messages.telemetry import Span
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.guard import Guard
from ftmon.trainer.probe.link.publisher import closing_message, step_message
from ftmon.trainer.probe.phases import tracker as tracker_module
from ftmon.trainer.probe.phases.budget import Budget
from ftmon.trainer.probe.phases.tracker import BatchCounts, Counts, Pace, Tracker

MIB = 2**20


@pytest.mark.parametrize(
    ("seconds", "usual"),
    [([], 0.0), ([40.0, 0.5, 0.5, 0.5, 0.5, 0.001], 0.5), ([0.1] * 20 + [3.0] * 4, 0.1), ([0.1] * 20 + [3.0] * 5, 3.0)],
    ids=["no step", "a step unlike the others", "four longer ones", "longer from now on"],
)
def test_the_usual_time_of_a_step_is_that_of_most(seconds, usual):
    pace = Pace()
    for each in seconds:
        pace.note(each)
    assert pace.usual == usual


class Memory:
    """A back end whose figures the test sets: (now, peak since the last sample), in MiB."""

    measure = "cuda"
    device_index = 0
    now = peak = 0

    def set(self, now, peak=None):
        self.now, self.peak = now, max(now, peak or 0, self.peak)

    def sample(self):
        taken = (self.now * MIB, max(self.now, self.peak) * MIB)
        self.peak = self.now
        return taken

    def read(self, sample):
        now, peak = sample
        return Reading(now, peak, now * 2, peak * 2)


class Rig:
    """A tracker, the clock and the memory that it reads, and the steps that it ends."""

    def __init__(self):
        self.ns = 1_000_000_000

    def start(self):
        self.memory, self.counts, self.steps = Memory(), Counts(), []
        self.tracker = Tracker(self.memory, lambda: None, self.counts, self.steps.append, Guard(), Budget(0))

    def pass_ms(self, ms):
        self.ns += int(ms * 1e6)

    def go(self, phase, ms=0, now=None, peak=None, by="enter"):
        """Enter a phase with these figures of the memory, and spend a time in it."""
        if now is not None:
            self.memory.set(now, peak)
        getattr(self.tracker, by)(phase)
        self.pass_ms(ms)

    def scope(self, phase, ms=0):
        before = self.tracker.open_scope(phase)
        self.pass_ms(ms)
        self.tracker.close_scope(before)

    def end(self, now=None, peak=None):
        if now is not None:
            self.memory.set(now, peak)
        self.tracker.end_step()
        return step_message(self.steps[-1], 3, self.memory.read, 0)

    def run_step(self, micro_steps=1):
        for _ in range(micro_steps):
            for phase, ms in (("data", 1), ("forward", 10), ("backward", 20), ("idle", 0)):
                self.go(phase, ms)
        self.go("optimizer", 5)
        return self.end()


def mib(step, phase, *names):
    return tuple(getattr(step.phase(phase).allocated, name) // MIB for name in names)


@pytest.fixture
def rig(monkeypatch):
    rig = Rig()
    monkeypatch.setattr(tracker_module, "perf_counter_ns", lambda: rig.ns)
    rig.start()
    return rig


@pytest.fixture
def second(rig):
    rig.run_step()
    return rig


def test_a_step_has_its_phases_with_times_in_order_and_one_record_for_all_micro_steps(second):
    step = second.run_step(micro_steps=3)
    assert (step.rank, step.step, step.host_us) == (3, 2, 98_000)
    assert [(p.name, p.start_us, p.host_us, p.count) for p in step.phases] == [
        ("data", 0, 3000, 3),
        ("forward", 1000, 30_000, 3),
        ("backward", 11_000, 60_000, 3),
        ("optimizer", 93_000, 5000, 1),
    ]


def test_a_step_begins_where_the_one_before_ended_however_long_its_memory_took_to_read(second, monkeypatch):
    monkeypatch.setattr(tracker_module, "time", lambda: second.ns / 1e9)
    sample = second.memory.sample
    second.memory.sample = lambda: (second.pass_ms(40), sample())[1]
    second.pass_ms(1)
    before = second.end()
    del second.memory.sample
    second.pass_ms(1)
    assert second.end().started == pytest.approx(before.started + before.host_us / 1e6, abs=1e-5)


def test_the_first_step_begins_where_init_ends(rig):
    rig.pass_ms(500)
    step = rig.run_step()
    init = step.phase("init")
    assert (init.start_us, init.host_us, step.host_us) == (-500_000, 500_000, 36_000)


def test_a_phase_carries_the_peak_that_fell_into_it_and_a_reset_by_the_script_loses_none(second):
    second.go("forward", 1, 100)
    second.go("backward", 1, 140, peak=150)
    second.go("optimizer", 0, 110, peak=190)
    step = second.end(120, peak=400)
    assert mib(step, "forward", "peak", "transient", "growth") == (150, 10, 40)
    assert mib(step, "backward", "start", "end", "peak") == (140, 110, 190)
    assert mib(step, "optimizer", "transient") == (280,)
    assert step.peak_phase.name == "optimizer"
    for phase, peak in (("forward", 500), ("backward", 700)):
        second.go(phase, 1)
        second.memory.set(10, peak=peak)
        second.tracker.note_reset(second.memory.sample())  # what the wrapper around the script's reset does
    step = second.end()
    assert mib(step, "forward", "peak") + mib(step, "backward", "peak") == (500, 700)
    assert step.phase("forward").count == 1


def test_what_the_script_frees_after_a_bare_optimizer_is_not_the_next_phase_s(second):
    second.go("optimizer", 0, 300)
    second.end()
    second.go("data", 1, 100)  # after zero_grad
    assert mib(second.end(), "data", "peak") == (100,)


def test_light_marks_take_the_next_figures_and_leave_the_peak_where_it_was(rig):
    rig.tracker.light = tracker_module.DRIVEN
    rig.run_step()
    rig.go("backward")
    rig.pass_ms(1)
    rig.go("idle", 2, 120, peak=900)
    rig.go("data", 4)
    rig.go("forward", 0, 80)
    step = rig.end(90, peak=100)
    figures = {p.name: (*mib(step, p.name, "start", "end", "peak"), p.host_us) for p in step.phases}
    assert figures == {
        "backward": (0, 80, 900, 1000),
        "idle": (0, 80, 80, 2000),
        "data": (80, 80, 80, 4000),
        "forward": (80, 90, 100, 0),
    }


def test_a_driven_steps_first_forward_begins_with_the_figures_of_the_steps_beginning(rig):
    rig.tracker.light = tracker_module.DRIVEN
    taken = []
    sample = rig.memory.sample
    rig.memory.sample = lambda: taken.append(rig.tracker.phase) or sample()
    rig.go("optimizer")
    rig.end(50, peak=700)
    taken.clear()
    for phase, now, peak in (("data", 50, 50), ("forward", 55, 55), ("backward", 300, 400), ("idle", 60, 350)):
        rig.go(phase, 0, now, peak)
    rig.go("optimizer")
    step = rig.end()
    assert taken == ["forward", "idle", "optimizer"], "one sample a boundary less than there are"
    assert mib(step, "forward", "start", "end", "peak") == (50, 300, 400)
    assert mib(step, "data", "peak") == (50,), "the update's peak of 700 is the update's"
    rig.tracker.watchers = (lambda before, after: None,)
    taken.clear()
    rig.go("forward")
    assert taken == ["idle"], "who looks closer at a step gets exact figures"


def test_figures_taken_before_the_forward_are_its_beginning(rig):
    rig.tracker.light = tracker_module.DRIVEN
    rig.end()
    before = rig.tracker.open_scope("eval")
    rig.memory.set(80, peak=600)
    rig.tracker.close_scope(before)
    rig.go("forward", 0, 70)
    assert mib(rig.end(90), "forward", "start", "peak") == (70, 90)


def test_hooks_change_nothing_inside_a_scope_and_the_phase_before_comes_back(second):
    second.go("data", 1)
    before = second.tracker.open_scope("checkpoint")
    second.go("forward")
    second.scope("eval", 7)
    assert second.tracker.phase == "checkpoint"
    second.tracker.close_scope(before)
    assert second.tracker.phase == "data"
    second.pass_ms(1)
    step = second.end()
    assert (step.phase("checkpoint").host_us, step.phase("data").count) == (7000, 2)


def test_an_update_in_an_optimizer_scope_ends_the_step_and_its_work_around_a_closure_stays_with_it(second):
    second.go("backward", 1)
    before = second.tracker.open_scope("optimizer")
    second.pass_ms(2)
    step = second.end()
    second.tracker.close_scope(before)
    assert (second.tracker.phase, step.phase("optimizer").host_us) == ("idle", 2000)
    for phase, ms, by in (("optimizer", 3, "enter"), ("forward", 5, "interrupt"), ("backward", 5, "enter")):
        second.go(phase, ms, by=by)
    second.go("optimizer", 4, by="interrupt")
    optimizer = second.end().phase("optimizer")
    assert (optimizer.host_us, optimizer.count) == (7000, 2)


def test_progress_moves_with_every_phase_and_only_then(rig):
    before = rig.tracker.progress
    rig.go("data")
    moved = rig.tracker.progress
    rig.go("data")
    assert before < moved == rig.tracker.progress


def test_idle_time_is_recorded_only_where_it_matters_and_after_a_rollout_no_data_is_waited_for(second):
    second.pass_ms(1)
    assert second.run_step().phase("idle") is None
    second.pass_ms(30)
    assert second.run_step().phase("idle").host_us == 30_000
    second.go("data")
    second.scope("generate", 50)
    second.pass_ms(20)
    step = second.run_step()
    assert (step.phase("generate").host_us, step.phase("idle").host_us) == (50_000, 20_000)


def test_collectives_are_counted_for_the_phase_they_were_entered_in(second):
    second.go("backward")
    second.counts.entered += 4
    second.counts.host_ns += 3_000_000
    second.pass_ms(4)
    second.go("optimizer")
    second.counts.entered += 1
    step = second.end()
    assert (step.phase("backward").collectives, step.phase("backward").collective_us) == (4, 3000)
    assert (step.phase("optimizer").collectives, second.tracker.step_collectives) == (1, 5)


@pytest.mark.parametrize(("rows", "samples"), [((1, 2), 3), ((0, 0), 0), ((None, None), 8), ((1, None), 8)])
def test_rows_that_a_loop_counts_take_the_place_of_the_forwards(rig, rows, samples):
    rig.tracker.notes.samples = 8
    rig.tracker.notes.counts += [BatchCounts(5, 4, 15, 5, one) for one in rows]
    step = rig.run_step()
    assert (step.samples, step.tokens, step.label_tokens) == (samples, 10, 8)


def test_a_watcher_sees_every_boundary_once_it_is_put_in_and_the_end_of_the_step_as_end(rig):
    seen = []
    rig.go("data")
    rig.tracker.watchers = (lambda before, after: seen.append((before, after)),)
    for phase in ("forward", "backward", "optimizer"):
        rig.go(phase)
    rig.end()
    rig.tracker.watchers = ()
    rig.go("data")
    assert seen == [("data", "forward"), ("forward", "backward"), ("backward", "optimizer"), ("optimizer", "end")]


def test_a_sliver_of_an_update_before_its_closure_is_no_phase_of_its_own(second):
    second.go("forward")
    second.go("optimizer", 0, 100, peak=700)
    second.go("forward", 5, by="interrupt")
    second.go("backward", 5, 200)
    second.go("optimizer", 2, 300, by="interrupt")
    step = second.end(900)
    expected = [("forward", 1, 5000), ("backward", 1, 5000), ("optimizer", 1, 2000)]
    assert [(p.name, p.count, p.host_us) for p in step.phases] == expected
    assert mib(step, "forward", "peak") == (700,)
    assert step.phase("optimizer").allocated == Span(300 * MIB, 900 * MIB, 900 * MIB)


def test_saving_during_start_up_is_start_up_and_no_time_of_the_first_step(rig):
    rig.pass_ms(100)
    rig.scope("checkpoint", 200)
    rig.pass_ms(300)
    step = rig.run_step()
    assert (step.host_us, step.phase("init").host_us, step.phase("checkpoint")) == (36_000, 600_000, None)


def test_a_phase_that_is_renamed_after_the_script_has_reset_its_peaks_is_renamed(second):
    second.pass_ms(1)
    second.tracker.note_reset(second.memory.sample())
    second.pass_ms(1)
    second.tracker.rename("forward")
    second.go("backward")
    assert second.end().phase("forward").host_us == 2000


def test_a_job_that_only_generates_keeps_a_bounded_number_of_marks_and_the_time_of_each_phase(rig, monkeypatch):
    monkeypatch.setattr(tracker_module, "MOST_MARKS", 100)
    rig.pass_ms(5)
    for turn in range(1000):
        before = rig.tracker.open_scope("generate")
        rig.pass_ms(7)
        if turn % 10 == 0:
            rig.tracker.note_reset(rig.memory.sample())
        rig.counts.entered += 1
        rig.tracker.close_scope(before)
        rig.pass_ms(2)
    assert len(rig.tracker.marks) <= 100
    closing = closing_message(rig.tracker.closing_step(True), 3, rig.memory.read)
    phases = {record.name: (record.host_us, record.collectives) for record in closing.phases}
    assert (phases["init"], phases["generate"]) == ((5_000, 0), (7_000_000, 1000))
    assert closing.host_us == 9_000_000


def test_a_step_whose_phases_are_watched_keeps_all_its_marks(rig, monkeypatch):
    monkeypatch.setattr(tracker_module, "MOST_MARKS", 100)
    rig.tracker.watchers = (lambda ended, begun: None,)
    marks = rig.tracker.marks
    for _ in range(200):
        rig.scope("eval")
    assert rig.tracker.marks is marks
