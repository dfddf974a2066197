"""What the probe reads out of the allocator at a failure: a real snapshot of an H200 that ran out of memory."""

import gzip
import os
import pickle
from itertools import pairwise
from typing import Any

import pytest
from ftmon.protocol.messages.telemetry import PhaseRecord, Span, Step
from ftmon.trainer.probe.memory import snapshots
from ftmon.trainer.probe.oom.report import STARTS, OomHistory, holders, parts_of_blocks, pieces, uses
from ftmon.trainer.probe.phases.tracker import Mark
from places import DATA

GIB = 2**30


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    with gzip.open(DATA / "oom_backward.pickle.gz") as file:
        return pickle.load(file)


def allocated(found: dict[str, Any]) -> int:
    return sum(segment["allocated_size"] for segment in found["segments"])


def test_a_snapshot_s_segments_give_the_free_memory_for_a_request_and_who_held_most(found):
    segments = found["segments"]
    free = pieces(segments, 5 * GIB, segments[0]["stream"])
    assert free.free == sum(segment["total_size"] - segment["active_size"] for segment in segments)
    assert free.largest < 5 * GIB
    assert free.largest <= free.usable <= free.free
    assert pieces(segments, 5 * GIB, 12345).usable == 0  # what another stream has free serves nobody else
    assert sum(use.size_bytes for use in uses(segments)) == sum(segment["total_size"] for segment in segments)
    groups = holders(segments)
    assert groups[0].frames[-1].endswith("loss_utils.py:59 ForCausalLMLoss")
    assert groups == sorted(groups, key=lambda group: -group.bytes)


def test_parts_add_up_to_what_is_allocated_and_without_a_trace_follow_from_the_failing_phase(found):
    segments, trace = found["segments"], found["device_traces"][0]
    biggest = max(
        (block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"),
        key=lambda block: block["size"],
    )
    marks = [Mark("forward", trace[0]["time_us"] * 1000, None, None, 0, 0)]
    sums, note = parts_of_blocks(segments, trace, {biggest["address"]: "parameters"}, marks, 0, "forward")
    assert (sum(sums.values()), sums["parameters"]) == (allocated(found), biggest["size"])
    assert sums["activations"] > 0
    assert note == ""
    for phase, part in (("backward", "activations"), ("optimizer", "temporaries"), ("checkpoint", "other")):
        sums, note = parts_of_blocks(segments, [], {}, [], 0, phase)
        assert sums == {part: allocated(found)}
        assert "not recorded" in note


def test_the_snapshot_is_for_its_owner_alone_with_its_newest_entries_or_a_problem_is_said(found, tmp_path, monkeypatch):
    path, size, note = snapshots.write_snapshot(tmp_path / "own.pickle", dict(found))
    assert path is not None
    assert path == tmp_path / "own.pickle"
    assert (size, note) == (path.stat().st_size, "")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert pickle.loads(path.read_bytes())["segments"] == found["segments"]
    whole = len(pickle.dumps(found, protocol=4))
    monkeypatch.setattr(snapshots, "MOST_BYTES", whole * 3 // 4)
    path, size, note = snapshots.write_snapshot(tmp_path / "a.pickle", dict(found))
    assert path is not None
    assert size <= whole * 3 // 4
    assert note.startswith("only its last ")
    kept = pickle.loads(path.read_bytes())["device_traces"][0]
    assert kept == found["device_traces"][0][-len(kept) :]
    monkeypatch.undo()
    monkeypatch.setattr(snapshots, "SPARE_BYTES", 1 << 62)
    path, _, note = snapshots.write_snapshot(tmp_path / "a.pickle", dict(found))
    assert path is None
    assert "of the disk are free" in note
    monkeypatch.undo()
    path, _, note = snapshots.write_snapshot(tmp_path / "missing" / "a.pickle", dict(found))
    assert path is None
    assert note == "no snapshot: No such file or directory"


def step(number: int, start: int, shape: list[int], peak: int) -> Step:
    span = Span(start, start, peak)
    return Step(0, number, 0.0, 1, [PhaseRecord("forward", 0, 1, span, span)], batch_shape=shape)


def test_the_largest_batch_the_highest_peak_and_beginnings_of_steps_back_to_the_first_are_kept():
    history = OomHistory()
    for number, shape in enumerate(([4, 100], [2, 900], [4, 300], *[[1]] * 5_000)):
        history.note(step(number, number, shape, 9_000 - number))
    assert (history.largest_shape, history.largest_shape_step, history.peak_bytes) == ([2, 900], 1, 9_000)
    starts = history.starts()
    assert STARTS // 2 <= len(starts) <= STARTS
    (gap,) = {after - before for before, after in pairwise(starts)}
    assert starts[0] == 0
    assert starts[-1] > 5_003 - 2 * gap
