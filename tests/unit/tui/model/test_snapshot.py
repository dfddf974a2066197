"""Phases, named spans and user metadata as bands over the trace."""

from typing import Any

import pytest
from caching_allocator import CachingAllocator
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.tui.model.snapshot import Band, Explorer, bands_of
from snapshot_files import compact

START = 1_000_000
"""The first entry's time, microseconds; each entry comes one after the other."""


def snapshot(*spans: tuple[str, int, int], device: int = 0) -> dict[str, Any]:
    allocator = CachingAllocator()
    for _ in range(9):
        allocator.alloc(512)
    made = allocator.snapshot()
    made["external_annotations"] = [
        {"name": name, "stage": stage, "device": device, "time_us": START + at}
        for name, begin, end in spans
        for stage, at in (("START", begin), ("END", end))
    ]
    return made


def rows(made: dict[str, Any]) -> list[list[Band]]:
    return bands_of(Replay(compact(made, "made"), 0))


def test_phases_come_before_steps_and_other_spans_with_harmless_names_and_cursors_in_words():
    made = snapshot(("epoch", 0, 6), ("ftmon step 4", 0, 9), ("ftmon forward", 0, 3), ("ftmon backward", 4, 9))
    assert rows(made) == [
        [Band(0, 3, "forward", "forward"), Band(4, 9, "backward", "backward")],
        [Band(0, 9, "step 4")],
        [Band(0, 6, "epoch")],
    ]
    made = snapshot(("ftmon step 4", 0, 9), ("ftmon forward", 0, 3), ("\x1b[31mred\x07", 2, 3))
    explorer = Explorer([Replay(compact(made, "made"), 0)])
    explorer.move(2)
    assert explorer.annotation_words() == "step 4 > forward > red�"
    explorer.move(8)
    assert explorer.annotation_words() == "step 4"


WITHIN = ("layer 1", 1, 2), ("layer 2", 3, 4)


@pytest.mark.parametrize(
    ("spans", "bands"),
    [
        ([("forward", 0, 3)], [Band(0, 3, "forward")]),  # called like a phase, and none of ftmon's
        # Of spans in each other the outermost, unless one holds all.
        ([("model", 0, 5), *WITHIN, ("other", 6, 9)], [Band(0, 5, "model"), Band(6, 9, "other")]),
        ([("model", 0, 9), *WITHIN], [Band(1, 2, "layer 1"), Band(3, 4, "layer 2")]),
        ([("before", -9, -1), ("after", 100, 200), ("across", -5, 2)], [Band(0, 2, "across")]),
    ],
)
def test_other_spans_are_one_row(spans: list[tuple[str, int, int]], bands: list[Band]) -> None:
    assert rows(snapshot(*spans)) == [bands]


def test_spans_of_another_device_have_no_bands_and_neighbours_with_the_same_user_metadata_are_one():
    assert rows(snapshot(("epoch", 0, 6), device=1)) == []
    made = snapshot(("epoch", 0, 6))
    for entry in made["device_traces"][0]:
        del entry["time_us"]
    assert rows(made) == []
    made = snapshot()
    for entry, note in zip(made["device_traces"][0], ["", "a", "a", "b", "", "", "a"], strict=False):
        entry["user_metadata"] = note
    assert rows(made) == [[Band(1, 2, "a"), Band(3, 3, "b"), Band(6, 6, "a")]]
