"""The replay against an allocator whose figures after every entry are known."""

import random

import pytest
from caching_allocator import MIB, CachingAllocator, Figures
from ftmon.protocol.analysis.allocator import snapshot_replay
from ftmon.protocol.analysis.allocator.snapshot_layout import fragmentation, layout_at
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.analysis.allocator.snapshot_views import between, find_oom, live_stacks, total
from ftmon.protocol.snapshot.columns import compact
from hypothesis import given, settings
from hypothesis import strategies as st

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
            live.append(
                allocator.alloc(size, stream, [{"name": f"f{size % 7}", "filename": "train.py", "line": stream}])
            )
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
def test_every_figure_at_every_entry_is_the_allocators(steps: list[tuple[str, int, int]], expandable: bool) -> None:
    allocator = history(steps, expandable)
    replay = Replay(compact(allocator.snapshot(), "made"), 0)
    assert [found(replay, index) for index in range(replay.entries)] == allocator.figures
    assert replay.allocations.unsure == 0
    assert not replay.allocations.lost


@given(STEPS)
@settings(deadline=None, max_examples=100)
def test_what_is_live_adds_up_to_the_allocated_figure_at_every_entry(steps: list[tuple[str, int, int]]) -> None:
    allocator = history(steps)
    replay = Replay(compact(allocator.snapshot(), "made"), 0)
    for index in range(-1, replay.entries):
        figures = found(replay, index)
        assert sum(tally.bytes for tally in live_stacks(replay, index).values()) == figures.allocated
        assert sum(replay.allocations.sizes[number] for number in replay.active_at(index)) == figures.active
        summed = fragmentation(layout_at(replay, index))
        assert (summed.reserved, summed.allocated, summed.requested) == (
            figures.reserved,
            figures.allocated,
            figures.requested,
        )
        assert summed.free == figures.reserved - figures.active


@given(STEPS, st.integers(0, 40))
@settings(deadline=None, max_examples=150)
def test_a_window_cut_off_at_its_beginning_is_exact_or_says_by_how_much_it_may_be_low(
    steps: list[tuple[str, int, int]], last: int
) -> None:
    allocator = history(steps)
    last = min(last, len(allocator.trace))
    replay = Replay(compact(allocator.snapshot(last), "made"), 0)
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
def test_between_two_marks_what_stayed_less_what_went_is_the_change(
    steps: list[tuple[str, int, int]], one: int, other: int
) -> None:
    allocator = history(steps)
    replay = Replay(compact(allocator.snapshot(), "made"), 0)
    one, other = min(one, replay.last), min(other, replay.last)
    part = between(replay, one, other)
    assert total(part.stayed).bytes - total(part.gone).bytes == replay.at(replay.allocated, part.last) - replay.at(
        replay.allocated, part.first
    )


def test_checkpoints_give_the_same_live_set_as_walking_from_the_start() -> None:
    chosen = random.Random(3)
    kinds = ["alloc", "alloc", "free", "free", "wait", "complete"]
    allocator = history([(chosen.choice(kinds), chosen.randrange(1, 3000), 0) for _ in range(9000)])
    replay = Replay(compact(allocator.snapshot(), "made"), 0)
    assert replay.entries > 2 * 4096
    for index in [0, 4094, 4095, 4096, 8191, 8192, replay.last]:
        of = replay.allocations
        walked = {n for n in range(len(of.begins)) if of.begins[n] <= index < of.ends[n]}
        assert set(replay.active_at(index)) == walked


def test_a_free_that_was_not_recorded_is_counted_and_the_end_still_holds() -> None:
    allocator = history([("alloc", 4096, 0)] * 4)
    snapshot = allocator.snapshot()
    first = next(entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc")
    snapshot["device_traces"][0].append(dict(first))
    replay = Replay(compact(snapshot, "made"), 0)
    assert replay.allocations.lost == 1
    assert replay.allocated[-1] == allocator.now().allocated


def test_the_peak_is_the_first_entry_at_the_highest_figure() -> None:
    allocator = CachingAllocator()
    one = allocator.alloc(3 * MIB)
    allocator.free(one)
    allocator.alloc(3 * MIB)
    replay = Replay(compact(allocator.snapshot(), "made"), 0)
    assert (replay.peak_bytes, replay.peak_index) == (3 * MIB, 1)


def test_without_history_the_figures_are_those_of_the_segments() -> None:
    allocator = history([("alloc", 5 * MIB, 0), ("alloc", 100, 0), ("free", 1, 0)])
    snapshot = allocator.snapshot(0)
    replay = Replay(compact(snapshot, "made"), 0)
    assert found(replay, -1) == allocator.now()
    assert (replay.peak_bytes, replay.peak_index) == (allocator.now().allocated, -1)


@pytest.mark.parametrize(
    ("asked", "device_free", "kind"),
    [(30 * MIB, 10 * MIB, "fragmentation"), (30 * MIB, 200 * MIB, "limit"), (900 * MIB, 10 * MIB, "too_large")],
)
def test_an_out_of_memory_error_gets_its_verdict_from_the_numbers(asked: int, device_free: int, kind: str) -> None:
    allocator = CachingAllocator()
    blocks = [allocator.alloc(20 * MIB) for _ in range(6)]
    if kind == "fragmentation":
        for address in blocks[::2]:
            allocator.free(address)
    allocator.fail(asked, device_free)
    oom = find_oom(Replay(compact(allocator.snapshot(), "made"), 0))
    assert oom is not None
    assert (oom.kind, oom.requested_bytes, oom.device_free_bytes) == (kind, asked, device_free)
    assert oom.allocated_bytes == allocator.now().allocated
    assert oom.largest_free_block_bytes == (20 * MIB if kind == "fragmentation" else 0)


def test_layouts_follow_segments_that_were_freed_and_expandable_ranges_that_were_unmapped() -> None:
    for expandable in (False, True):
        allocator = CachingAllocator(expandable)
        address = allocator.alloc(30 * MIB)
        kept = allocator.alloc(30 * MIB)
        allocator.free(address)
        before = len(allocator.trace) - 1
        allocator.empty_cache()
        replay = Replay(compact(allocator.snapshot(), "made"), 0)
        assert [piece.address for piece in layout_at(replay, before)] == [address, kept]
        assert [piece.address for piece in layout_at(replay, replay.last)] == [kept]
        assert all(piece.expandable == expandable for piece in layout_at(replay, before) if piece.address == kept)


@given(STEPS)
@settings(deadline=None, max_examples=60)
def test_live_sets_are_the_same_from_checkpoints_close_together(steps: list[tuple[str, int, int]]) -> None:
    replay = Replay(compact(history(steps).snapshot(), "made"), 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_replay, "_LEAST_STRIDE", 5)
        patch.setattr(snapshot_replay, "_MOST_KEPT", 40)
        kept = snapshot_replay.LiveSets(replay.allocations)
    for index in range(-1, replay.entries):
        assert kept.active_blocks_at(index) == replay.active_blocks_at(index)
        assert kept.totals_at(index) == snapshot_replay.sums(replay.allocations, replay.live_at(index))


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
def test_a_trace_that_contradicts_itself_is_replayed_without_contradictions(
    entries: list[tuple[str, int, int]], states: list[str]
) -> None:
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
        assert set(replay.active_at(index)) == active
        assert set(replay.live_at(index)) == held
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
