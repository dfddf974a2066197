"""What a peak consists of, on traces whose truth is known."""

import gc
import gzip
import pickle
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from ftmon.protocol.analysis.allocator.allocations import Allocations
from ftmon.protocol.analysis.allocator.composition import Timeline, entries_of_step, messages_of
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.memory import PARTS, Composition, Sightings, StepMark, StepTrace
from ftmon.protocol.messages.telemetry import AllocatorEvents
from ftmon.trainer.hub import trace_worker
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.guard import Guard
from ftmon.trainer.probe.memory import composition
from ftmon.trainer.probe.phases.budget import Budget
from ftmon.trainer.probe.phases.tracker import Counts, Mark, Tracker
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA
from simulated_step import SimulatedStep, same
from snapshot_files import compact
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

MIB = 2**20
ROOM = 10**6


class Memory:
    device_index = 0

    def __init__(self, measure="cuda"):
        self.measure = measure

    def sample(self):
        return None


def capturing(roots, measure="cuda"):
    """Make a capture that watches a tracker; ``roots`` is what it walks, or a function that returns that."""
    tracker = Tracker(Memory(measure), lambda: None, Counts(), lambda _: None, Guard(), Budget(0))
    index = 0 if measure == "cuda" else None
    capture = composition.StepCapture(tracker, roots if callable(roots) else lambda: roots, index, "first")
    tracker.watchers = (capture,)
    return tracker, capture


def look_at(marks, walks=(), sightings=(), recomputed=()):
    """Make the look that a step with these marks would have left; places in time are microseconds."""
    _, capture = capturing(None)
    capture.marks, capture.step, capture.done = marks, 7, True
    for mark, held in walks:
        capture.walks.append(
            composition.Walked(marks[mark].ns, mark, {at: composition.Held(1, part) for at, part in held.items()}, {})
        )
    capture.sightings = [composition.Sighting(us * 1000 - 500, address, part) for us, address, part in sightings]
    capture.recomputed = [(begin * 1000 - 500, end * 1000 - 500) for begin, end in recomputed]
    return capture


def messages(capture, snapshot, room=ROOM):
    """Make the messages as rank and hub do together, from the bytes that cross between them."""
    trace = wire.decode_body(wire.encode_body(composition.step_trace(capture, lambda: snapshot, 0, 3, same, room, 0)))
    found = {type(message): message for message in messages_of(trace)}
    return SimpleNamespace(trace=trace, composition=found.get(Composition), events=found.get(AllocatorEvents))


def compose(step, room=ROOM, last=None, **more):
    made = messages(look_at(step.marks, **more), step.snapshot(last), room)
    for phase in made.composition.phases:
        assert sum(phase.parts.values()) == phase.peak_bytes == step.peaks[phase.name]
        assert set(phase.parts) <= set(PARTS)
        assert all(value > 0 for value in phase.parts.values())
    return {phase.name: phase for phase in made.composition.phases}, made


def parts(other=0, **mib):
    return {name: size * MIB for name, size in mib.items()} | ({"other": other} if other else {})


@pytest.mark.parametrize("expandable", [False, True])
def test_the_blocks_of_a_plain_step_go_to_the_parts_they_are_of(expandable):
    step = SimulatedStep(expandable)
    weights, workspace = step.alloc(40 * MIB), step.alloc(8 * MIB + 300)
    step.mark("forward")
    scratch = step.alloc(3 * MIB)
    saved = [step.alloc(5 * MIB) for _ in range(4)]
    step.free(scratch)
    step.mark("backward")
    gradient, largest = step.alloc(40 * MIB), step.alloc(12 * MIB)
    step.free(largest)
    for block in saved:
        step.free(block)
    step.mark("optimizer")
    moment = step.alloc(80 * MIB)
    step.free(step.alloc(40 * MIB))
    step.free(gradient)
    step.mark("idle")
    known = {weights: "parameters"}
    walks = [(0, known), (2, {**known, gradient: "gradients"}), (3, {**known, moment: "optimizer_states"})]
    phases, made = compose(step, walks=walks)
    other = step.peaks["forward"] - 63 * MIB
    assert 8 * MIB <= other <= 10 * MIB
    both = {"other": other, "parameters": 40}
    assert phases["forward"].parts == parts(**both, activations=20, temporaries=3)
    assert phases["backward"].parts == parts(**both, gradients=40, activations=20, temporaries=12)
    assert phases["optimizer"].parts == parts(**both, gradients=40, optimizer_states=80, temporaries=40)
    assert workspace
    assert made.composition.note == ""
    assert made.composition.known == {"parameters": 1, "optimizer_states": 1}
    assert phases["optimizer"].reserved_bytes >= phases["optimizer"].peak_bytes
    assert phases["forward"].at_us < phases["backward"].at_us < phases["optimizer"].at_us


