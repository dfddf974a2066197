"""Counting collective calls: wrappers around the functions of ``torch.distributed``, one to two microseconds each.

DeepSpeed, FSDP and scripts all come through these names. Calls that one of them makes to another count once. Each is
noted with its process group, its number within the group and the size of its tensor: the same number is the same
collective on every rank of a group, so two ranks that are stuck can be compared. DDP's own reducer calls NCCL and gloo
from C++ and is not seen here (PyTorch's flight recorder sees it: ``flight``).
"""

import functools
import inspect
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from . import active, guard

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "_all_gather_base",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "scatter",
    "scatter_object_list",
)
"""Every rank of a group enters these, so their count is comparable between ranks."""

POINT_TO_POINT = ("send", "recv", "batch_isend_irecv", "init_process_group")
"""These may block on another rank too: named while they run, not counted."""

_SIZED = ("tensor", "input_tensor", "input", "output")
"""The argument whose size is the collective's, by its name, the first that there is."""

_owner = 0
"""The thread that is inside of a wrapped call; one at a time, as far as counting goes."""


def install() -> None:
    """Wrap the functions, once, wherever they are named."""
    distributed: Any = sys.modules.get("torch.distributed")
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or core is None or not distributed.is_available():
        return
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        real = getattr(core, name, None)
        if real is None or hasattr(real, "_ftmon"):
            continue
        wrapped = _wrap(name.lstrip("_"), real) if name in COLLECTIVES else _wrap_named(name, real)
        for module in (core, distributed):
            if getattr(module, name, None) is real:
                setattr(module, name, wrapped)
    _wrap_wait(core)


def _wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Count ``real``, a collective. What happens before it is called is all the cost there is: no call in between."""
    counts = active.counts
    groups, recent = counts.groups, counts.recent
    parameters = list(inspect.signature(real).parameters)
    group_place = parameters.index("group")
    sized = next((one for one in _SIZED if one in parameters), "")
    size_place = parameters.index(sized) if sized else -1

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _owner
        thread = get_ident()
        if _owner == thread:
            return real(*args, **kwargs)
        before, _owner = _owner, thread
        counts.entered += 1
        try:
            given = len(args)
            group = args[group_place] if given > group_place else kwargs.get("group")
            key = (counts.world or _find_world()) if group is None else group.group_name
            size = (args[size_place] if given > size_place else kwargs[sized]).numel() if sized else 0
            number = groups.get(key, 0) + 1
            groups[key] = counts.sequence = number
            counts.group, counts.size = key, size
            recent.append((key, number, name, size))
        except Exception:  # not of the group, or not a tensor: the call itself will say so
            counts.group, counts.size = "", 0
        counts.in_flight = name
        start = perf_counter_ns()
        try:
            return real(*args, **kwargs)
        finally:
            counts.host_ns += perf_counter_ns() - start
            counts.in_flight = ""
            counts.last = name
            _owner = before

    call._ftmon = True  # type: ignore[attr-defined]
    return call


def _wrap_named(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Name ``real`` while it runs, without counting it."""
    counts = active.counts

    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _owner
        thread = get_ident()
        if _owner == thread:
            return real(*args, **kwargs)
        before, _owner = _owner, thread
        if name == "init_process_group":
            counts.forget_groups()
        counts.in_flight = name
        start = perf_counter_ns()
        try:
            return real(*args, **kwargs)
        finally:
            counts.host_ns += perf_counter_ns() - start
            counts.in_flight = ""
            counts.last = name
            _owner = before

    call._ftmon = True  # type: ignore[attr-defined]
    return call


def _find_world() -> str:
    core: Any = sys.modules["torch.distributed.distributed_c10d"]
    active.counts.world = str(core.GroupMember.WORLD.group_name)
    return active.counts.world


def _wrap_wait(core: Any) -> None:
    """Name a rank that waits for an asynchronous collective (on gloo the host waits; on NCCL only the stream does)."""
    work: Any = getattr(core, "Work", None)
    real = getattr(work, "wait", None)
    if real is None or hasattr(real, "_ftmon"):
        return
    counts = active.counts

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _owner
        thread = get_ident()
        if _owner == thread:
            return real(self, *args, **kwargs)
        before, _owner = _owner, thread
        counts.in_flight = counts.last or "wait"
        start = perf_counter_ns()
        try:
            return real(self, *args, **kwargs)
        finally:
            counts.host_ns += perf_counter_ns() - start
            counts.in_flight = ""
            _owner = before

    wait.__doc__ = real.__doc__
    wait._ftmon = True  # type: ignore[attr-defined]
    try:
        work.wait = wait
    except (AttributeError, TypeError) as error:
        guard.log_error("collective waits are not named", error)
