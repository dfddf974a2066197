"""Hooks into accelerate's dataloaders, which prefetch one batch."""

from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..active import mine
from ..events import OnHost
from ..replace import replace

_UNDER_WAY = 2
"""Batches that a loader has fetched when it returns the first of them; earlier ones were left out."""


def install(module: ModuleType) -> None:
    """Hook into the prefetching loaders of ``accelerate.data_loader``."""
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        replace(getattr(module, name), "__iter__", _iterating)


def _iterating(original: Any) -> Callable[..., Any]:
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        batches = original(self)
        prefetched: deque[OnHost] = deque(maxlen=_UNDER_WAY)
        while True:
            events = mine()
            if events is not None:
                events.prefetching(prefetched)
            try:
                batch = next(batches)
            except BaseException as error:
                if events is not None:
                    events.prefetched_all()
                if isinstance(error, StopIteration):
                    return
                raise
            if events is not None:
                events.delivered(batch)
            yield batch

    return __iter__
