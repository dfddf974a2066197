"""Leaving fake tensors for a moment."""

import contextlib
from collections.abc import Generator
from typing import Any


@contextlib.contextmanager
def left() -> Generator[None]:
    """Leave fake tensors and the recording of them in the body."""
    from torch.utils._python_dispatch import _disable_current_modes

    modes: Any = _disable_current_modes
    with modes():
        yield
