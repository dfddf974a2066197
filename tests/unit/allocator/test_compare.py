"""The comparison with traces: a recorded run of the model itself is met from any entry on, another one is not."""

import random

import pytest
from ftmon.protocol.analysis.allocator.compare import Comparison, compare
from ftmon.protocol.analysis.allocator.settings import MIB, Settings
from ftmon.protocol.analysis.allocator.views import DeviceOutOfMemory
from recording_allocator import RecordingAllocator

DEVICE = 4096 * MIB
KINDS = {
    "native": Settings(),
    "expandable": Settings(expandable_segments=True),
    "split": Settings(max_split_size_bytes=64 * MIB),
    "divisions": Settings(roundup_power2_divisions=(4,) * 16),
    "collect": Settings(garbage_collection_threshold=0.6),
}


def recorded(settings: Settings, seed: int, allowed: int | None) -> RecordingAllocator:
    draw = random.Random(seed)
    model = RecordingAllocator(settings, DEVICE)
    if allowed is not None:
        model.limit_reserved(allowed)
    held: list[int] = []
    for _ in range(700):
        act = draw.random()
        if act < 0.55:
            model.complete_events()
            size = int(2 ** draw.uniform(*draw.choice([(4, 12), (12, 21), (20, 24), (24, 27)])))
            try:
                held.append(model.allocate(size, draw.choice([0, 0, 3])))
            except DeviceOutOfMemory:
                while len(held) > 10:
                    model.free(held.pop(draw.randrange(len(held))))
        elif act < 0.99 and held:
            handle = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.1:
                model.record_stream(handle, 7)
            model.free(handle)
        elif act > 0.995 and allowed is None:
            model.empty_cache()
    return model


def met(found: Comparison) -> bool:
    return (
        found.first_difference is None
        and found.same_segments
        and found.same_blocks
        and found.same_address == found.requests
        and found.largest_reserved_error == 0
        and found.ooms == found.modelled_ooms
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("allowed", [None, 1200 * MIB])
def test_a_recorded_run_is_met_from_its_beginning(kind: str, allowed: int | None) -> None:
    for seed in range(4):
        model = recorded(KINDS[kind], seed, allowed)
        found = compare(model.snapshot(len(model.entries)), 0, KINDS[kind], allowed, device_bytes=DEVICE)
        assert met(found), found
        assert found.requests > 300


@pytest.mark.parametrize("kind", ["native", "expandable", "divisions"])
def test_a_recorded_run_is_met_from_the_middle(kind: str) -> None:
    for seed in range(6):
        model = recorded(KINDS[kind], seed, None)
        found = compare(model.snapshot(len(model.entries) // 2), 0, KINDS[kind], device_bytes=DEVICE)
        assert met(found), found


def test_a_trace_of_another_allocator_is_not_met() -> None:
    model = recorded(KINDS["divisions"], 1, None)
    found = compare(model.snapshot(len(model.entries)), 0, Settings(), device_bytes=DEVICE)
    assert not found.same_segments
    assert found.first_difference is not None
