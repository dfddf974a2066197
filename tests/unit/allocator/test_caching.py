"""The modelled allocator's rules, one by one."""

import pytest
from ftmon.protocol.analysis.allocator.model import CachingAllocator, DeviceOutOfMemory
from ftmon.protocol.analysis.allocator.settings import MIB, Settings

EXPANDABLE = Settings(expandable_segments=True)


def sizes(model: CachingAllocator) -> list[int]:
    return sorted(one.size_bytes for one in model.segments())


def test_requests_are_rounded_and_packed_into_small_segments() -> None:
    model = CachingAllocator()
    for _ in range(3):
        model.allocate(700)
    assert (model.requested, model.allocated, model.reserved) == (2100, 3 * 1024, 2 * MIB)


def test_empty_tensors_take_nothing() -> None:
    model = CachingAllocator()
    handle = model.allocate(0)
    model.free(handle)
    assert (model.allocated, model.reserved) == (0, 0)


def test_large_blocks_are_split_only_where_more_than_a_mebibyte_is_left() -> None:
    model = CachingAllocator()
    model.allocate(19 * MIB + 512 * 1024)  # a segment of its own, rounded up to 20 MiB, not split
    assert (model.allocated, model.reserved) == (20 * MIB, 20 * MIB)
    model.allocate(3 * MIB)  # the rest of a 20 MiB segment is split off
    assert (model.allocated, model.reserved) == (23 * MIB, 40 * MIB)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    model = CachingAllocator()
    first, second = model.allocate(40 * MIB), model.allocate(30 * MIB)
    at = model.address(second)
    model.free(first)
    model.free(second)
    assert model.address(model.allocate(28 * MIB)) == at


def test_free_neighbours_become_one_block() -> None:
    model = CachingAllocator()
    parts = [model.allocate(5 * MIB) for _ in range(4)]
    assert model.reserved == 20 * MIB
    for part in (parts[0], parts[2], parts[1], parts[3]):
        model.free(part)
    model.allocate(20 * MIB)
    assert model.reserved == 20 * MIB


def test_a_stream_does_not_use_another_streams_blocks() -> None:
    model = CachingAllocator()
    model.free(model.allocate(30 * MIB, stream=1))
    model.allocate(30 * MIB, stream=2)
    assert model.reserved == 60 * MIB


def test_a_block_recorded_on_another_stream_is_free_only_after_its_event() -> None:
    model = CachingAllocator()
    handle = model.allocate(30 * MIB)
    model.record_stream(handle, 7)
    model.free(handle)
    assert (model.allocated, model.active) == (0, 30 * MIB)
    model.allocate(30 * MIB)
    assert model.reserved == 60 * MIB
    model.complete_events(7)
    assert model.active == 30 * MIB
    model.allocate(30 * MIB)
    assert model.reserved == 60 * MIB


def test_cached_memory_is_released_before_the_error() -> None:
    model = CachingAllocator(capacity_bytes=100 * MIB)
    model.free(model.allocate(60 * MIB))
    model.allocate(90 * MIB)
    assert (model.reserved, model.retries) == (90 * MIB, 1)
    with pytest.raises(DeviceOutOfMemory) as error:
        model.allocate(11 * MIB)
    assert error.value.sought_bytes == 12 * MIB
    assert error.value.requested_bytes == 11 * MIB
    assert (error.value.allocated_bytes, error.value.reserved_bytes) == (90 * MIB, 90 * MIB)
    assert error.value.free_bytes == 10 * MIB
    model.allocate(10 * MIB)


def test_memory_fraction_limits_what_is_reserved() -> None:
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


def test_blocks_above_max_split_size_are_neither_split_nor_given_to_small_requests() -> None:
    settings = Settings(max_split_size_bytes=32 * MIB)
    model = CachingAllocator(settings)
    model.free(model.allocate(64 * MIB))
    model.allocate(12 * MIB)
    assert sizes(model) == [12 * MIB, 64 * MIB]
    model.allocate(50 * MIB)  # takes the whole block: less than 20 MiB too large
    assert (sizes(model), model.allocated) == ([12 * MIB, 64 * MIB], 76 * MIB)
    assert CachingAllocator(settings).allocate(12 * MIB)


