"""Requested memory snapshots, with a recorder that holds none of a GPU's."""

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.probe.memory import snapshots
from ftmon.trainer.probe.memory.snapshots import LONG_ENTRIES, MAX_ENTRIES, MIN_ENTRIES, PhaseMarks, Recording
from ftmon.trainer.probe.phases.tracker import Mark
from snapshot_files import compact

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = []

    def record(
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 0,
        clear_history: bool = False,
        skip_actions: list[str] | None = None,
    ) -> None:
        found.append(((enabled, context, stacks, max_entries), {"clear": clear_history, "skip": skip_actions}))

    use(monkeypatch, record)
    return found


def use(monkeypatch: pytest.MonkeyPatch, record: Callable[..., None]) -> None:
    """Put another recorder in the place of PyTorch's, which nobody has used yet."""
    memory: Any = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(snapshots, "_real", None)
    monkeypatch.setattr(snapshots, "_by_script", False)


def script_records(**options: Any) -> None:
    memory: Any = torch.cuda.memory
    memory._record_memory_history(**options)


def test_going_to_stacks_and_back_keeps_the_history_and_the_size_of_the_ring(calls):
    recording = Recording()
    assert [recording.numbers(), recording.stacks(), recording.numbers()] == [True] * 3
    assert recording.cleared == 1
    assert [call[0] for call in calls] == [
        ("all", None, "all", MAX_ENTRIES),
        ("all", "alloc", "python", MAX_ENTRIES),
        ("all", None, "all", MAX_ENTRIES),
    ]
    fewer = {"clear": False, "skip": ["free_requested"]}
    assert [call[1] for call in calls] == [fewer, {"clear": False, "skip": None}, fewer]


def test_a_ring_of_another_size_is_cleared_first_and_keeps_every_action(calls):
    recording = Recording()
    recording.numbers()
    recording.stacks(long=True, frees=True)
    assert [call[0][0] for call in calls] == ["all", None, "all"]
    assert calls[-1] == (("all", "all", "python", LONG_ENTRIES), {"clear": False, "skip": None})
    recording.numbers()
    assert [call[0][0] for call in calls[3:]] == [None, "all"]
    assert recording.cleared == 3


def test_the_ring_is_as_large_as_a_step_asks_for_except_while_stacks_are_read(calls):
    recording = Recording()
    recording.fit(4_000)
    recording.numbers()
    assert recording.entries == 6_000
    recording.stacks()
    cleared = recording.cleared
    recording.numbers()
    assert (recording.entries, recording.cleared) == (MAX_ENTRIES, cleared), "what was recorded is still to be read"
    recording.numbers()
    assert recording.entries == calls[-1][0][3] == 6_000
    for asked, entries in ((1, MIN_ENTRIES), (1_000_000, MAX_ENTRIES)):
        recording.fit(asked)
        recording.numbers()
        assert recording.entries == entries


def test_an_older_torch_clears_at_every_switch_and_is_known_to(calls, monkeypatch):
    def record(enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = 0):
        calls.append(((enabled, context, stacks, max_entries), {}))

    use(monkeypatch, record)
    recording = Recording()
    recording.numbers()
    recording.stacks()
    assert not recording.keeps_history
    assert recording.cleared == 2


@pytest.mark.parametrize("switched", [True, False], ids=["after the probe", "before it"])
def test_a_recorder_that_the_script_switched_is_left_alone(calls, switched):
    recording = Recording()
    if switched:
        recording.numbers()
    else:
        snapshots.watch_script()
    script_records(max_entries=7)
    before = len(calls)
    assert (recording.by_script, recording.mode) == (True, "off")
    assert [recording.stacks(), recording.numbers(), recording.off()] == [False] * 3
    assert len(calls) == before


class Recorder:
    def claim(self, name: str) -> bool:
        return True

    def stacks(self, **_: bool) -> bool:
        return True

    off = release = lambda self: None


def test_a_snapshot_that_cannot_be_written_is_answered_and_the_next_one_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[{}, {}]], "segments": []})
    monkeypatch.setattr(snapshots, "LEAST_SECONDS", 0.0)
    sent: list[Any] = []
    answers: list[tuple[bool, str, dict[str, Any]]] = []
    device = SimpleNamespace(memory=SimpleNamespace(measure="cuda", device_index=0))
    rank: Any = SimpleNamespace(rank=3, device=device, run=SimpleNamespace(snapshots=tmp_path))
    others: Any = SimpleNamespace(step=7, present_marks=list, usual=0.0)
    taker = snapshots.Snapshots(
        snapshots.CaptureContext(rank, others, others, others, Recorder(), sent.append), PhaseMarks()
    )  # type: ignore[arg-type]

    def take() -> tuple[bool, str, dict[str, Any]]:
        taker.want("asked for", lambda *answer: answers.append(answer))
        taker.tick()
        return answers.pop()

    monkeypatch.setattr(snapshots, "SPARE_BYTES", 1 << 62)
    ok, text, _ = take()
    assert (ok, list(tmp_path.iterdir()), sent) == (False, [], [])
    assert "of the disk are free" in text
    monkeypatch.setattr(snapshots, "SPARE_BYTES", 0)
    with monkeypatch.context() as broken:
        broken.delattr(torch.cuda.memory, "_snapshot")
        assert not take()[0]
    ok, text, figures = take()
    assert (ok, text, figures["entries"], len(sent)) == (True, figures["path"], 2, 1)
    assert pickle.loads(Path(text).read_bytes())["segments"] == []


def mark(phase: str, ns: int) -> Mark:
    return Mark(phase, ns, None, None, 0, 0)


def test_the_last_steps_and_the_one_under_way_are_spans_of_the_device():
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


def test_only_so_many_steps_are_remembered_and_none_is_no_trouble():
    marks = PhaseMarks()
    found: dict[str, Any] = {"segments": [], "device_traces": [[]]}
    marks.annotate(found, 0, 1, [])
    assert found["external_annotations"] == []
    for step in range(1000):
        marks.note(step, [mark("forward", step), mark("idle", step + 1)])
    marks.annotate(found, 0, 1001, [mark("data", 1)])
    assert sum("step" in one["name"] for one in found["external_annotations"]) == 2 * 257
