"""The allocator's model: its rules one by one, against traces that PyTorch recorded on an H200, and its settings."""

import sys

import pytest
from caching_allocator import CachingAllocator as Miniature
from caching_allocator import Figures
from ftmon.protocol.analysis.allocator.model import DeviceOutOfMemory, Driver
from ftmon.protocol.analysis.allocator.settings import MIB, Settings
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_files import DATA, read_snapshot

sys.path.append(str(DATA.parents[1] / "bench"))
from allocator_compare import RestoredAllocator as CachingAllocator  # with views of its segments
from allocator_compare import compare

GIB = 2**30

EXPANDABLE = Settings(expandable_segments=True)


def sizes(model: CachingAllocator) -> list[int]:
    return sorted(one.size_bytes for one in model.segments())


def test_requests_are_rounded_and_packed_into_small_segments_and_empty_tensors_take_nothing():
    model = CachingAllocator()
    model.free(model.allocate(0))
    assert (model.allocated, model.reserved) == (0, 0)
    for _ in range(3):
        model.allocate(700)
    assert (model.requested, model.allocated, model.reserved) == (2100, 3 * 1024, 2 * MIB)


def test_cached_memory_is_released_before_the_error_and_a_memory_fraction_limits_what_is_reserved():
    model = CachingAllocator(capacity_bytes=100 * MIB)
    model.free(model.allocate(60 * MIB))
    model.allocate(90 * MIB)
    assert (model.reserved, model.retries) == (90 * MIB, 1)
    with pytest.raises(DeviceOutOfMemory) as raised:
        model.allocate(11 * MIB)
    error = raised.value
    assert (error.sought_bytes, error.requested_bytes, error.free_bytes) == (12 * MIB, 11 * MIB, 10 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (90 * MIB, 90 * MIB)
    model.allocate(10 * MIB)
    model = CachingAllocator(capacity_bytes=100 * MIB)
    model.set_per_process_memory_fraction(0.5)
    model.allocate(40 * MIB)
    with pytest.raises(DeviceOutOfMemory):
        model.allocate(12 * MIB)
    by_setting = CachingAllocator(Settings(per_process_memory_fraction=0.5), capacity_bytes=100 * MIB)
    with pytest.raises(DeviceOutOfMemory):
        by_setting.allocate(60 * MIB)
    with pytest.raises(ValueError, match="device_bytes"):
        CachingAllocator().set_per_process_memory_fraction(0.5)


def test_blocks_above_max_split_size_are_neither_split_nor_given_to_small_requests_and_go_if_enough():
    settings = Settings(max_split_size_bytes=32 * MIB)
    model = CachingAllocator(settings)
    model.free(model.allocate(64 * MIB))
    model.allocate(12 * MIB)
    assert sizes(model) == [12 * MIB, 64 * MIB]
    model.allocate(50 * MIB)  # takes the whole block: less than 20 MiB too large
    assert (sizes(model), model.allocated) == ([12 * MIB, 64 * MIB], 76 * MIB)
    assert CachingAllocator(settings).allocate(12 * MIB)
    model = CachingAllocator(Settings(max_split_size_bytes=32 * MIB), capacity_bytes=150 * MIB)
    for handle in [model.allocate(size * MIB) for size in (20, 40, 60)]:
        model.free(handle)
    model.allocate(90 * MIB)  # 60 and 40 go, 20 stays
    assert (sizes(model), model.retries) == ([20 * MIB, 90 * MIB], 0)


def test_oversize_blocks_of_expandable_segments_are_unmapped_and_ranges_with_holes_are_continued():
    settings = Settings(expandable_segments=True, max_split_size_bytes=32 * MIB)
    model = CachingAllocator(settings, capacity_bytes=150 * MIB)
    first = model.allocate(100 * MIB)
    model.allocate(20 * MIB)
    model.free(first)
    model.allocate(70 * MIB)  # the free block is more than 20 MiB too large
    assert (model.reserved, model.retries) == (100 * MIB, 1)
    found = compare(read_snapshot(DATA / "expandable_zero2.pickle.gz"), 0, EXPANDABLE, device_bytes=150_109_880_320)
    assert found.same_address == found.requests == 6290
    assert (found.same_blocks, found.largest_reserved_error) == (True, 0)


def test_garbage_collection_releases_the_segments_unused_longest_and_peaks_are_since_the_last_reset():
    model = CachingAllocator(Settings(garbage_collection_threshold=0.7), capacity_bytes=320 * MIB)
    model.set_per_process_memory_fraction(300 / 320)
    old, new = model.allocate(60 * MIB), model.allocate(50 * MIB)
    model.free(old)
    model.allocate(62 * MIB)
    model.allocate(62 * MIB)
    model.free(new)
    model.allocate(64 * MIB)  # 234 MiB are reserved, of which 210 may be
    assert sizes(model) == [50 * MIB, 62 * MIB, 62 * MIB, 64 * MIB]
    model = CachingAllocator()
    model.free(model.allocate(30 * MIB))
    model.allocate(5 * MIB)
    assert model.peaks().allocated_bytes == 30 * MIB
    model.reset_peaks()
    assert (model.peaks().allocated_bytes, model.peaks().reserved_bytes) == (5 * MIB, 30 * MIB)


def test_expandable_segments_grow_by_pages_in_one_range_and_stop_at_the_capacity():
    model = CachingAllocator(EXPANDABLE, capacity_bytes=2**30)
    model.allocate(30 * MIB)
    assert model.reserved == 40 * MIB
    model.allocate(30 * MIB)
    assert (model.reserved, sizes(model)) == (60 * MIB, [60 * MIB])
    model.allocate(1000)
    assert sizes(model) == [2 * MIB, 60 * MIB]
    model = CachingAllocator(EXPANDABLE, capacity_bytes=100 * MIB)
    model.allocate(70 * MIB)
    with pytest.raises(DeviceOutOfMemory) as error:
        model.allocate(45 * MIB)
    assert error.value.free_bytes == 20 * MIB
    model.allocate(30 * MIB)
    assert model.reserved == 100 * MIB


def test_free_pages_inside_an_expandable_segment_are_unmapped_and_filled_again():
    model = CachingAllocator(EXPANDABLE, capacity_bytes=160 * MIB)
    first, middle, last = (model.allocate(50 * MIB) for _ in range(3))
    address = model.address(middle)
    model.free(middle)
    model.empty_cache()  # pages of 20 MiB wholly within 50 to 100 MiB: two of them
    assert (model.reserved, sizes(model)) == (120 * MIB, [60 * MIB, 60 * MIB])
    again = model.allocate(50 * MIB)
    assert (model.address(again), model.reserved) == (address, 160 * MIB)
    for handle in (first, again, last):
        model.free(handle)
    model.empty_cache()
    assert (model.reserved, model.segments()) == (0, [])


CAPACITY = 400 * MIB
KINDS = st.builds(
    Settings,
    expandable_segments=st.booleans(),
    max_split_size_bytes=st.sampled_from([None, 20 * MIB, 64 * MIB]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
    roundup_power2_divisions=st.sampled_from([(), (4,) * 16]),
)
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 80 * MIB))
ACTS = st.one_of(
    *(st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)) for _ in range(2)),
    st.tuples(st.just("free"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 10**6), st.integers(0, 3)),
    st.tuples(st.just("complete"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("empty"), st.just(0), st.just(0)),
)