def play(script):
    """Play a step's moves; return the step, and what a look at it would have seen.

    A move is a phase; ``block+MIB`` (allocated); ``block-`` (freed); ``block~`` and ``block!`` (freed, and free once
    its stream has passed); ``block?part`` (seen); ``[`` and ``]`` (layers go forward again).
    """
    step, blocks, seen, recomputed = SimulatedStep(), {}, [], []
    for move in script.split():
        name, sign, rest = re.fullmatch(r"([]\w[]+)([-+~!?]?)(\w*)", move).groups()
        if sign == "+":
            blocks[name] = step.alloc(int(rest) * MIB)
        elif sign == "?":
            seen.append((step.now_us, blocks[name], rest))
        elif sign == "!":
            step.complete(blocks[name])
        elif sign:
            step.free(blocks[name], wait=sign == "~")
        elif name in "[]":
            recomputed.append(step.now_us)
        else:
            step.mark(name)
    return step, {"sightings": seen, "recomputed": list(zip(recomputed[::2], recomputed[1::2], strict=True))}


SEEN = "gathered?parameters gradient?gradients bucket?gradients bucket?buckets"


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (  # the last block has the gradient's address
            f"backward gathered+6 bucket+20 gradient+30 {SEEN} gradient- gathered- bucket- again+30 again- idle",
            {"backward": parts(parameters=6, buckets=20, gradients=30)},
        ),
        (
            "backward [ kept+7 dropped+2 dropped- ] own+9 own- kept- idle",
            {"backward": parts(activations=7, temporaries=9)},
        ),
        (
            "forward outputs+12 backward a+4 a- forward b+5 b- optimizer c+6 c- outputs- idle",
            {
                "backward": parts(activations=12, temporaries=4),
                "forward": parts(other=12 * MIB, temporaries=5),
                "optimizer": parts(other=12 * MIB, temporaries=6),
            },
        ),
        ("forward waiting+8 waiting~ a+3 a- waiting! idle", {"forward": parts(temporaries=8)}),
    ],
    ids=["seen in between", "of a second forward", "outputs kept until a backward has passed", "waits for a stream"],
)
def test_blocks_go_to_the_parts_they_are_of_though_they_come_and_go_within_a_phase(script, found):
    step, look = play(script)
    phases, _ = compose(step, **look)
    assert {name: phase.parts for name, phase in phases.items()} == found


@pytest.mark.parametrize("counted", [9, 10])
def test_the_gap_between_trace_and_counters_is_unattributed_and_said(counted):
    # Of two blocks, only one fits below the counters.
    step, _ = play("forward a+8 a- idle" if counted == 9 else "forward a+8 b+8 b- a- idle")
    step.marks[1] = step.marks[1]._replace(memory=step.marks[1].memory._replace(allocated_peak=counted * MIB))
    step.peaks["forward"] = counted * MIB
    phases, made = compose(step)
    assert phases["forward"].parts == {"temporaries": 8 * MIB, "unattributed": (counted - 8) * MIB}
    if counted == 9:
        assert "the trace has 8388608 bytes where the allocator counted 9437184" in made.composition.note


def test_a_boundary_moves_to_where_counters_agree_and_a_phase_that_left_the_ring_is_named():
    step, _ = play("forward kept+4 backward kept- idle")
    step.marks[1] = step.marks[1]._replace(ns=step.marks[1].ns - 150_000)
    phases, made = compose(step)
    assert phases["forward"].parts == {"activations": 4 * MIB}
    forward, backward = made.events.phases
    assert (forward.name, forward.allocations, forward.frees) == ("forward", 1, 0)
    assert (backward.name, backward.allocations, backward.frees) == ("backward", 0, 1)
    step, _ = play(f"forward {'a+1 a- ' * 10} backward b+2 b- idle")
    phases, made = compose(step, room=6, last=6)
    assert list(phases) == ["backward"]
    assert made.composition.note == "forward: its allocations had left the recorder's ring"
    assert made.events is None
    assert entries_of_step(made.trace) == 0


