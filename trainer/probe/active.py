"""This process's state as a rank: its one probe, which all hooks use, and counters from before it exists."""

from collections.abc import Callable
from threading import get_ident

import torch

from .device import memory
from .events import TorchEvents
from .guard import nothing
from .phases.tracker import Counts
from .probe import Probe

become_rank: Callable[[], None] = nothing
"""Makes this process a rank if it is to be one and is not yet; hooks call it before an optimizer or engine is made."""
events: TorchEvents | None = None  # Receiver of the hooks' reports; None until the process turns out to be a rank
probe: Probe | None = None
forked = False  # Whether this process is a fork of a rank, which never gets a probe
counts = Counts()


_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Returns the number of the backward that runs this thread; -1 outside of a backward."""


def mine() -> TorchEvents | None:
    """Return the receiver of the hooks' reports if the probe is on and the caller is the training thread.

    A thread of autograd counts as the training thread: it runs a GPU's backward while that one waits for it.
    """
    found = events
    if found is None:
        return None
    guard = found.guard
    if guard.enabled and (guard.thread == get_ident() or (found.in_backward and _graph_task() >= 0)):
        return found
    return None


def switched_on() -> TorchEvents | None:
    """Return the receiver of the hooks' reports if the probe is on, on any thread."""
    found = events
    return found if found is not None and found.guard.enabled else None


def leave_to_parent() -> None:
    """Disable the probe in a fork of a rank; the parent keeps it."""
    global events, probe, forked
    memory.forget()
    if events is not None:
        events = probe = None
        forked = True


def current() -> Probe | None:
    """Return this process's probe, or None if it is not watched (or the probe has switched itself off).

    The recipe, ``ftmon.watch`` and the TrainerCallback use this alone.
    """
    found = probe
    return found if found is not None and found.guard.enabled else None
