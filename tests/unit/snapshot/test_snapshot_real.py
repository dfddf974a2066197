"""The two real snapshots, from an H200: against what the allocator said, and against PyTorch's own viewer."""

import gzip
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.analysis.allocator.settings import SMALL_MOST, round_size
from ftmon.protocol.analysis.allocator.snapshot_layout import fragmentation, layout_at, stack_tree
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay, size_large
from ftmon.protocol.analysis.allocator.snapshot_views import (
    difference,
    difference_report,
    find_oom,
    live_stacks,
    report,
)
from places import DOCS
from snapshot_files import DATA, read_snapshot

NAMES = ["oom_backward", "step_zero3"]


def path_of(name: str) -> Path:
    return DATA / f"{name}.pickle.gz"


@pytest.fixture(scope="module")
def replays() -> dict[str, Replay]:
    return {name: Replay(read_snapshot(path_of(name)), 0) for name in NAMES}


def raw(name: str) -> dict[str, Any]:
    with gzip.open(path_of(name)) as file:
        return pickle.load(file)


@pytest.mark.parametrize("name", NAMES)
def test_the_end_is_what_the_segments_say(replays: dict[str, Replay], name: str) -> None:
    replay, segments = replays[name], raw(name)["segments"]
    for curve, key in (
        (replay.allocated, "allocated_size"),
        (replay.active, "active_size"),
        (replay.requested, "requested_size"),
        (replay.reserved, "total_size"),
    ):
        assert curve[-1] == sum(segment[key] for segment in segments)


@pytest.mark.parametrize("name", NAMES)
def test_live_blocks_add_up_to_the_figure_at_every_moment(replays: dict[str, Replay], name: str) -> None:
    replay = replays[name]
    for index in range(-1, replay.entries, 97):
        live = live_stacks(replay, index)
        assert sum(tally.bytes for tally in live.values()) == replay.at(replay.allocated, index)
        assert stack_tree(replay.snapshot, live).bytes == replay.at(replay.allocated, index)


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_at_the_end_has_the_snapshots_own_blocks(replays: dict[str, Replay], name: str) -> None:
    found = [
        (block.address, block.size) for piece in layout_at(replays[name], replays[name].last) for block in piece.blocks
    ]
    told = [(block["address"], block["size"]) for segment in raw(name)["segments"] for block in segment["blocks"]]
    assert sorted(found) == sorted(told)


def test_sizes_worked_out_from_the_rules_are_those_of_the_blocks_that_stand_at_the_end() -> None:
    replay = Replay(read_snapshot(path_of("oom_backward")), 0)
    of = replay.allocations
    known = dict(of.known)
    assert len(known) == 475
    of.known.clear()
    for number in known:
        of.sizes[number] = round_size(of.requested[number])
    large = {number for number, size in enumerate(of.sizes) if size > SMALL_MOST}
    size_large(of, replay.snapshot, large)
    assert {number: of.sizes[number] for number in known} == known


def test_the_out_of_memory_error_is_as_the_allocators_message_told_it(replays: dict[str, Replay]) -> None:
    """Tried to allocate 4.64 GiB; 18.28 GiB allocated by PyTorch; 183.27 MiB reserved but unallocated."""
    oom = find_oom(replays["oom_backward"])
    assert oom is not None
    assert f"{oom.requested_bytes / 2**30:.2f}" == "4.64"
    assert f"{oom.allocated_bytes / 2**30:.2f}" == "18.28"
    assert f"{(oom.reserved_bytes - oom.allocated_bytes) / 2**20:.2f}" == "183.27"
    assert oom.kind == "limit"
    assert find_oom(replays["step_zero3"]) is None


def test_a_steady_step_ends_where_it_began_and_peaks_in_between(replays: dict[str, Replay]) -> None:
    replay = replays["step_zero3"]
    assert replay.allocated[0] == replay.allocated[-1]
    assert replay.peak_bytes > replay.allocated[-1]
    assert replay.at(replay.allocated, replay.peak_index) == replay.peak_bytes


def test_json_has_the_documented_fields(replays: dict[str, Replay]) -> None:
    replay = replays["oom_backward"]
    told = report(replay.snapshot, [replay], 5)
    text = (DOCS / "snapshot.md").read_text()
    documented = set(re.findall(r"`(\w+)`", text))
    fields = {*told, *told["devices"][0], *told["top_stacks"][0], *told["largest_blocks"][0], *told["oom"]}
    fields |= {*told["oom"]["stack"][0], *difference_report([replay], [replay])}
    assert fields <= documented
    assert len(told["top_stacks"]) == 5
    assert told["oom"]["stack"][0]["name"] == "cross_entropy"


def test_a_snapshot_does_not_differ_from_itself_and_changes_add_up(replays: dict[str, Replay]) -> None:
    one, other = replays["oom_backward"], replays["step_zero3"]
    assert difference(one, one.last, one, one.last) == []
    changes = difference(one, one.last, other, other.last)
    assert sum(change.bytes for change in changes) == other.allocated[-1] - one.allocated[-1]


@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_own_viewer_counts_the_same(replays: dict[str, Replay], name: str) -> None:
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
def test_pytorchs_flame_graph_has_the_same_bytes_a_stack(replays: dict[str, Replay], name: str) -> None:
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
