"""What holds of the allocator whatever a program does."""

from caching_allocator import CachingAllocator as Miniature
from caching_allocator import Figures
from ftmon.protocol.analysis.allocator.model import CachingAllocator, DeviceOutOfMemory, Driver
from ftmon.protocol.analysis.allocator.settings import MIB, Settings
from hypothesis import given, settings
from hypothesis import strategies as st

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
    st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)),
    st.tuples(st.just("allocate"), SIZES, st.integers(0, 2)),
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
    assert sum(len(one.blocks) - sum(b.state != "active_allocated" for b in one.blocks) for one in segments) == len(
        held
    )
    peaks = model.peaks()
    assert peaks.allocated_bytes >= model.allocated
    assert peaks.reserved_bytes >= model.reserved
    assert peaks.active_bytes >= peaks.allocated_bytes


@settings(max_examples=150, deadline=None)
@given(kind=KINDS, limited=st.booleans(), program=st.lists(ACTS, max_size=60))
def test_accounting_agrees_with_the_segments(
    kind: Settings, limited: bool, program: list[tuple[str, int, int]]
) -> None:
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
def test_a_repeated_step_reserves_nothing_more_with_expandable_segments(program: list[int]) -> None:
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
@given(program=st.lists(ACTS, max_size=60))
def test_an_independent_miniature_of_the_same_rules_gives_every_block_the_same_address(
    program: list[tuple[str, int, int]],
) -> None:
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
        figures = Figures(model.allocated, model.active, model.requested, model.reserved)
        assert figures == miniature.now()
