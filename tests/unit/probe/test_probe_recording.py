from collections.abc import Callable
from typing import Any

import pytest
import torch
from ftmon.trainer.probe.memory import snapshots
from ftmon.trainer.probe.memory.snapshots import LONG_ENTRIES, MAX_ENTRIES, MIN_ENTRIES, Recording

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


def use_older_torch(monkeypatch: pytest.MonkeyPatch, found: Calls) -> None:
    def record(enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = 0):
        found.append(((enabled, context, stacks, max_entries), {}))

    use(monkeypatch, record)


def script_records() -> Callable[..., None]:
    memory: Any = torch.cuda.memory
    return memory._record_memory_history


def test_going_to_stacks_and_back_keeps_the_history_and_the_size_of_the_ring(calls: Calls) -> None:
    recording = Recording()
    assert recording.numbers()
    assert recording.cleared == 1
    assert recording.stacks()
    assert recording.numbers()
    assert recording.cleared == 1
    assert [call[0] for call in calls] == [
        ("all", None, "all", MAX_ENTRIES),
        ("all", "alloc", "python", MAX_ENTRIES),
        ("all", None, "all", MAX_ENTRIES),
    ]
    fewer = {"clear": False, "skip": ["free_requested"]}
    assert [call[1] for call in calls] == [fewer, {"clear": False, "skip": None}, fewer]


def test_a_ring_of_another_size_is_cleared_first_and_keeps_every_action(calls: Calls) -> None:
    recording = Recording()
    recording.numbers()
    recording.stacks(long=True, frees=True)
    assert [call[0][0] for call in calls] == ["all", None, "all"]
    assert calls[-1] == (("all", "all", "python", LONG_ENTRIES), {"clear": False, "skip": None})
    recording.numbers()
    assert [call[0][0] for call in calls[3:]] == [None, "all"]
    assert recording.cleared == 3


def test_the_ring_is_as_large_as_a_step_asks_for_except_while_stacks_are_read(calls: Calls) -> None:
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
    recording.fit(1)
    recording.numbers()
    assert recording.entries == MIN_ENTRIES
    recording.fit(1_000_000)
    recording.numbers()
    assert recording.entries == MAX_ENTRIES


def test_an_older_torch_clears_at_every_switch_and_is_known_to(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    use_older_torch(monkeypatch, calls)
    recording = Recording()
    recording.numbers()
    recording.stacks()
    assert not recording.keeps_history
    assert recording.cleared == 2


def test_a_recorder_that_the_script_switched_is_left_alone(calls: Calls) -> None:
    recording = Recording()
    recording.numbers()
    script_records()("all", max_entries=7)
    assert recording.by_script
    assert recording.mode == "off"
    before = len(calls)
    assert not recording.stacks()
    assert not recording.numbers()
    assert not recording.off()
    assert len(calls) == before


def test_a_script_that_records_before_the_first_switch_keeps_its_recorder(calls: Calls) -> None:
    snapshots.watch_script()
    script_records()(max_entries=7)
    recording = Recording()
    assert not recording.numbers()
    assert (recording.by_script, recording.mode, len(calls)) == (True, "off", 1)


def test_stacks_are_recorded_for_one_reader_at_a_time() -> None:
    recording = Recording()
    assert recording.claim("snapshot")
    assert not recording.claim("arm")
    recording.release()
    assert recording.claim("arm")
