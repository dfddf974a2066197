from ftmon.protocol.analysis.memory.leak import footprint
from ftmon.protocol.messages.telemetry import DeviceSample, ProcessMemory
from hypothesis import given
from hypothesis import strategies as st

GIB = 2**30


def sample(used, *processes):
    return DeviceSample("node", "gpu", 0, "H200", 1.0, used, 140 * GIB, processes=list(processes))


def test_each_line_is_one_subtraction_and_all_add_up_to_what_is_used():
    found = footprint(
        30 * GIB,
        34 * GIB,
        sample(45 * GIB, ProcessMemory(11, 36 * GIB, 1), ProcessMemory(12, 5 * GIB, 0), ProcessMemory(99, 3 * GIB)),
        1,
    )
    assert found is not None
    assert (found.allocated, found.unused, found.context) == (30 * GIB, 4 * GIB, 2 * GIB)
    assert (found.others, found.unexplained) == (8 * GIB, GIB)
    assert (found.used, found.total, found.free) == (45 * GIB, 140 * GIB, 95 * GIB)


def test_a_rank_that_nvml_does_not_list_has_no_footprint():
    assert footprint(1, 2, sample(GIB, ProcessMemory(11, GIB)), 0) is None


@given(*[st.integers(0, 2**40)] * 4, st.integers(1, 2**40))
def test_the_lines_add_up_whatever_was_read_when(allocated, reserved, used, other, own):
    found = footprint(allocated, reserved, sample(used, ProcessMemory(1, own, 0), ProcessMemory(2, other)), 0)
    assert found is not None
    assert found.allocated + found.unused + found.context + found.others + found.unexplained == found.used
