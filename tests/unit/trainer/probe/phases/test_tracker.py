import pytest
from ftmon.protocol.messages.telemetry import Span
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.link.publisher import closing_message, step_message
from ftmon.trainer.probe.phases import tracker as tracker_module
from ftmon.trainer.probe.phases.tracker import BatchCounts as Counted
from ftmon.trainer.probe.phases.tracker import Counts, Pace, Tracker

# How long a step usually takes.


def test_before_the_first_step_nothing_is_known():
    assert Pace().usual == 0.0


def test_a_step_that_is_unlike_the_others_is_no_measure():
    pace = Pace()
    for seconds in (40.0, 0.5, 0.5, 0.5, 0.5, 0.001):
        pace.note(seconds)
    assert pace.usual == 0.5


def test_steps_that_have_become_longer_are_believed_after_five():
    pace = Pace()
    for _ in range(20):
        pace.note(0.1)
    for _ in range(5):
        assert pace.usual == 0.1
        pace.note(3.0)
    assert pace.usual == 3.0


MIB = 2**20


class Memory:
    """A back end whose figures the test sets: (now, peak since the last sample), in MiB."""

    measure = "cuda"
    device_index = 0

    def __init__(self):
        self.now = self.peak = 0

    def set(self, now, peak=None):
        self.now, self.peak = now, max(now, peak or 0, self.peak)

    def sample(self):
        taken = (self.now * MIB, max(self.now, self.peak) * MIB)
        self.peak = self.now
        return taken

    def read(self, sample):
        now, peak = sample
        return Reading(now, peak, now * 2, peak * 2)


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        ns = 1_000_000_000

        def __call__(self):
            return self.ns

        def pass_ms(self, ms):
            self.ns += int(ms * 1e6)

    clock = Clock()
    monkeypatch.setattr(tracker_module, "perf_counter_ns", clock)
    return clock


@pytest.fixture
def rig(clock):
    class Rig:
        memory = Memory()
        counts = Counts()

        def step(self):
            return step_message(self.steps[-1], 3, self.memory.read, 0)

    rig = Rig()
    rig.steps = []
    rig.clock = clock
    rig.tracker = Tracker(rig.memory, lambda: None, rig.counts, rig.steps.append)
    return rig


def run_step(rig, micro_steps=1):
    for _ in range(micro_steps):
        for phase, ms in (("data", 1), ("forward", 10), ("backward", 20)):
            rig.tracker.enter(phase)
            rig.clock.pass_ms(ms)
        rig.tracker.enter("idle")
    rig.tracker.enter("optimizer")
    rig.clock.pass_ms(5)
    rig.tracker.end_step()


def test_a_step_has_its_phases_with_times_in_order_and_one_record_for_all_micro_steps(rig):
    run_step(rig)
    run_step(rig, micro_steps=3)
    step = rig.step()
    assert (step.rank, step.step, step.host_us) == (3, 2, 98_000)
    assert [(p.name, p.start_us, p.host_us, p.count) for p in step.phases] == [
        ("data", 0, 3000, 3),
        ("forward", 1000, 30_000, 3),
        ("backward", 11_000, 60_000, 3),
        ("optimizer", 93_000, 5000, 1),
    ]


def test_a_step_begins_where_the_one_before_ended_however_long_its_memory_took_to_read(rig, monkeypatch):
    monkeypatch.setattr(tracker_module, "time", lambda: rig.clock.ns / 1e9)
    run_step(rig)
    sample = rig.memory.sample
    rig.memory.sample = lambda: (rig.clock.pass_ms(40), sample())[1]
    rig.clock.pass_ms(1)
    rig.tracker.end_step()
    before = rig.step()
    del rig.memory.sample
    rig.clock.pass_ms(1)
    rig.tracker.end_step()
    assert rig.step().started == pytest.approx(before.started + before.host_us / 1e6, abs=1e-5)


def test_the_first_step_begins_where_init_ends(rig):
    rig.clock.pass_ms(500)
    run_step(rig)
    step = rig.step()
    init = step.phase("init")
    assert (init.start_us, init.host_us) == (-500_000, 500_000)
    assert step.host_us == 36_000


