"""Hooks into PyTorch's parallel training (DDP, FSDP, pipelines), and counts of collective calls.

DeepSpeed, FSDP and scripts all call the functions of ``torch.distributed``; a wrapper costs one to two microseconds. A
call that one of them makes to another is not counted again. Each call is recorded with its process group, its number
within the group and the size of its tensor: the same number is the same collective on every rank of a group, so two
ranks that are stuck can be compared. DDP's own reducer calls NCCL and gloo from C++ and is not seen here (PyTorch's
flight recorder has its calls: ``link.stacks.calls``).
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch

from .. import active
from ..active import switched_on
from ..events import TorchEvents
from ..guard import is_replaced, logged, replace, replace_in_package
from .imports import after_import
from .torch import Wrapper, after, before, clipping, forwarding


def install(_module: ModuleType) -> None:
    """Install the hooks, each when its module is imported."""
    replace(torch.nn.parallel.DistributedDataParallel, "forward", _parallel_forward("ddp"))
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", _on_fsdp)
    after_import("torch.distributed.fsdp", _on_fsdp2)
    after_import("torch.distributed._composable.fsdp", _on_fsdp2)
    after_import("torch.distributed.pipelining.stage", _on_pipeline)
    after_import("torch.distributed.pipelining.schedules", _on_schedules)
    after_import("torch.distributed.distributed_c10d", _on_process_groups)


def _parallel_forward(framework: str) -> Wrapper:
    """Return a wrapper of a parallel module's forward. FSDP wraps modules inside modules: the outermost counts."""
    return forwarding(framework)


def _on_fsdp(module: ModuleType) -> None:
    fsdp: Any = module
    replace(fsdp.FullyShardedDataParallel, "forward", _parallel_forward("fsdp"))
    replace(fsdp.FullyShardedDataParallel, "clip_grad_norm_", clipping)


def _on_fsdp2(module: ModuleType) -> None:
    """Hook ``fully_shard``. The package and the module that defines it have moved between versions of PyTorch."""

    def report(events: TorchEvents, found: Any, /, *_: Any, **__: Any) -> None:
        sharded = found[-1] if isinstance(found, list | tuple) and found else found
        if hasattr(sharded, "parameters"):
            events.sharded(sharded)

    packages = ("torch.distributed.fsdp", "torch.distributed._composable")
    replace_in_package(module, "fully_shard", after(report, switched_on), packages)
    sharded = getattr(module, "FSDPModule", None)
    if hasattr(sharded, "set_gradient_divide_factor"):
        replace(sharded, "set_gradient_divide_factor", after(_setting_divisor, switched_on))


@logged("the divisor of FSDP's gradients is not known")
def _setting_divisor(events: TorchEvents, _: None, module: Any, factor: float) -> None:
    """Note that the ranks' losses add up, if their gradients do: FSDP divides these by ``factor``, not its ranks."""
    state = module._get_fsdp_state()
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        mesh = getattr(group, "mesh_info", None)  # experts are sharded over fewer ranks than the rest
        ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
        if ranks > factor > 0:
            events.adds_up(ranks / factor)


def _on_process_groups(module: ModuleType) -> None:
    """Note the backend before it is destroyed: the rank's hello may be sent later."""
    noted = before(lambda events, /, *_, **__: events.leaving_group(), switched_on)
    replace_in_package(module, "destroy_process_group", noted, ("torch.distributed",))


def _on_pipeline(module: ModuleType) -> None:
    """Hook the stages of PyTorch's pipelines; of several on a rank the lowest is reported."""
    noted = after(lambda events, _, stage, /, *__, **___: events.stage(stage.stage_index, stage.submod), switched_on)
    stages: Any = module
    replace(stages._PipelineStageBase, "__init__", noted)


def _on_schedules(module: ModuleType) -> None:
    """Hook the schedules of PyTorch's pipelines: by default they divide gradients by the number of micro-batches."""

    def report(events: TorchEvents, schedule: Any, /, *_: Any, **__: Any) -> None:
        events.divided(getattr(schedule, "_n_microbatches", 0) if getattr(schedule, "scale_grads", True) else 1)

    schedules: Any = module
    for each in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        replace(each, "step", before(report))


COLLECTIVES = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("_all_gather_base", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce"),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base", "scatter"),
    "scatter_object_list",
)
"""Every rank of a group enters these, so their count is comparable between ranks."""

POINT_TO_POINT = ("send", "recv", "batch_isend_irecv", "init_process_group")
"""Calls that may block on another rank too: named while they run, not counted."""

_SIZED = ("tensor", "input_tensor", "input", "output")
"""Names of the argument whose size is the collective's; the first that is present counts."""

_inside: set[int] = set()


def install_collectives(_module: ModuleType | None = None) -> None:
    """Wrap the functions, once, in both modules that have them."""
    distributed: Any = sys.modules.get("torch.distributed")
    core: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or core is None or not distributed.is_available():
        return
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        real = getattr(core, name, None)
        if real is None or is_replaced(real):
            continue
        replace(core, name, partial(_counted, name.lstrip("_")) if name in COLLECTIVES else partial(_named, name))
        if getattr(distributed, name, None) is real:
            setattr(distributed, name, getattr(core, name))
    with logged("collective waits are not named"):
        # On gloo the host waits for an asynchronous collective, on NCCL only the stream.
        replace(core.Work, "wait", partial(_outermost, enter=lambda *_: active.counts.last or "wait"))


def _outermost(real: Callable[..., Any], enter: Callable[[tuple[Any, ...], dict[str, Any]], str]) -> Callable[..., Any]:
    """Wrap ``real``: time and name it while it runs, unless this thread is already inside another wrapped call."""
    counts = active.counts

    def call(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if thread in _inside:
            return real(*args, **kwargs)
        _inside.add(thread)
        try:
            counts.in_flight = name = enter(args, kwargs)
            start = perf_counter_ns()
            try:
                return real(*args, **kwargs)
            finally:
                counts.host_ns += perf_counter_ns() - start
                if counts.in_flight is name:  # not another thread's
                    counts.in_flight = ""
                counts.last = name
        finally:
            _inside.discard(thread)

    return call


def _counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    counts = active.counts
    groups, recent = counts.groups, counts.recent
    parameters = list(inspect.signature(real).parameters)
    group_place = parameters.index("group")
    sized = next((one for one in _SIZED if one in parameters), "")
    size_place = parameters.index(sized) if sized else -1

    def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
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
        except Exception:  # not of the group, or not a tensor: the call itself raises the error
            counts.group, counts.size = "", 0
        return name

    return _outermost(real, enter)


def _named(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def enter(_args: tuple[Any, ...], _kwargs: dict[str, Any]) -> str:
        if name == "init_process_group":
            active.counts.forget_groups()
        return name

    return _outermost(real, enter)


def _find_world() -> str:
    core: Any = sys.modules["torch.distributed.distributed_c10d"]
    active.counts.world = str(core.GroupMember.WORLD.group_name)
    return active.counts.world
