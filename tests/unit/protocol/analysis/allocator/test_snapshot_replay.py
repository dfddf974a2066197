"""The replay against an allocator whose figures after every entry are known."""

import gzip
import pickle
import random
import re
from pathlib import Path
from typing import Any

import pytest
from caching_allocator import MIB, CachingAllocator, Figures
from ftmon.protocol.analysis.allocator.allocations import Rooms
from ftmon.protocol.analysis.allocator.settings import SMALL_MOST_BYTES, round_size
from ftmon.protocol.analysis.allocator.snapshot_layout import fragmentation, layout_at, stack_tree
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay, pending_bytes, pending_states
from ftmon.protocol.analysis.allocator.snapshot_views import (
    between,
    difference,
    difference_report,
    live_stacks,
    report,
    total,
)
from ftmon.protocol.analysis.oom_report import description, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DOCS
from snapshot_files import DATA, compact, read_snapshot

NAMES = ["oom_backward", "step_zero3"]


def path_of(name: str) -> Path:
    return DATA / f"{name}.pickle.gz"


def replay_of(allocator: CachingAllocator, last: int | None = None) -> Replay:
    return Replay(compact(allocator.snapshot() if last is None else allocator.snapshot(last), "made"), 0)


@pytest.fixture(scope="module")
def replays() -> dict[str, Replay]:
    return {name: Replay(read_snapshot(path_of(name)), 0) for name in NAMES}


def raw(name: str) -> dict[str, Any]:
    with gzip.open(path_of(name)) as file:
        return pickle.load(file)


@pytest.mark.parametrize("name", NAMES)
def test_figures_at_every_moment_are_live_blocks_and_at_the_end_the_snapshots_own_segments(replays, name):
    replay, segments = replays[name], raw(name)["segments"]
    keys = ("allocated_size", "active_size", "requested_size", "total_size")
    assert found(replay, replay.last) == Figures(*(sum(segment[key] for segment in segments) for key in keys))
    replay = replays[name]
    for index in range(-1, replay.entries, 97):
        live = live_stacks(replay, index)
        assert sum(tally.bytes for tally in live.values()) == replay.at(replay.allocated, index)
        assert stack_tree(replay.snapshot, live).bytes == replay.at(replay.allocated, index)
    pieces = layout_at(replays[name], replays[name].last)
    laid_out = [(block.address, block.size) for piece in pieces for block in piece.blocks]
    told = [(block["address"], block["size"]) for segment in raw(name)["segments"] for block in segment["blocks"]]
    assert sorted(laid_out) == sorted(told)


def test_sizes_worked_out_are_those_of_the_blocks_at_the_end_and_layouts_follow_freed_segments():
    replay = Replay(read_snapshot(path_of("oom_backward")), 0)
    of = replay.allocations
    known = dict(of.known)
    assert len(known) == 475
    of.known.clear()
    for number in known:
        of.sizes[number] = round_size(of.requested[number])
    large = {number for number, size in enumerate(of.sizes) if size > SMALL_MOST_BYTES}
    Rooms(of, replay.snapshot, large).replay()
    assert {number: of.sizes[number] for number in known} == known
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        address = allocator.alloc(30 * MIB)
        kept = allocator.alloc(30 * MIB)
        allocator.free(address)
        before = len(allocator.trace) - 1
        allocator.empty_cache()
        replay = replay_of(allocator)
        assert [piece.address for piece in layout_at(replay, before)] == [address, kept]
        assert [piece.address for piece in layout_at(replay, replay.last)] == [kept]
        assert all(piece.expandable == expandable for piece in layout_at(replay, before) if piece.address == kept)


def test_the_out_of_memory_error_is_as_the_allocators_message_told_it(replays):
    """Tried to allocate 4.64 GiB; 18.28 GiB allocated by PyTorch; 183.27 MiB reserved but unallocated."""
    oom = report_of(replays["oom_backward"].snapshot, [replays["oom_backward"]]).oom
    figures = oom.requested_bytes / 2**30, oom.allocated_bytes / 2**30, (oom.reserved_bytes - oom.allocated_bytes) / MIB
    assert [f"{figure:.2f}" for figure in figures] == ["4.64", "18.28", "183.27"]
    assert report_of(replays["step_zero3"].snapshot, [replays["step_zero3"]]) is None