def check(model: CachingAllocator, held: dict[int, int]) -> None:
    segments = model.segments()
    totals = {"inactive": 0, "active_allocated": 0, "active_pending_free": 0}
    end_before = 0
    for segment in segments:
        assert segment.address >= end_before, "segments overlap"
        at, before = segment.address, ""
        for block in segment.blocks:
            assert block.address == at, "blocks do not tile their segment"
            assert block.size_bytes > 0
            assert block.size_bytes % 512 == 0
            assert not block.state == before == "inactive", "free neighbours were not merged"
            at, before = at + block.size_bytes, block.state
            totals[block.state] += block.size_bytes
            if block.state == "active_allocated":
                assert held[block.handle] == block.requested_bytes <= block.size_bytes
        assert at == segment.address + segment.size_bytes
        end_before = at
        assert segment.size_bytes % (2 * MIB) == 0
        if segment.small and not segment.expandable:
            assert segment.size_bytes == 2 * MIB
    assert model.reserved == sum(one.size_bytes for one in segments) == sum(totals.values()) <= CAPACITY
    assert model.allocated == totals["active_allocated"]
    assert model.active == totals["active_allocated"] + totals["active_pending_free"]
    assert model.requested <= model.active
    assert sum(block.state == "active_allocated" for one in segments for block in one.blocks) == len(held)
    peaks = model.peaks()
    assert peaks.allocated_bytes >= model.allocated
    assert peaks.reserved_bytes >= model.reserved


@settings(max_examples=150, deadline=None)
@given(kind=KINDS, limited=st.booleans(), program=st.lists(ACTS, max_size=60))
def test_accounting_agrees_with_the_segments(kind, limited, program):
    model = CachingAllocator(kind, capacity_bytes=CAPACITY)
    if limited:
        model.set_per_process_memory_fraction(0.9)
    held: dict[int, int] = {}
    refused: list[DeviceOutOfMemory] = []
    for act, number, stream in program:
        chosen = list(held)[number % len(held)] if held else 0
        if act == "allocate":
            try:
                held[model.allocate(number, stream)] = number
            except DeviceOutOfMemory as error:
                refused.append(error)
        elif act == "free":
            model.free(chosen)
            held.pop(chosen, None)
        elif act == "record":
            model.record_stream(chosen, stream)
        elif act == "complete":
            model.complete_events(number)
        else:
            model.empty_cache()
        check(model, held)
    assert all(error.free_bytes is not None and error.free_bytes < error.sought_bytes for error in refused)
    for handle in held:
        model.free(handle)
    model.empty_cache()
    assert (model.allocated, model.active, model.requested, model.reserved) == (0, 0, 0, 0)
    assert model.segments() == []