def test_a_phase_carries_the_peak_that_fell_into_it(rig):
    run_step(rig)
    rig.memory.set(100)
    rig.tracker.enter("forward")
    rig.clock.pass_ms(1)
    rig.memory.set(140, peak=150)
    rig.tracker.enter("backward")
    rig.clock.pass_ms(1)
    rig.memory.set(110, peak=190)
    rig.tracker.enter("optimizer")
    rig.memory.set(120, peak=400)
    rig.tracker.end_step()
    step = rig.step()
    forward, backward, optimizer = (step.phase(name).allocated for name in ("forward", "backward", "optimizer"))
    assert (forward.peak // MIB, forward.transient // MIB, forward.growth // MIB) == (150, 10, 40)
    assert (backward.start // MIB, backward.end // MIB, backward.peak // MIB) == (140, 110, 190)
    assert optimizer.transient // MIB == 280
    assert step.peak_phase.name == "optimizer"


def test_what_the_script_frees_after_a_bare_optimizer_is_not_the_next_phase_s(rig):
    run_step(rig)
    rig.memory.set(300)
    rig.tracker.enter("optimizer")
    rig.tracker.end_step()
    rig.memory.set(100)  # zero_grad
    rig.tracker.enter("data")
    rig.clock.pass_ms(1)
    rig.tracker.end_step()
    assert rig.step().phase("data").allocated.peak == 100 * MIB


def test_light_marks_take_the_next_figures_and_leave_the_peak_where_it_was(rig):
    rig.tracker.light = tracker_module.DRIVEN
    run_step(rig)
    rig.tracker.enter("backward")
    rig.memory.set(120, peak=900)
    rig.clock.pass_ms(1)
    rig.tracker.enter("idle")
    rig.clock.pass_ms(2)
    rig.tracker.enter("data")
    rig.clock.pass_ms(4)
    rig.memory.set(80)
    rig.tracker.enter("forward")
    rig.memory.set(90, peak=100)
    rig.tracker.end_step()
    step = rig.step()
    figures = {
        p.name: tuple(value // MIB for value in (p.allocated.start, p.allocated.end, p.allocated.peak))
        for p in step.phases
    }
    assert figures == {"backward": (0, 80, 900), "idle": (0, 80, 80), "data": (80, 80, 80), "forward": (80, 90, 100)}
    assert {p.name: p.host_us for p in step.phases} == {"backward": 1000, "idle": 2000, "data": 4000, "forward": 0}


def test_a_driven_steps_first_forward_begins_with_the_figures_of_the_steps_beginning(rig):
    rig.tracker.light = tracker_module.DRIVEN
    taken = []
    sample = rig.memory.sample
    rig.memory.sample = lambda: taken.append(rig.tracker.phase) or sample()
    rig.tracker.enter("optimizer")
    rig.memory.set(50, peak=700)
    rig.tracker.end_step()
    taken.clear()
    for phase, now, peak in (("data", 50, 50), ("forward", 55, 55), ("backward", 300, 400), ("idle", 60, 350)):
        rig.memory.set(now, peak)
        rig.tracker.enter(phase)
    rig.tracker.enter("optimizer")
    rig.tracker.end_step()
    assert taken == ["forward", "idle", "optimizer"], "one sample a boundary less than there are"
    step = rig.step()
    forward = step.phase("forward").allocated
    assert (forward.start // MIB, forward.end // MIB, forward.peak // MIB) == (50, 300, 400)
    assert step.phase("data").allocated.peak == 50 * MIB, "the update's peak of 700 is the update's"
    rig.tracker.watchers = (lambda before, after: None,)
    taken.clear()
    rig.tracker.enter("forward")
    assert taken == ["idle"], "who looks closer at a step gets exact figures"


def test_figures_taken_before_the_forward_are_its_beginning(rig):
    rig.tracker.light = tracker_module.DRIVEN
    rig.tracker.end_step()
    before = rig.tracker.open_scope("eval")
    rig.memory.set(80, peak=600)
    rig.tracker.close_scope(before)
    rig.memory.set(70)
    rig.tracker.enter("forward")
    rig.memory.set(90)
    rig.tracker.end_step()
    forward = rig.step().phase("forward").allocated
    assert (forward.start // MIB, forward.peak // MIB) == (70, 90)


def test_a_reset_by_the_script_loses_no_peak(rig):
    run_step(rig)
    rig.tracker.enter("forward")
    rig.clock.pass_ms(1)
    rig.memory.set(10, peak=500)
    rig.tracker.note_reset(rig.memory.sample())  # what the wrapper around the script's reset does
    rig.tracker.enter("backward")
    rig.clock.pass_ms(1)
    rig.memory.set(10, peak=700)
    rig.tracker.note_reset(rig.memory.sample())
    rig.tracker.end_step()
    step = rig.step()
    assert step.phase("forward").allocated.peak == 500 * MIB
    assert step.phase("forward").count == 1
    assert step.phase("backward").allocated.peak == 700 * MIB


def test_hooks_change_nothing_inside_a_scope_and_the_phase_before_comes_back(rig):
    run_step(rig)
    rig.tracker.enter("data")
    rig.clock.pass_ms(1)
    before = rig.tracker.open_scope("checkpoint")
    rig.tracker.enter("forward")
    inner = rig.tracker.open_scope("eval")
    rig.clock.pass_ms(7)
    rig.tracker.close_scope(inner)
    assert rig.tracker.phase == "checkpoint"
    rig.tracker.close_scope(before)
    assert rig.tracker.phase == "data"
    rig.clock.pass_ms(1)
    rig.tracker.end_step()
    assert rig.step().phase("checkpoint").host_us == 7000
    assert rig.step().phase("data").count == 2


def test_an_update_inside_an_optimizer_scope_ends_the_step_and_the_phase(rig):
    run_step(rig)
    rig.tracker.enter("backward")
    rig.clock.pass_ms(1)
    before = rig.tracker.open_scope("optimizer")
    rig.clock.pass_ms(2)
    rig.tracker.end_step()
    rig.tracker.close_scope(before)
    assert rig.tracker.phase == "idle"
    assert rig.step().phase("optimizer").host_us == 2000


def test_progress_moves_with_every_phase_and_only_then(rig):
    before = rig.tracker.progress
    rig.tracker.enter("data")
    moved = rig.tracker.progress
    rig.tracker.enter("data")
    assert before < moved == rig.tracker.progress


def test_idle_time_is_recorded_only_where_it_matters(rig):
    run_step(rig)
    rig.clock.pass_ms(1)
    run_step(rig)
    assert rig.step().phase("idle") is None
    rig.clock.pass_ms(30)
    run_step(rig)
    assert rig.step().phase("idle").host_us == 30_000


def test_collectives_are_counted_for_the_phase_they_were_entered_in(rig):
    run_step(rig)
    rig.tracker.enter("backward")
    rig.counts.entered += 4
    rig.counts.host_ns += 3_000_000
    rig.clock.pass_ms(4)
    rig.tracker.enter("optimizer")
    rig.counts.entered += 1
    rig.tracker.end_step()
    assert (rig.step().phase("backward").collectives, rig.step().phase("backward").collective_us) == (4, 3000)
    assert rig.step().phase("optimizer").collectives == 1
    assert rig.tracker.step_collectives == 5


def test_a_framework_s_own_step_number_is_taken_over(rig):
    rig.tracker.end_step(700)
    rig.tracker.end_step()
    assert [raw.number for raw in rig.steps] == [700, 701]


@pytest.mark.parametrize(("rows", "samples"), [((1, 2), 3), ((0, 0), 0), ((None, None), 8), ((1, None), 8)])
def test_rows_that_a_loop_counts_take_the_place_of_the_forwards(rig, rows, samples):
    rig.tracker.notes.samples = 8
    rig.tracker.notes.counts += [Counted(5, 4, 15, 5, one) for one in rows]
    run_step(rig)
    assert (rig.step().samples, rig.step().tokens, rig.step().label_tokens) == (samples, 10, 8)


def test_a_watcher_sees_every_boundary_once_it_is_put_in_and_the_end_of_the_step_as_end(rig):
    tracker = rig.tracker
    seen = []
    tracker.enter("data")
    tracker.watchers = (lambda before, after: seen.append((before, after)),)
    tracker.enter("forward")
    tracker.enter("backward")
    tracker.enter("optimizer")
    tracker.end_step()
    tracker.watchers = ()
    tracker.enter("data")
    assert seen == [("data", "forward"), ("forward", "backward"), ("backward", "optimizer"), ("optimizer", "end")]


def test_a_sliver_of_an_update_before_its_closure_is_no_phase_of_its_own(rig):
    run_step(rig)
    rig.tracker.enter("forward")
    rig.memory.set(100, peak=700)
    rig.tracker.enter("optimizer")
    rig.tracker.interrupt("forward")
    rig.clock.pass_ms(5)
    rig.memory.set(200)
    rig.tracker.enter("backward")
    rig.memory.set(300)
    rig.clock.pass_ms(5)
    rig.tracker.interrupt("optimizer")
    rig.clock.pass_ms(2)
    rig.memory.set(900)
    rig.tracker.end_step()
    step = rig.step()
    assert [(p.name, p.count, p.host_us) for p in step.phases] == [
        ("forward", 1, 5000),
        ("backward", 1, 5000),
        ("optimizer", 1, 2000),
    ]
    assert step.phase("forward").allocated.peak == 700 * MIB
    assert step.phase("optimizer").allocated == Span(300 * MIB, 900 * MIB, 900 * MIB)


def test_an_update_s_own_work_around_its_closure_stays_with_it(rig):
    run_step(rig)
    rig.tracker.enter("optimizer")
    rig.clock.pass_ms(3)
    rig.tracker.interrupt("forward")
    rig.clock.pass_ms(5)
    rig.tracker.enter("backward")
    rig.clock.pass_ms(5)
    rig.tracker.interrupt("optimizer")
    rig.clock.pass_ms(4)
    rig.tracker.end_step()
    assert (rig.step().phase("optimizer").host_us, rig.step().phase("optimizer").count) == (7000, 2)


def test_saving_during_start_up_is_start_up_and_no_time_of_the_first_step(rig):
    rig.clock.pass_ms(100)
    before = rig.tracker.open_scope("checkpoint")
    rig.clock.pass_ms(200)
    rig.tracker.close_scope(before)
    rig.clock.pass_ms(300)
    run_step(rig)
    step = rig.step()
    assert (step.host_us, step.phase("init").host_us, step.phase("checkpoint")) == (36_000, 600_000, None)


def test_after_a_rollout_the_script_is_not_waiting_for_data(rig):
    run_step(rig)
    rig.tracker.enter("data")
    before = rig.tracker.open_scope("generate")
    rig.clock.pass_ms(50)
    rig.tracker.close_scope(before)
    rig.clock.pass_ms(20)
    run_step(rig)
    assert {name: rig.step().phase(name).host_us for name in ("generate", "idle")} == {
        "generate": 50_000,
        "idle": 20_000,
    }


def test_a_phase_that_is_renamed_after_the_script_has_reset_its_peaks_is_renamed(rig):
    run_step(rig)
    rig.clock.pass_ms(1)
    rig.tracker.note_reset(rig.memory.sample())
    rig.clock.pass_ms(1)
    rig.tracker.rename("forward")
    rig.tracker.enter("backward")
    rig.tracker.end_step()
    assert rig.step().phase("forward").host_us == 2000


def test_a_job_that_only_generates_keeps_a_bounded_number_of_marks_and_the_time_of_each_phase(rig, monkeypatch):
    monkeypatch.setattr(tracker_module, "MOST_MARKS", 100)
    rig.clock.pass_ms(5)
    for turn in range(1000):
        before = rig.tracker.open_scope("generate")
        rig.clock.pass_ms(7)
        if turn % 10 == 0:
            rig.tracker.note_reset(rig.memory.sample())
        rig.counts.entered += 1
        rig.tracker.close_scope(before)
        rig.clock.pass_ms(2)
    assert len(rig.tracker.marks) <= 100
    closing = closing_message(rig.tracker.closing_step(True), 3, rig.memory.read)
    phases = {record.name: record for record in closing.phases}
    assert (phases["init"].host_us, phases["init"].collectives) == (5_000, 0)
    assert (phases["generate"].host_us, phases["generate"].collectives) == (7_000_000, 1000)
    assert closing.host_us == 9_000_000


def test_a_step_whose_phases_are_watched_keeps_all_its_marks(rig, monkeypatch):
    monkeypatch.setattr(tracker_module, "MOST_MARKS", 100)
    rig.tracker.watchers = (lambda ended, begun: None,)
    marks = rig.tracker.marks
    for _ in range(200):
        rig.tracker.close_scope(rig.tracker.open_scope("eval"))
    assert rig.tracker.marks is marks