def test_events_are_counted_by_phase_with_what_rates_need():
    step = SimulatedStep()
    step.mark("forward")
    small, large = step.alloc(512), step.alloc(4 * MIB)
    step.mark("backward")
    step.free(small)
    step.mark("forward")
    step.free(large)
    step.alloc(1000)
    step.mark("idle")
    _, made = compose(step)
    forward, backward = made.events.phases
    assert (forward.name, forward.allocations, forward.allocated_bytes) == ("forward", 3, 512 + 4 * MIB + 1000)
    assert forward.largest == [4 * MIB, 1000, 512]
    assert (forward.segment_allocations, forward.segment_bytes) == (2, 22 * MIB)
    assert (backward.name, backward.frees, backward.freed_bytes) == ("backward", 1, 512)
    assert forward.host_us + backward.host_us == made.events.host_us > 0
    assert entries_of_step(made.trace) == 5
    events = made.events
    assert (events.allocated_bytes, events.rounding_bytes, events.free_bytes) == (1024, 24, 22 * MIB - 1024)
    assert (events.reserved_bytes, events.largest_free_block_bytes, events.segments) == (22 * MIB, 20 * MIB, 2)


moves = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(1, 30 * MIB)),
        st.tuples(st.sampled_from(["free", "wait", "see"]), st.integers(0, 10**6)),
        st.tuples(st.just("mark"), st.sampled_from(["forward", "backward", "optimizer", "data", "idle", "eval"])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(moves, st.booleans(), st.integers(0, 6))
def test_parts_always_add_up_to_the_peak_and_a_whole_trace_leaves_nothing_over(moves, expandable, before):
    step = SimulatedStep(expandable)
    live, waiting, seen = [step.alloc((3 * place + 1) * MIB) for place in range(before)], [], []
    step.mark("data")
    for move, what in moves:
        if move == "alloc":
            live.append(step.alloc(what))
        elif move == "mark":
            step.mark(what)
        elif live and move == "see":
            seen.append((step.now_us, live[what % len(live)], ["gradients", "buckets", "parameters"][what % 3]))
        elif live:
            block = live.pop(what % len(live))
            step.free(block, wait=move == "wait")
            if move == "wait":
                waiting.append(block)
    for block in waiting:
        step.complete(block)
    step.mark("idle")
    phases, _ = compose(step, sightings=seen)
    assert all("unattributed" not in phase.parts for phase in phases.values())
    assert set(phases) == set(step.peaks) - {"idle"}


def real(name):
    return pickle.loads(gzip.decompress((DATA / name).read_bytes()))


def test_a_real_step_s_parts_add_up_at_every_quarter_of_it_and_its_trace_ends_with_what_its_counters_said():
    raw = real("step_zero3.pickle.gz")
    trace = raw["device_traces"][0]
    borders = [trace[len(trace) * quarter // 4]["time_us"] for quarter in range(4)] + [trace[-1]["time_us"] + 10]
    borders[0] -= 1
    snapshot = compact(real("step_zero3.pickle.gz"), "")
    timeline = Timeline(snapshot, Allocations(snapshot, 0))
    assert timeline.allocated[-1] == sum(segment["allocated_size"] for segment in raw["segments"])
    assert timeline.reserved[-1] == sum(segment.size for segment in snapshot.segments)
    marks, names = [], ("data", "forward", "backward", "optimizer", "idle")
    for place, (us, name) in enumerate(zip(borders, names, strict=True)):
        here = timeline.position(us, None)
        inside = timeline.allocated[timeline.position(borders[max(0, place - 1)], None) : here + 1]
        figure = Reading(timeline.allocated[here], max(inside), 0, 0)
        marks.append(Mark(name, us * 1000, figure, None, 0, 0))
    made = messages(look_at(marks), raw)
    assert [phase.name for phase in made.composition.phases] == ["data", "forward", "backward", "optimizer"]
    for phase in made.composition.phases:
        assert sum(phase.parts.values()) == phase.peak_bytes
        assert "unattributed" not in phase.parts
    assert made.composition.entries == 11586
    assert sum(phase.allocations for phase in made.events.phases) == 3862


def a_trace(**changes):
    snapshot = compact(real("step_zero3.pickle.gz"), "")
    times = memoryview(snapshot.traces[0].times).cast("q")
    marks = [StepMark("forward", times[0] - 1, 0, 0, 0, False), StepMark("idle", times[-1] + 1, 0, 0, 0, False)]
    fields = {"rank": 0, "step": 1, "time": 1.0, "device": 0, "marks": marks, "first": 0, "room": ROOM}
    return StepTrace(**{**fields, "snapshot": snapshot, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"marks": []}, {"first": 2}, {"sightings": [Sightings(5, -1, bytes(16), bytes(1))]},
        {"sightings": [Sightings(5, -1, bytes(8), b"\xff")]}, {"sightings": [Sightings(5, 7, bytes(8), bytes(1))]},
    ],
)  # fmt: skip
def test_a_trace_that_no_rank_sends_is_refused(changes):
    found = trace_worker.find(wire.encode_body(a_trace(**changes)))
    assert found.error
    assert not found.messages
    assert len(trace_worker.find(wire.encode_body(a_trace())).messages) == 2


class Bucket:
    def __init__(self, buffer):
        self.buffer = buffer


class Zero:
    """Stands for DeepSpeed's optimizer: the attributes by which it is known."""

    def __init__(self, model, inner):
        self.optimizer = inner
        self.bit16_groups_flat = [parameter.data for parameter in model.parameters()]
        self.single_partition_of_fp32_groups = inner.param_groups[0]["params"]
        self.ipg_buckets = {torch.float32: Bucket([torch.zeros(1000)])}
        self.reduced = []

    def reduce_ready_partitions_and_remove_grads(self, parameter, group):
        self.reduced.append((parameter, group))


class Engine:
    def __init__(self, model):
        masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
        self.module, self.optimizer = model, Zero(model, torch.optim.Adam(masters))


def test_a_plain_or_a_zero_optimizer_s_parts_are_told_apart_and_a_gradient_in_a_bucket_is_bucket():
    model = torch.nn.Linear(100, 50)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(3, 100)).sum().backward()
    optimizer.step()
    found = composition.Storages(None)
    composition.walk(composition.Roots(None, model, optimizer), found)
    composition.walk(composition.Roots(None, None, optimizer), found)
    assert found.by_part() == {
        "parameters": 4 * 5050,
        "gradients": 4 * 5050,
        "optimizer_states": 2 * 4 * 5050 + 2 * 4,  # and a step counter each
    }
    engine = Engine(torch.nn.Linear(100, 50, bias=False))
    bucket = engine.optimizer.ipg_buckets[torch.float32].buffer[0]
    engine.module.weight.grad = torch.zeros(50, 100)
    engine.optimizer.averaged_gradients = {0: [bucket.narrow(0, 0, 10)], 1: None}
    found = composition.Storages(None)
    composition.walk(composition.Roots(engine, None, None), found)
    assert found.by_part() == {"parameters": 20_000, "buckets": 4000, "gradients": 20_000, "master_copies": 20_000}


def test_a_tensor_that_is_none_or_on_another_device_does_no_harm_and_unwritten_memory_is_not_resident():
    assert list(composition.tensors({"a": [None, (torch.zeros(1),)], "b": 3, "c": object()})) == [torch.zeros(1)]
    found = composition.Storages(None)
    found.add("parameters", [torch.zeros(4, device="meta"), torch.zeros(0), None])
    assert found.held == {}
    found = composition.Storages(None)
    found.add("parameters", written := torch.ones(2**22))
    found.add("buckets", empty := torch.empty(2**25))
    resident = composition.resident_bytes(found.held)
    assert resident["parameters"] == written.nbytes
    assert resident["buckets"] < 2**20 < empty.nbytes


def test_a_look_begins_with_a_step_walks_at_every_boundary_and_leaves():
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters())
    tracker, capture = capturing(composition.Roots(None, model, optimizer), "glibc")
    tracker.end_step()
    tracker.enter("forward")
    loss = model(torch.zeros(3, 10)).sum()
    tracker.enter("backward")
    loss.backward()
    tracker.enter("optimizer")
    tracker.end_step()
    assert (capture.done, capture.step, capture.failed, tracker.watchers) == (True, 2, "", ())
    assert [walked.mark for walked in capture.walks] == [0, 1, 2, 3, 4]
    assert len(capture.marks) == 5
    assert "gradients" not in composition.sum_by_part(capture.walks[2].held.values())
    assert capture.known() == {"parameters": 440, "gradients": 440}
    assert capture.walk_ns > 0