@settings(max_examples=60, deadline=None)
@given(program=st.lists(SIZES, min_size=1, max_size=30))
def test_a_repeated_step_reserves_nothing_more_with_expandable_segments(program):
    model = CachingAllocator(Settings(expandable_segments=True))

    def step() -> None:
        for handle in [model.allocate(size) for size in program]:
            model.free(handle)

    step()
    reserved = model.reserved
    step()
    assert model.reserved == reserved


class RisingDriver(Driver):
    """Gives segments the addresses that the miniature gives them."""

    next_address = 0x7F0000000000

    def allocate(self, size: int) -> int | None:
        address, self.next_address = self.next_address, self.next_address + size + 64 * MIB
        return address if self.take(size) else None

    def release(self, address: int, size: int) -> None:
        self.give(size)


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTS, max_size=60))
def test_an_independent_miniature_gives_every_block_the_same_address(program):
    model, miniature = CachingAllocator(driver=RisingDriver()), Miniature()
    held: dict[int, int] = {}
    waiting: list[int] = []
    for act, number, stream in program:
        if act == "allocate":
            handle = model.allocate(number, stream)
            held[handle] = miniature.alloc(number, stream)
            assert model.address(handle) == held[handle]
        elif act in ("free", "record") and held:
            chosen = list(held)[number % len(held)]
            if act == "record":
                model.record_stream(chosen, 9)
                waiting.append(held[chosen])
            model.free(chosen)
            miniature.free(held.pop(chosen), wait=act == "record")
        elif act == "complete":
            model.complete_events()
            for address in waiting:
                miniature.complete(address)
            waiting.clear()
        elif act == "empty" and not waiting:
            model.empty_cache()
            miniature.empty_cache()
        assert Figures(model.allocated, model.active, model.requested, model.reserved) == miniature.now()


def test_options_are_read_with_their_units_divisions_hold_from_their_size_on_and_segments_follow_size_classes():
    settings = Settings.parse(
        "expandable_segments:True, max_split_size_mb:128,garbage_collection_threshold:0.8,backend:native,"
        "pinned_use_background_threads:True,max_non_split_rounding_mb:64,per_process_memory_fraction:0.5"
    )
    given = Settings(True, 128 * MIB, 0.8, max_non_split_rounding_bytes=64 * MIB, per_process_memory_fraction=0.5)
    assert settings == given
    assert Settings.parse("") == Settings()
    settings = Settings.parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8],expandable_segments:False")
    assert settings.roundup_power2_divisions == (1,) * 8 + (1, 2, 4) + (8,) * 5
    assert (settings.rounded(600 * MIB), settings.rounded(1200 * MIB)) == (768 * MIB, 1280 * MIB)
    assert settings.rounded(3 * MIB + 1) == 3 * MIB + 512
    assert Settings.parse("roundup_power2_divisions:4").rounded(1200) == 1536
    settings = Settings()
    assert settings.segment_size(512) == settings.segment_size(MIB) == 2 * MIB
    assert settings.segment_size(MIB + 512) == settings.segment_size(10 * MIB - 512) == 20 * MIB
    assert (settings.segment_size(10 * MIB), settings.segment_size(11 * MIB)) == (10 * MIB, 12 * MIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("expandable_segments:yes", "must be True or False, not yes"),
        ("max_split_size_mb:8", "must be 20 or more, not 8"),
        ("max_split_size_mb:lots", "must be a whole number, not lots"),
        ("garbage_collection_threshold:1.5", "must be above 0 and below 1, not 1.5"),
        ("roundup_power2_divisions:3", "must be powers of two, not 3"),
        ("roundup_power2_divisions:[5:1]", "must be powers of two, not 5"),
        ("large_segment_size_mb:2", "must be more than 2, not 2"),
        ("expandable_segment:True", "expandable_segment is not an option"),
        ("backend:cudaMallocAsync", "use native"),
        ("expandable_segments", "must be OPTION:VALUE"),
    ],
)
def test_text_that_cannot_be_used_is_refused_with_the_option(text, said):
    with pytest.raises(ValueError, match="PYTORCH_CUDA_ALLOC_CONF: ") as refused:
        Settings.parse(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("recorded_addresses", [True, False])
def test_a_training_up_to_its_out_of_memory_error_gives_the_recorded_segments(recorded_addresses):
    snapshot = read_snapshot(DATA / "oom_backward.pickle.gz")
    found = compare(snapshot, 0, Settings(), 20 * GIB, recorded_addresses)
    assert (found.recorded_changes, found.first_difference) == (232, None)
    assert (found.same_segments, found.largest_reserved_error) == (True, 0)
    assert (found.ooms, found.modelled_ooms) == (1, 1)
    if recorded_addresses:
        assert found.same_address == found.requests == 1353
        assert found.same_blocks
    else:
        assert not compare(snapshot, 0, EXPANDABLE, 20 * GIB).same_segments, "with other settings than the recorded"


def test_a_steady_step_is_served_from_the_recorded_addresses():
    found = compare(read_snapshot(DATA / "step_zero3.pickle.gz"), 0, Settings())
    assert found.same_address == found.requests == 3862
    assert (found.same_segments, found.same_blocks) == (True, True)
    assert found.modelled_reserved_peak_bytes == found.recorded_reserved_peak_bytes