def test_oversize_blocks_of_expandable_segments_are_unmapped_and_not_released() -> None:
    settings = Settings(expandable_segments=True, max_split_size_bytes=32 * MIB)
    model = CachingAllocator(settings, capacity_bytes=150 * MIB)
    first = model.allocate(100 * MIB)
    model.allocate(20 * MIB)
    model.free(first)
    model.allocate(70 * MIB)  # the free block is more than 20 MiB too large
    assert (model.reserved, model.retries) == (100 * MIB, 1)


def test_only_oversize_blocks_are_released_where_that_is_enough() -> None:
    model = CachingAllocator(Settings(max_split_size_bytes=32 * MIB), capacity_bytes=150 * MIB)
    held = [model.allocate(size * MIB) for size in (20, 40, 60)]
    for handle in held:
        model.free(handle)
    model.allocate(90 * MIB)  # 60 and 40 go, 20 stays
    assert (sizes(model), model.retries) == ([20 * MIB, 90 * MIB], 0)


def test_garbage_collection_releases_the_segments_that_were_unused_longest() -> None:
    model = CachingAllocator(Settings(garbage_collection_threshold=0.7), capacity_bytes=320 * MIB)
    model.set_per_process_memory_fraction(300 / 320)
    old, new = model.allocate(60 * MIB), model.allocate(50 * MIB)
    model.free(old)
    model.allocate(62 * MIB)
    model.allocate(62 * MIB)
    model.free(new)
    model.allocate(64 * MIB)  # 234 MiB are reserved, of which 210 may be
    assert sizes(model) == [50 * MIB, 62 * MIB, 62 * MIB, 64 * MIB]


def test_empty_cache_returns_whole_free_segments_only() -> None:
    model = CachingAllocator()
    model.allocate(3 * MIB)
    model.free(model.allocate(30 * MIB))
    model.empty_cache()
    assert model.reserved == 20 * MIB


def test_expandable_segments_grow_by_pages_in_one_range() -> None:
    model = CachingAllocator(EXPANDABLE, capacity_bytes=2**30)
    model.allocate(30 * MIB)
    assert model.reserved == 40 * MIB
    model.allocate(30 * MIB)
    assert model.reserved == 60 * MIB
    assert sizes(model) == [60 * MIB]
    model.allocate(1000)
    assert sizes(model) == [2 * MIB, 60 * MIB]


def test_expandable_segments_grow_where_plain_ones_fragment() -> None:
    def run(settings: Settings) -> int:
        model = CachingAllocator(settings, capacity_bytes=2**30)
        for size in range(40, 140, 10):
            model.free(model.allocate(size * MIB))
        return model.reserved

    assert run(EXPANDABLE) == 140 * MIB
    assert run(Settings()) == sum(range(40, 140, 10)) * MIB


def test_free_pages_inside_an_expandable_segment_are_unmapped_and_filled_again() -> None:
    model = CachingAllocator(EXPANDABLE, capacity_bytes=160 * MIB)
    first, middle, last = (model.allocate(50 * MIB) for _ in range(3))
    address = model.address(middle)
    model.free(middle)
    model.empty_cache()  # pages of 20 MiB wholly within 50 to 100 MiB: two of them
    assert model.reserved == 120 * MIB
    assert sizes(model) == [60 * MIB, 60 * MIB]
    again = model.allocate(50 * MIB)
    assert (model.address(again), model.reserved) == (address, 160 * MIB)
    for handle in (first, again, last):
        model.free(handle)
    model.empty_cache()
    assert model.reserved == 0
    assert model.segments() == []


def test_expandable_segments_stop_at_the_capacity() -> None:
    model = CachingAllocator(EXPANDABLE, capacity_bytes=100 * MIB)
    model.allocate(70 * MIB)
    with pytest.raises(DeviceOutOfMemory) as error:
        model.allocate(45 * MIB)
    assert error.value.free_bytes == 20 * MIB
    model.allocate(30 * MIB)
    assert model.reserved == 100 * MIB


def test_peaks_are_those_since_the_last_reset() -> None:
    model = CachingAllocator()
    model.free(model.allocate(30 * MIB))
    model.allocate(5 * MIB)
    assert model.peaks().allocated_bytes == 30 * MIB
    model.reset_peaks()
    assert model.peaks().allocated_bytes == 5 * MIB
    assert model.peaks().reserved_bytes == 30 * MIB
