"""Steps and phases in memory snapshots, as annotations that the explorer and PyTorch's viewer read."""

import time
from typing import Any

from ftmon.protocol.snapshot.columns import compact
from ftmon.trainer.probe.memory.snapshots import PhaseMarks
from ftmon.trainer.probe.phases.tracker import Mark


def mark(phase: str, ns: int) -> Mark:
    return Mark(phase, ns, None, None, 0, 0)


def test_the_last_steps_and_the_one_under_way_are_spans_of_the_device() -> None:
    begun, now = time.time(), time.perf_counter_ns()
    marks = PhaseMarks()
    ms = 1_000_000
    steps = [("data", -90), ("forward", -80), ("", -75), ("backward", -60), ("optimizer", -50), ("idle", -40)]
    marks.note(7, [mark(phase, now + at * ms) for phase, at in steps])
    found: dict[str, Any] = {"segments": [], "device_traces": [[], []]}
    marks.annotate(found, 1, 8, [mark("idle", now - 40 * ms), mark("forward", now - 30 * ms)])
    spans = compact(found, "made").annotations
    assert {span.device for span in spans} == {1}
    begin = spans[0].begin_us
    told = [(span.name, round((span.begin_us - begin) / 1000)) for span in spans]
    assert told == [
        ("ftmon step 7", 0), ("ftmon data", 0), ("ftmon forward", 10), ("ftmon backward", 30), ("ftmon optimizer", 40),
        ("ftmon step 8", 50), ("ftmon idle", 50), ("ftmon forward", 60),
    ]  # fmt: skip
    assert all(span.end_us >= span.begin_us for span in spans)
    assert (begun - 1) * 1e6 < spans[-1].end_us < (time.time() + 1) * 1e6


def test_only_so_many_steps_are_remembered_and_none_is_no_trouble() -> None:
    marks = PhaseMarks()
    found: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    marks.annotate(found, 0, 1, [])
    assert found["external_annotations"] == []
    for step in range(1000):
        marks.note(step, [mark("forward", step), mark("idle", step + 1)])
    marks.annotate(found, 0, 1001, [mark("data", 1)])
    assert sum("step" in one["name"] for one in found["external_annotations"]) == 2 * 257
