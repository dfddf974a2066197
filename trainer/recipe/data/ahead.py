"""The next micro-batch, loaded while the device computes."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread

import torch

from .collate import Batch


class Ahead:
    """Loads batches one ahead, in a thread: a forked process would copy what the rank offloads."""

    def __init__(self, batches: Iterator[Batch], device: torch.device) -> None:
        """Begin with the first batch.

        Args:
            batches: without end; from now on the thread's alone.
            device: the rank's, on whose behalf memory is page-locked.
        """
        self._batches = batches
        self._device = device
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._loaded: SimpleQueue[Batch | BaseException] = SimpleQueue()
        # A daemon: a file system that no longer answers must not keep the rank from ending.
        Thread(target=self._load, name="next batch", daemon=True).start()
        self._asked.put(True)

    def next_batch(self) -> Batch:
        """Return the next batch, and have the one after it loaded.

        Raises:
            BaseException: whatever the loader raised.
        """
        found = self._loaded.get()
        if isinstance(found, BaseException):
            raise found
        self._asked.put(True)
        return found

    def close(self) -> None:
        """Load no more."""
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
