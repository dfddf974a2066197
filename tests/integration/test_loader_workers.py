"""Dataloader workers: their stacks, read by the rank that waits for them, and the settings that the probe reads off."""

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from eventually import eventually
from ftmon.protocol.analysis.stalls import evidence
from ftmon.protocol.analysis.stalls.evidence import Place
from ftmon.trainer.probe.link.publisher import loader_info
from ftmon.trainer.probe.link.stacks import SIGNAL, answer_signals, stacks_of_workers
from torch.utils.data import DataLoader, Dataset


class Stuck(Dataset[torch.Tensor]):
    """Data whose first row waits for a lock that this process holds."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            return torch.ones(index + 1)


def loading(lock: Any, **settings: Any) -> Any:
    return iter(DataLoader(Stuck(lock), batch_size=1, num_workers=1, multiprocessing_context="fork", **settings))


def test_the_line_at_which_a_worker_waits_is_read_and_the_worker_goes_on() -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()
    rows = loading(lock, worker_init_fn=lambda _: answer_signals())
    text = eventually(lambda: "__getitem__" in (found := stacks_of_workers(os.getpid())) and found, "its stack")
    (thread,) = evidence.parse(text)
    assert thread.worker == rows._workers[0].pid
    place = evidence.with_worker(Place("data", "next() of the dataloader", "train.py:3 in main"), [thread])
    assert f"whose worker (pid {thread.worker}) is at test_loader_workers.py:" in place.words
    assert place.words.endswith("in __getitem__")
    main = 'Thread 0x01 (most recent call first):\n  File "train.py", line 3 in main\n'
    own = evidence.training_thread(evidence.parse(main + text))
    assert own.frames[0].place == "train.py:3", "a worker's is never the training thread"
    lock.release()
    assert [len(row[0]) for row in rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("prepared", [False, True])
def test_a_worker_that_does_not_catch_the_signal_or_uses_it_itself_is_left_alone(prepared: bool) -> None:
    lock = multiprocessing.get_context("fork").Lock()
    lock.acquire()

    def own(_: int) -> None:
        signal.signal(SIGNAL, lambda *_: os._exit(1))
        answer_signals()

    rows = loading(lock, **({"worker_init_fn": own} if prepared else {}))
    assert stacks_of_workers(os.getpid()) == ""
    lock.release()
    assert len(list(rows)) == 4


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.ones(4)] * 8)


def test_the_settings_of_a_loader_with_workers_are_read_off_its_iterator():
    data = torch.utils.data.TensorDataset(torch.ones(4))
    loader = torch.utils.data.DataLoader(data, num_workers=2, prefetch_factor=3, persistent_workers=True)
    iterator = iter(loader)
    found = loader_info(iterator)
    assert (found.workers, found.prefetch_factor, found.persistent_workers) == (2, 3, True)
    assert found.cpus >= 1
    assert not found.iterable
    streamed = loader_info(iter(torch.utils.data.DataLoader(Stream(), num_workers=2)))
    assert streamed.iterable
    del iterator