def test_the_first_step_is_joined_where_its_first_phase_begins():
    tracker, capture = capturing(composition.Roots(None, torch.nn.Linear(2, 2), None), "glibc")
    tracker.enter("optimizer")  # DeepSpeed's own, as it makes an engine
    assert capture.walks == []
    tracker.enter("forward")
    tracker.end_step()
    assert (capture.done, capture.step) == (True, 1)
    assert [mark.phase for mark in capture.marks] == ["init", "optimizer", "forward", "idle"]


def test_a_look_made_before_cuda_was_there_does_not_begin_and_an_error_in_one_stays_in_it():
    tracker, capture = capturing(composition.Roots(None, None, None), "glibc")
    tracker.memory = Memory("cuda")
    tracker.end_step()
    assert capture.walks == []
    tracker, capture = capturing(None, "glibc")
    tracker.end_step()
    assert (capture.done, tracker.watchers) == (True, ())
    assert "NoneType" in capture.failed


def test_what_is_laid_over_deepspeed_s_calls_is_gone_after_the_step_and_where_the_look_is_given_up():
    engine = Engine(torch.nn.Linear(10, 10))
    zero = engine.optimizer
    tracker, capture = capturing(composition.Roots(engine, None, None))
    hooks = (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks))
    before = len(optimizers._global_optimizer_pre_hooks)
    tracker.end_step()
    assert "reduce_ready_partitions_and_remove_grads" in vars(zero)
    tracker.enter("backward")
    assert len(modules._global_forward_hooks) == hooks[0] + 1
    zero.reduce_ready_partitions_and_remove_grads(engine.module.weight, 4)
    tracker.enter("optimizer")
    assert (len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)) == hooks
    assert len(optimizers._global_optimizer_pre_hooks) == before + 1
    zero.optimizer.step()
    tracker.end_step()
    assert (capture.done, capture.failed) == (True, "")
    assert zero.reduced[0][1] == 4
    assert "reduce_ready_partitions_and_remove_grads" not in vars(zero)
    assert len(optimizers._global_optimizer_pre_hooks) == before
    tracker, capture = capturing(composition.Roots(engine, None, None))
    tracker.end_step()
    capture.withdraw()
    tracker.enter("forward")
    assert tracker.watchers == ()
    assert "reduce_ready_partitions_and_remove_grads" not in vars(zero)