def test_a_steady_step_ends_where_it_began_a_snapshot_does_not_differ_from_itself_and_changes_add_up(replays):
    replay = replays["step_zero3"]
    assert replay.allocated[0] == replay.allocated[-1]
    assert replay.peak_bytes > replay.allocated[-1]
    assert replay.at(replay.allocated, replay.peak_index) == replay.peak_bytes
    one, other = replays["oom_backward"], replays["step_zero3"]
    assert difference(one, one.last, one, one.last) == []
    changes = difference(one, one.last, other, other.last)
    assert sum(change.bytes for change in changes) == other.allocated[-1] - one.allocated[-1]


def test_json_has_the_documented_fields(replays):
    replay = replays["oom_backward"]
    told = report(replay.snapshot, [replay], 5) | {"oom": description(replay.snapshot, [replay])}
    documented = set(re.findall(r"`(\w+)`", (DOCS / "snapshot.md").read_text()))
    fields = {*told, *told["devices"][0], *told["top_stacks"][0], *told["largest_blocks"][0], *told["oom"]}
    fields |= {*told["oom"]["stack"][0], *difference_report([replay], [replay])}
    assert fields <= documented
    assert (len(told["top_stacks"]), told["oom"]["stack"][0]["name"]) == (5, "cross_entropy")


@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_own_viewer_counts_the_same(replays, name):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    text = viewer.segsum(raw(name))
    found = fragmentation(layout_at(replays[name], replays[name].last))
    reserved = str(viewer.Bytes(found.reserved))
    # The viewer's "allocated" is what was requested of allocated blocks; its "free" includes rounding.
    assert f"segments: {found.segments}\n" in text
    assert f"total_reserved: {reserved}\n" in text
    assert f"total_allocated: {viewer.Bytes(found.requested)}\n" in text
    assert f"total_free: {viewer._report_free(found.free, found.rounding)}\n" in text


@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_flame_graph_has_the_same_bytes_a_stack(replays, name):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    graph = viewer.memory(raw(name), format_flamegraph=lambda text: text)
    told: dict[str, int] = {}
    for line in graph.splitlines():
        where, size = line.rsplit(" ", 1)
        if ";active_allocated;" in where and not where.endswith("<gaps>"):
            key = where.split(";active_allocated;")[1]
            told[key] = told.get(key, 0) + int(size)
    replay = replays[name]
    found: dict[str, int] = {}
    for number in replay.live_at(replay.last):
        frames = replay.snapshot.frames_of(replay.allocations.stacks[number])
        key = ";".join(viewer._frames_fmt([frame._asdict() for frame in frames], reverse=True)) or "<non-python>"
        found[key] = found.get(key, 0) + replay.allocations.requested[number]
    assert found == told


SIZES = st.one_of(
    st.integers(1, 4096), st.integers(MIB - 600, MIB + 600), st.integers(MIB, 40 * MIB), st.integers(1, 3000000)
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["alloc", "alloc", "free", "wait", "complete", "empty"]), SIZES, st.integers(0, 1)),
    max_size=60,
)


def history(steps: list[tuple[str, int, int]], expandable: bool = False) -> CachingAllocator:
    allocator = CachingAllocator(expandable)
    live: list[int] = []
    pending: list[int] = []
    for what, size, stream in steps:
        if what == "alloc":
            frame = {"name": f"f{size % 7}", "filename": "train.py", "line": stream}
            live.append(allocator.alloc(size, stream, [frame]))
        elif what in ("free", "wait") and live:
            address = live.pop(size % len(live))
            allocator.free(address, wait=what == "wait")
            pending += [address] if what == "wait" else []
        elif what == "complete" and pending:
            allocator.complete(pending.pop(size % len(pending)))
        elif what == "empty":
            allocator.empty_cache()
    return allocator


def found(replay: Replay, index: int) -> Figures:
    curves = (replay.allocated, replay.active, replay.requested, replay.reserved)
    return Figures(*(replay.at(curve, index) for curve in curves))


