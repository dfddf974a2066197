"""What observations from outside say of a rank: its phase, and whether it has moved."""

import json
import os

import pytest
from ftmon.protocol.analysis.stalls import evidence
from ftmon.protocol.host.process import start_ticks
from ftmon.trainer.host.inspection.inspect import DumpTarget
from ftmon.trainer.host.inspection.outside import SAME_STACKS, Observer, as_faulthandler, phase_of

TORCH = "/env/lib/python3.11/site-packages/torch"
BACKWARD = ("Tensor.backward", f"{TORCH}/_tensor.py", 623)
LOADER = ("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py", 700)
CALL = ("Module._call_impl", f"{TORCH}/nn/modules/module.py", 1700)
ADAM = ("AdamW.step", f"{TORCH}/optim/adamw.py", 200)
REDUCE = ("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 2800)
SCRIPT = ("train", "/home/me/train.py", 41)


def text_of(*frames: tuple[str, str, int]) -> str:
    found = [{"name": name, "filename": file, "line": line} for name, file, line in frames]
    threads = [
        {"os_thread_id": 7, "thread_id": 70, "frames": found},
        {"os_thread_id": 8, "thread_id": 80, "frames": []},
    ]
    return as_faulthandler(json.loads(json.dumps(threads)), 7)


@pytest.mark.parametrize(
    ("frames", "phase", "doing"),
    [
        ((BACKWARD, SCRIPT), "backward", "backward"),
        ((LOADER, SCRIPT), "data", "data"),
        ((("linear", f"{TORCH}/nn/functional.py", 9), CALL, SCRIPT), "forward", "code"),
        ((ADAM, SCRIPT), "optimizer", "code"),
        ((REDUCE, SCRIPT), "idle", "collective"),
        ((SCRIPT,), "idle", "code"),
    ],
)
def test_the_stack_of_the_main_thread_gives_phase_and_place(frames, phase, doing) -> None:
    thread = evidence.training_thread(evidence.parse(text_of(*frames)))
    place = evidence.where(thread.frames)
    assert (phase_of(thread.frames, place), place.doing) == (phase, doing)


class Reads:
    """Gives one text after the other; the process that is observed is this one, which runs between two looks."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def __call__(self, _pid: int) -> tuple[str, str]:
        return (self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]), ""


def this_process() -> DumpTarget:
    return DumpTarget(0, os.getpid(), start_ticks(os.getpid()) or 0, None)


def progress_of(observer: Observer) -> int:
    observer.stacks([this_process()])
    (seen,) = observer.look([this_process()])
    return seen.progress


def test_another_stack_is_progress_and_a_process_that_is_gone_or_another_is_not_observed():
    observer = Observer(Reads(text_of(BACKWARD, SCRIPT), text_of(LOADER, SCRIPT), text_of(ADAM, SCRIPT)))
    first = progress_of(observer)
    assert progress_of(observer) > first
    assert Observer(Reads(text_of(SCRIPT))).look([this_process()._replace(start_ticks=1)]) == []
    observer = Observer(lambda pid: ("", "py-spy is not installed here"))
    assert observer.stacks([this_process()]) == ({}, {0: "py-spy is not installed here"})


def test_waking_up_at_one_place_is_progress_for_a_while_and_a_pause_for_native_frames_none(monkeypatch):
    woken = iter(range(0, 10_000, 10))
    monkeypatch.setattr("ftmon.trainer.host.inspection.outside._voluntary", lambda pid: next(woken))
    observer = Observer(Reads(text_of(SCRIPT)))
    found = [progress_of(observer) for _ in range(SAME_STACKS + 6)]
    assert found[2] > found[0]
    assert found[-1] == found[-3]
    woken = iter((10, 10, 20, 20, 20, 20))
    monkeypatch.setattr("ftmon.trainer.host.inspection.outside._voluntary", lambda pid: next(woken))
    observer = Observer(Reads(text_of(SCRIPT)))
    (first,) = observer.look([this_process()])
    observer.forgive()
    (second,) = observer.look([this_process()])
    assert second.progress == first.progress