def test_an_optimizer_that_the_script_drops_in_the_step_is_freed():
    roots = [composition.Roots(Engine(torch.nn.Linear(10, 10)), None, None)]
    tracker, capture = capturing(lambda: roots[0])
    tracker.end_step()
    zero = weakref.ref(roots[0].wrapper)
    roots[0] = composition.Roots(None, None, None)
    gc.collect()
    assert zero() is None
    tracker.end_step()
    assert (capture.done, capture.failed) == (True, "")


def test_a_look_at_a_step_with_too_many_storages_fails_and_keeps_no_more_of_them(monkeypatch):
    monkeypatch.setattr(composition, "MOST_SIGHTINGS", 5)
    tracker, capture = capturing(composition.Roots(None, None, None), "glibc")
    tracker.end_step()
    for tensor in [torch.zeros(1) for _ in range(10)]:
        capture._record_sighting("parameters", tensor)
    assert len(capture.sightings) == 5
    tracker.enter("forward")
    assert (capture.done, tracker.watchers) == (True, ())
    assert capture.failed


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_go_forward_again_in_the_backward_are_noted(reentrant):
    layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)])
    tracker, capture = capturing(composition.Roots(None, layers, None))
    tracker.end_step()
    tracker.enter("forward")
    hidden = torch.ones(2, 8, requires_grad=True)
    for layer in layers:
        hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
    tracker.enter("backward")
    hidden.sum().backward()
    tracker.enter("idle")
    assert len(capture.recomputed) == 3
    assert all(begin < end for begin, end in capture.recomputed)
    assert capture.recomputed == sorted(capture.recomputed)
