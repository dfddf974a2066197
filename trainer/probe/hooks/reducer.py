"""Measures waits inside DDP's reducer, which calls NCCL and gloo from C++ where no wrapper of a call sees it.

A hook on the loss queues a callback of the autograd engine. Callbacks run in the order in which they were queued, once
the whole graph has been computed. The reducer queues its own callback, which waits for its buckets, when its last
bucket is ready. So the first callback runs when this rank has computed its gradients. The time from then to the end of
``backward`` is waiting: of the host on gloo, of the stream under NCCL (between two events). Neither the gradients nor
the overlap of computation and communication change.

Forward waits where DDP broadcasts buffers (``_sync_buffers``).
"""

import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from .. import active
from ..active import mine
from ..events import TorchEvents
from ..replace import replace


class _Backward:
    """The backward under way; ``computed_ns`` is 0 until this rank has computed its gradients."""

    __slots__ = ("computed_ns", "counted_ns", "event", "events")

    def __init__(self, events: TorchEvents) -> None:
        self.events = events
        self.computed_ns = 0
        self.counted_ns = 0
        self.event: Any = None

    def begun(self, _gradient: Any) -> None:
        """Queue ``computed`` ahead of the reducer's callbacks; autograd calls this first in a backward."""
        try:
            _queue_callback(self.computed)
        except Exception as error:
            self.events.guard.disable(error)

    def computed(self) -> None:
        """Note that all gradients of this rank are computed; on CUDA a thread of the autograd engine calls this."""
        try:
            self.event = self.events.wait_begins()
            self.counted_ns = active.counts.host_ns
            self.computed_ns = perf_counter_ns()
        except Exception as error:
            self.events.guard.disable(error)

    def over(self) -> None:
        """Count the time since ``computed`` as waiting; collectives called meanwhile are not counted twice."""
        if not self.computed_ns:
            return
        counts = active.counts
        counts.host_ns = max(counts.host_ns, self.counted_ns + perf_counter_ns() - self.computed_ns)
        self.events.waited(self.event)


_watching = False
"""Whether a model in this process is wrapped in DDP."""
_running: _Backward | None = None


def install(torch: Any) -> None:
    """Install the hooks; call it before another hook replaces ``torch.autograd.backward``."""
    parallel = torch.nn.parallel.DistributedDataParallel
    replace(torch.autograd, "backward", _timed_backward, below=True)
    replace(parallel, "__init__", _making, below=True)
    if hasattr(parallel, "_sync_buffers"):
        replace(parallel, "_sync_buffers", _timed_sync, below=True)


def _making(original: Any) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        global _watching
        original(self, *args, **kwargs)
        _watching = True

    return __init__


def _timed_backward(original: Any) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        global _running
        if not _watching:
            return original(tensors, *args, **kwargs)
        events = mine() if _running is None else None
        handle = None
        if events is not None:
            start = perf_counter_ns()
            _running = _Backward(events)
            handle = _hook(_running, tensors)
            events.cost(perf_counter_ns() - start)
        if handle is None:
            _running = None if events is not None else _running
            return original(tensors, *args, **kwargs)
        running = _running
        try:
            return original(tensors, *args, **kwargs)
        finally:
            _running = None
            handle.remove()
            if running is not None:
                running.over()

    return backward


def _timed_sync(original: Any) -> Callable[..., Any]:
    def _sync_buffers(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = mine()
        if events is None:
            return original(self, *args, **kwargs)
        counts = active.counts
        event, counted, start = events.wait_begins(), counts.host_ns, perf_counter_ns()
        try:
            return original(self, *args, **kwargs)
        finally:
            counts.host_ns = max(counts.host_ns, counted + perf_counter_ns() - start)
            events.waited(event)

    return _sync_buffers


def _hook(running: _Backward, tensors: Any) -> Any:
    """Register ``running.begun`` on the loss and return the handle; None if that is not possible."""
    compiled: Any = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "compiled_autograd_enabled", False):
        return None  # it would trace the hook
    try:
        loss = tensors[0] if isinstance(tensors, list | tuple) else tensors
        return loss.register_hook(running.begun) if loss.grad_fn is not None else None
    except Exception:  # not a tensor, or one without hooks: the backward itself raises the error
        return None


def _queue_callback(call: Callable[[], None]) -> None:
    import torch

    engine: Any = torch.autograd.Variable
    engine._execution_engine.queue_callback(call)
