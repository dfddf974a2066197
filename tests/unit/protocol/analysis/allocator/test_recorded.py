"""The model against traces that PyTorch recorded on an H200."""

import sys

import pytest
from ftmon.protocol.analysis.allocator.settings import Settings
from snapshot_files import DATA, read_snapshot

sys.path.append(str(DATA.parents[1] / "bench"))
from allocator_compare import compare

GIB = 2**30


@pytest.mark.parametrize("recorded_addresses", [True, False])
def test_a_training_up_to_its_out_of_memory_error_gives_the_recorded_segments(recorded_addresses: bool) -> None:
    snapshot = read_snapshot(DATA / "oom_backward.pickle.gz")
    found = compare(snapshot, 0, Settings(), 20 * GIB, recorded_addresses)
    assert found.recorded_changes == 232
    assert found.first_difference is None
    assert found.same_segments
    assert found.largest_reserved_error == 0
    assert (found.ooms, found.modelled_ooms) == (1, 1)
    if recorded_addresses:
        assert found.same_address == found.requests == 1353
        assert found.same_blocks


def test_a_steady_step_is_served_from_the_recorded_addresses() -> None:
    found = compare(read_snapshot(DATA / "step_zero3.pickle.gz"), 0, Settings())
    assert found.same_address == found.requests == 3862
    assert found.same_segments
    assert found.same_blocks
    assert found.modelled_reserved_peak_bytes == found.recorded_reserved_peak_bytes


def test_expandable_segments_with_unmapped_pages_between_mapped_ones_are_continued() -> None:
    snapshot = read_snapshot(DATA / "expandable_zero2.pickle.gz")
    found = compare(snapshot, 0, Settings(expandable_segments=True), device_bytes=150_109_880_320)
    assert found.same_address == found.requests == 6290
    assert found.same_blocks
    assert found.largest_reserved_error == 0


def test_other_settings_than_the_recorded_ones_give_other_segments() -> None:
    snapshot = read_snapshot(DATA / "oom_backward.pickle.gz")
    found = compare(snapshot, 0, Settings(expandable_segments=True), 20 * GIB)
    assert not found.same_segments
