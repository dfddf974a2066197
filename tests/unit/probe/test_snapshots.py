"""Requested memory snapshots, with a recorder that holds none of a GPU's."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ftmon.trainer.probe.memory import snapshots
from ftmon.trainer.probe.memory.snapshots import CaptureContext, PhaseMarks, Snapshots


class Recorder:
    def claim(self, name: str) -> bool:
        return True

    def stacks(self, **_: bool) -> bool:
        return True

    off = release = lambda self: None


def test_a_snapshot_that_cannot_be_written_is_answered_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[{}, {}]], "segments": []})
    monkeypatch.setattr(snapshots, "LEAST_SECONDS", 0.0)
    sent: list[Any] = []
    answers: list[tuple[bool, str, dict[str, Any]]] = []
    device = SimpleNamespace(memory=SimpleNamespace(measure="cuda", device_index=0))
    rank: Any = SimpleNamespace(rank=3, device=device, run=SimpleNamespace(snapshots=tmp_path))
    others: Any = SimpleNamespace(step=7, marks=[], usual=0.0)
    taker = Snapshots(CaptureContext(rank, others, others, others, Recorder(), sent.append), PhaseMarks())  # type: ignore[arg-type]

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
