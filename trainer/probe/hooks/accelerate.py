"""Hooks into accelerate's dataloaders, which fetch each batch before they hand over the one before it."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ..active import mine
from ..replace import replace


def install(module: ModuleType) -> None:
    """Hook into the loaders of ``accelerate.data_loader`` that look ahead."""
    for name in ("DataLoaderShard", "DataLoaderDispatcher"):
        replace(getattr(module, name), "__iter__", _iterating)


def _iterating(original: Any) -> Callable[..., Any]:
    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        batches = original(self)
        while True:
            training = mine()
            if training is not None:
                training.micro_steps.look_ahead()
            try:
                batch = next(batches)
            except BaseException as error:
                if training is not None:
                    training.micro_steps.delivered_all()
                if isinstance(error, StopIteration):
                    return
                raise
            if training is not None:
                training.micro_steps.deliver(batch)
            yield batch

    return __iter__
