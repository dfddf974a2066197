"""Loads the next micro-batch while the device computes."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread

import torch

from .collate import Batch


class Ahead:
    """Loads one batch ahead, in a thread: a forked process would copy the rank's offloaded memory."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        """Begin to load the first batch.

        ``batches`` are endless; from now on only the thread may use them.
        """
        self._batches = batches
        self._device = device
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._loaded: SimpleQueue[Batch | BaseException] = SimpleQueue()
        # A daemon: a file system that no longer answers must not keep the rank from ending.
        Thread(target=self._load, name="next batch", daemon=True).start()
        self._asked.put(True)

    def next_batch(self) -> Batch:
        """Return the next batch, and begin to load the one after it.

        Raises:
            BaseException: whatever the loader raised.
        """
        found = self._loaded.get()
        if isinstance(found, BaseException):
            raise found
        self._asked.put(True)
        return found

    def close(self) -> None:
        """Stop loading."""
        self._asked.put(False)

    def _load(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first GPU
        while self._asked.get():
            try:
                self._loaded.put(next(self._batches))
            except BaseException as error:
                self._loaded.put(error)
                return
