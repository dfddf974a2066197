from ftmon.trainer.probe.allocator import attribute
from ftmon.trainer.probe.raw import Mark

OFFSET = 1_000_000_000_000_000


def mark(phase, us):
    return Mark(phase, us * 1000, None, None, 0, 0)


def entry(action, size, us):
    return {"action": action, "size": size, "time_us": OFFSET // 1000 + us}


MARKS = [mark("forward", 100), mark("", 150), mark("backward", 200), mark("forward", 300), mark("idle", 400)]


def test_entries_belong_to_the_phase_whose_time_they_carry():
    trace = [
        entry("alloc", 1, 50),
        entry("alloc", 512, 120),
        entry("alloc", 4096, 180),
        entry("segment_alloc", 2**21, 180),
        entry("free_requested", 512, 210),
        entry("free_completed", 512, 220),
        entry("alloc", 1024, 350),
        entry("alloc", 99, 450),
    ]
    forward, backward = attribute(trace, MARKS, OFFSET)
    assert (forward.name, forward.allocations, forward.allocated_bytes) == ("forward", 3, 512 + 4096 + 1024)
    assert forward.largest == [4096, 1024, 512]
    assert (forward.segment_allocations, forward.segment_bytes) == (1, 2**21)
    assert (backward.name, backward.frees, backward.freed_bytes, backward.allocations) == ("backward", 1, 512, 0)


def test_a_ring_that_has_lost_the_step_s_beginning_tells_nothing():
    assert attribute([entry("alloc", 1, 390)], MARKS, OFFSET) == []
    assert attribute([], MARKS, OFFSET) == []
