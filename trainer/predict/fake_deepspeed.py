"""DeepSpeed in a dry run: the CUDA accelerator, a process group without peers, compiled operations that do nothing."""

import importlib
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_OUTPUTS = frozenset(
    ("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler", "comms_logger", "dump_state", "autotuning")
)
"""Sections of DeepSpeed's configuration that write files, start a service's run or end the process."""


def prepare(ranks: int, rank: int) -> None:
    """Set the environment of one of ``ranks`` ranks; call it before DeepSpeed is imported."""
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "DS_ACCELERATOR": "cuda",
            "TORCHDYNAMO_DISABLE": "1",
        }
    )
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # empty: a live run uses the GPUs, which must not be touched
        os.environ["CUDA_VISIBLE_DEVICES"] = "0"


def join(ranks: int, rank: int) -> None:
    """Join a process group of ``ranks`` ranks whose collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed

    # Before zero.Init reads the configuration: it would count one rank.
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)


def patch(update: Callable[[Any], None], fetched: Callable[[Any], None]) -> None:
    """Replace DeepSpeed's compiled functions and those that need real values, permanently in this process.

    Args:
        update: called with the arguments of a compiled function, such as an optimizer's update.
        fetched: called with a module whose parameters ZeRO-3 has gathered.
    """
    import deepspeed.accelerator.cuda_accelerator as cuda_accelerator
    import deepspeed.runtime.config as ds_config
    import deepspeed.runtime.engine as ds_engine
    import deepspeed.runtime.zero.parameter_offload as offload
    import deepspeed.runtime.zero.partition_parameters as partition
    import deepspeed.runtime.zero.partitioned_param_coordinator as coordinator
    from deepspeed.ops.op_builder import all_ops
    from deepspeed.ops.op_builder.builder import OpBuilder

    del all_ops
    config: Any = ds_config.DeepSpeedConfig
    read_settings = config._initialize_params

    def without_outputs(self: Any, param_dict: dict[str, Any]) -> None:
        # A dry run's values are no measurements, and its configuration may come from somebody else's recording.
        read_settings(self, {key: value for key, value in param_dict.items() if key not in _OUTPUTS})

    config._initialize_params = without_outputs
    # Free memory is that of the GPU that is pretended, not of one of this host, if NVML knows any.
    accelerator: Any = cuda_accelerator
    accelerator.pynvml = None
    # CPUAdam queries the CPU's vendor, which starts programs for more than a second.
    cpuinfo: Any = importlib.import_module("cpuinfo")
    cpuinfo.get_cpu_info = lambda: {"vendor_id_raw": "unknown"}
    builder: Any = OpBuilder

    def load(self: Any, *_: Any, **__: Any) -> Any:
        return _compiled(type(self).__name__, update)

    builder.load = builder.jit_load = load
    for subclass in _subclasses(builder):
        for name in ("load", "jit_load"):
            if name in vars(subclass):
                setattr(subclass, name, load)
    coordinating: Any = coordinator.PartitionedParameterCoordinator
    fetch = coordinating.fetch_sub_module

    def fetch_sub_module(self: Any, current_submodule: Any, forward: bool) -> None:
        fetch(self, current_submodule, forward)
        fetched(current_submodule)

    coordinating.fetch_sub_module = fetch_sub_module
    for module in (coordinator, partition, offload, ds_engine):
        for name in ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks"):
            if hasattr(module, name):
                setattr(module, name, lambda *_, **__: None)


def _subclasses(kind: Any) -> list[Any]:
    direct = kind.__subclasses__()
    return [*direct, *(deeper for found in direct for deeper in _subclasses(found))]


def _compiled(builder: str, update: Callable[[Any], None]) -> Any:
    """Return the compiled module of a builder: its functions update tensors in place, and allocate nothing.

    ``csrc/adam/multi_tensor_adam.cu`` and ``csrc/adam/cpu_adam_impl.cpp`` for the optimizers.
    """
    if builder == "UtilsBuilder":  # csrc/utils/flatten_unflatten.cpp calls these
        utils: Any = importlib.import_module("torch._utils")
        return SimpleNamespace(flatten=utils._flatten_dense_tensors, unflatten=utils._unflatten_dense_tensors)
    return _Compiled(update)


class _Compiled:
    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> int:
            self._update((arguments, tuple(named.values())))
            return 0

        return call