@given(STEPS, st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_figure_at_every_entry_is_the_allocators(steps, expandable):
    allocator = history(steps, expandable)
    replay = replay_of(allocator)
    assert [found(replay, index) for index in range(replay.entries)] == allocator.figures
    assert replay.allocations.unsure == 0
    assert not replay.allocations.lost


@given(STEPS)
@settings(deadline=None, max_examples=100)
def test_what_is_live_adds_up_to_the_allocated_figure_at_every_entry(steps):
    replay = replay_of(history(steps))
    for index in range(-1, replay.entries):
        figures = found(replay, index)
        assert sum(tally.bytes for tally in live_stacks(replay, index).values()) == figures.allocated
        assert sum(replay.allocations.sizes[number] for number in replay.active_at(index)) == figures.active
        summed = fragmentation(layout_at(replay, index))
        of_layout = (summed.reserved, summed.allocated, summed.requested)
        assert of_layout == (figures.reserved, figures.allocated, figures.requested)
        assert summed.free == figures.reserved - figures.active


@given(STEPS, st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_a_window_cut_off_at_its_beginning_is_exact_or_says_by_how_much_it_may_be_low(steps, last):
    allocator = history(steps)
    last = min(last, len(allocator.trace))
    replay = replay_of(allocator, last)
    figures = allocator.figures[len(allocator.figures) - last :]
    for index, truth in enumerate(figures):
        seen = found(replay, index)
        assert (seen.requested, seen.reserved) == (truth.requested, truth.reserved)
        assert 0 <= truth.allocated - seen.allocated <= replay.allocations.unsure_bytes
        assert 0 <= truth.active - seen.active <= replay.allocations.unsure_bytes
    if figures:
        assert found(replay, last - 1) == figures[-1]


@given(STEPS, st.integers(-1, 80), st.integers(-1, 80))
@settings(deadline=None, max_examples=60)
def test_between_two_marks_what_stayed_less_what_went_is_the_change(steps, one, other):
    replay = replay_of(history(steps))
    one, other = min(one, replay.last), min(other, replay.last)
    part = between(replay, one, other)
    change = replay.at(replay.allocated, part.last) - replay.at(replay.allocated, part.first)
    assert total(part.stayed).bytes - total(part.gone).bytes == change


def test_a_free_that_was_not_recorded_is_counted_and_checkpoints_give_the_live_set_of_a_walk():
    allocator = history([("alloc", 4096, 0)] * 4)
    snapshot = allocator.snapshot()
    first = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc")
    snapshot["device_traces"][0].append(dict(first))
    replay = Replay(compact(snapshot, "made"), 0)
    assert (replay.allocations.lost, replay.allocated[-1]) == (1, allocator.now().allocated)
    chosen = random.Random(3)
    kinds = ["alloc", "alloc", "free", "free", "wait", "complete"]
    replay = replay_of(history([(chosen.choice(kinds), chosen.randrange(1, 3000), 0) for _ in range(9000)]))
    assert replay.entries > 2 * 4096
    for index in [0, 4094, 4095, 4096, 8191, 8192, replay.last]:
        of = replay.allocations
        walked = {n for n in range(len(of.begins)) if of.begins[n] <= index < of.ends[n]}
        assert set(replay.active_at(index)) == walked


def test_the_peak_is_the_first_entry_at_the_highest_figure_and_without_history_figures_are_the_segments():
    replay = replay_of(history([("alloc", 3 * MIB, 0), ("free", 0, 0), ("alloc", 3 * MIB, 0)]))
    assert (replay.peak_bytes, replay.peak_index) == (3 * MIB, 1)
    allocator = history([("alloc", 5 * MIB, 0), ("alloc", 100, 0), ("free", 1, 0)])
    replay = replay_of(allocator, 0)
    assert found(replay, -1) == allocator.now()
    assert (replay.peak_bytes, replay.peak_index) == (allocator.now().allocated, -1)


@pytest.mark.parametrize(
    ("asked", "device_free", "kind"),
    [(30 * MIB, 10 * MIB, "fragmentation"), (30 * MIB, 200 * MIB, "limit"), (900 * MIB, 10 * MIB, "too_large")],
)
def test_an_out_of_memory_error_gets_its_verdict_from_the_numbers(asked, device_free, kind):
    allocator = CachingAllocator()
    blocks = [allocator.alloc(20 * MIB) for _ in range(6)]
    if kind == "fragmentation":
        for address in blocks[::2]:
            allocator.free(address)
    allocator.fail(asked, device_free)
    replay = replay_of(allocator)
    oom = description(replay.snapshot, [replay])
    assert (oom["kind"], oom["requested_bytes"], oom["device_free_bytes"]) == (kind, asked, device_free)
    assert oom["allocated_bytes"] == allocator.now().allocated
    assert oom["largest_free_block_bytes"] == (20 * MIB if kind == "fragmentation" else 0)


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"]),
        st.integers(0, 3), st.integers(1, 3 * MIB),
    ),
    max_size=30,
)  # fmt: skip
BLOCKS = st.lists(st.sampled_from(["inactive", "active_allocated", "active_pending_free"]), min_size=4, max_size=4)


@given(ENTRIES, BLOCKS)
@settings(deadline=None, max_examples=300)
def test_a_trace_that_contradicts_itself_is_replayed_without_contradictions(entries, states):
    """Frees that are missing, doubled or of nothing: the live blocks still add up to the figure at every entry."""
    base, room = 2**40, 4 * MIB
    trace = [{"action": what, "addr": base + at * room, "size": size, "stream": 0} for what, at, size in entries]
    blocks = [
        {"address": base + at * room, "size": room, "requested_size": room - 5, "state": state, "frames": []}
        for at, state in enumerate(states)
    ]
    segment = {"device": 0, "address": base, "total_size": 4 * room, "segment_type": "large", "blocks": blocks}
    replay = Replay(compact({"segments": [segment], "device_traces": [trace]}, "made"), 0)
    of = replay.allocations
    for index in range(-1, replay.entries):
        active = {n for n in range(len(of.begins)) if of.begins[n] <= index < of.ends[n]}
        held = {n for n in active if of.freed[n] > index}
        assert (set(replay.active_at(index)), set(replay.live_at(index))) == (active, held)
        assert replay.at(replay.allocated, index) == sum(of.sizes[n] for n in held)
        assert replay.at(replay.active, index) == sum(of.sizes[n] for n in active)
        assert replay.at(replay.requested, index) == sum(of.requested[n] for n in active)
        assert sum(tally.bytes for tally in live_stacks(replay, index).values()) == sum(of.sizes[n] for n in held)
        for other in (-1, index // 2):
            low, high = min(other, index), max(other, index)
            begun = {n for n in range(len(of.begins)) if low < of.begins[n] <= high}
            part = between(replay, other, index)
            assert total(part.stayed).blocks == sum(of.freed[n] > high for n in begun)
            assert total(part.came_and_went).blocks == sum(of.freed[n] <= high for n in begun)
            before = [n for n in range(len(of.begins)) if of.begins[n] <= low < of.freed[n] <= high]
            assert total(part.gone) == (sum(of.sizes[n] for n in before), len(before))
        layout = layout_at(replay, index)
        assert all(piece.free_bytes >= 0 and piece.largest_free_bytes <= piece.size for piece in layout)
    assert replay.allocated[-1] == sum(room for state in states if state == "active_allocated")


# What an optimizer still had to allocate decides whether free memory in pieces is why its first step failed.


SNAPSHOT_TO_COME_SIZES = [(8 + number % 5) * MIB for number in range(201)]
ASKED = 24 * MIB


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "filename": f"lib/{name}.py", "line": 7} for name in names]


STATES = frames("zeros_like", "_init_group", "step", "initialize_optimizer_states", "main")


def failed(made: int) -> CachingAllocator:
    """Parameters, what a forward pass freed in pieces, then ``made`` of the states, and a request that fails."""
    allocator = CachingAllocator()
    activations: list[int] = []
    for number, size in enumerate(SNAPSHOT_TO_COME_SIZES):
        allocator.alloc(size, frames=frames("convert", "_apply", "main"))
        if number % 12 == 0:
            activations.append(allocator.alloc(20 * MIB, frames=frames("linear", "forward")))
    for size in SNAPSHOT_TO_COME_SIZES[:made]:
        allocator.alloc(size, frames=STATES)
    for address in activations:
        allocator.free(address)
    allocator.fail(ASKED, 10 * MIB, STATES)
    return allocator


@pytest.mark.parametrize(("made", "verdict"), [(73, "optimizer_states"), (195, "fragmentation")])
def test_free_memory_in_pieces_is_to_blame_only_where_it_would_have_sufficed_for_the_states_to_come(made, verdict):
    snapshot = compact(failed(made).snapshot(), "made")
    replay = Replay(snapshot, 0)
    report = report_of(snapshot, [replay])
    oom = report.oom
    assert oom.usable_free_bytes > ASKED > oom.largest_free_bytes
    assert oom.usable_free_bytes > 0.05 * oom.reserved_bytes
    assert pending_states(replay, replay.oom_index()) == sum(SNAPSHOT_TO_COME_SIZES[made:])
    assert report.verdict.kind == verdict
    assert (report.remedies[0].kind == "expandable_segments") == (made == 195)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_states_are_told_by_the_sizes_of_what_they_are_made_after(width, count):
    parameters = [1000 * number for number in range(1, 41)]
    all_states = [size * width for size in parameters for _ in range(count)]
    made = all_states[:30]
    least = sum(all_states) - sum(made)
    assert pending_bytes([*made, 4, 4], [*parameters, 8]) == least
    assert pending_bytes(made, [size + 1 for size in parameters]) == 0
    assert pending_bytes(made[:2], parameters) == 0
    assert pending_bytes(all_states, parameters) == 0
    reverse = all_states[::-1][:30]
    assert pending_bytes(reverse, parameters) == sum(all_states) - sum(reverse)
