"""What a dry run replaces in its process: the CUDA device, DeepSpeed's compiled functions, kernels on fake tensors."""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import threading
from collections.abc import Callable, Generator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils import _python_dispatch
from transformers import masking_utils, modeling_utils

from ...protocol.errors import FtmonError
from ...protocol.host.machine import Gpu
from .record import Hidden, Recorder

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

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    import deepspeed

    # Before zero.Init reads the configuration: it would count one rank.
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)


def patch(update: Callable[[Any], None], fetched: Callable[[Any], None]) -> None:
    """Replace DeepSpeed's compiled functions and those that need real values, permanently in this process.

    ``update`` is called with the arguments of a compiled function, such as an optimizer's update; ``fetched`` with a
    module whose parameters ZeRO-3 has gathered.
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
    cpuinfo: Any = import_module("cpuinfo")
    cpuinfo.get_cpu_info = lambda: {"vendor_id_raw": "unknown"}
    builder: Any = OpBuilder

    def load(self: Any, *_: Any, **__: Any) -> Any:
        if type(self).__name__ == "UtilsBuilder":  # csrc/utils/flatten_unflatten.cpp calls these
            utils: Any = import_module("torch._utils")
            return SimpleNamespace(flatten=utils._flatten_dense_tensors, unflatten=utils._unflatten_dense_tensors)
        return _Compiled(update)

    builder.load = builder.jit_load = load
    for subclass in _subclasses(builder):
        for name in ("load", "jit_load"):
            if name in vars(subclass):
                setattr(subclass, name, load)
    engine: Any = ds_engine.DeepSpeedEngine
    register: Any = getattr(engine, "register_compile_pass", None)

    def register_compile_pass(self: Any, *described: Any) -> None:
        if self.is_deepcompile_enabled():  # it imports Inductor
            register(self, *described)

    engine.register_compile_pass = register_compile_pass
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


class _Compiled:
    """A compiled module, whose functions update tensors in place, and allocate nothing.

    ``csrc/adam/multi_tensor_adam.cu`` and ``csrc/adam/cpu_adam_impl.cpp`` for the optimizers.
    """

    def __init__(self, update: Callable[[Any], None]) -> None:
        self._update = update

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> int:
            self._update((arguments, tuple(named.values())))
            return 0

        return call


find_packed_sequence_indices: Any = masking_utils.find_packed_sequence_indices
"""transformers' own function for packed batches; ``patch`` replaces it."""


@cache
def patch_tensors() -> None:
    """Make ``tensor.data = other`` and ``Module.to`` move fake tensors between devices, permanently in this process."""
    base: Any = torch._C.TensorBase.data

    def assign(this: Any, value: Any) -> None:
        base.__set__(this, value)
        if isinstance(value, FakeTensor):
            this.fake_device = value.fake_device

    fake: Any = FakeTensor
    fake.data = property(base.__get__, assign)
    # torch.tensor(..., device="cuda") must not make a real tensor first.
    mode: Any = FakeTensorMode
    mode.avoid_device_init = property(lambda _: True)
    # Builds with CUDA would make a real tensor on the device for the first fake one (PyTorch before 2.13).
    patched: Any = fake_tensor
    patched.init_gpu_context = lambda _: None
    # PyTorch 2.11 takes the type of such a product for a factor.
    product: Any = getattr(torch.ops.aten.addmm, "dtype_out", None)
    if product is not None:
        import_module("torch._decomp").decomposition_table.pop(product, None)
        import_module("torch._subclasses.fake_impls").register_op_impl(product)(lambda *_, out, **__: out)
    module: Any = torch.nn.Module
    module._apply = _apply
    # The device guard returns True for every query, also for whether a CUDA graph is being captured.
    optimizer: Any = torch.optim.Optimizer
    optimizer._cuda_graph_capture_health_check = lambda *_: None
    optimizer._accelerator_graph_capture_health_check = lambda *_: None
    # PyTorch's optimizers use their foreach kernels, with temporaries of all parameters at once, for these types only.
    optimizers: Any = import_module("torch.optim.optimizer")  # torch.optim has no attribute of that name
    optimizers._foreach_supported_types.append(FakeTensor)
    # Without real values transformers would treat every batch as packed or traced, and make masks.
    masks: Any = masking_utils
    masks.is_tracing = lambda *_: False
    masks.find_packed_sequence_indices = lambda *_, **__: None


def _apply(module: Any, function: Any, recurse: bool = True) -> Any:
    """Run ``Module._apply`` as for real tensors: fake ones would be swapped, which weak references forbid."""
    if recurse:
        for child in module.children():
            child._apply(function)
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            parameter.data = function(parameter)
            if parameter.grad is not None:
                parameter.grad.data = function(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def refusal(error: BaseException) -> str:
    """Return why fake tensors refuse an operation, in one line; empty for other errors."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return f"{error.func} depends on values, which a dry run does not have"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} has no fake kernel, so a dry run cannot follow it"
    return ""


@contextlib.contextmanager
def left() -> Generator[None]:
    """Disable fake tensors and their recording in the body."""
    dispatch: Any = _python_dispatch
    with dispatch._disable_current_modes():
        yield


_RETURN_ONE = {
    "x86_64": bytes.fromhex("b80100000031d2c3"),  # mov eax, 1; xor edx, edx; ret
    "aarch64": bytes.fromhex("200080d2010080d2c0035fd6"),  # mov x0, #1; mov x1, #0; ret
}
"""A function that returns 1 in the first result register and 0 in the second, by machine.

A ``c10::Stream`` is returned in both: the device ``cuda:0`` in the first, the number of the stream in the second.
"""
_CUDA = 1  # c10::DeviceType::CUDA
_METHODS = 64  # Methods per table, more than either interface has
_HEAD = 2  # Words of a method table before its first method (Itanium C++ ABI: offset to top, type information)
_HOOKS = range(2, 7)
"""``AcceleratorHooksInterface``: isBuilt, isAvailable, hasPrimaryContext, init, deviceCount, after two destructors."""

_kept: list[Any] = []


class BackendError(FtmonError):
    """This build of PyTorch cannot run a dry run."""


def install() -> None:
    """Give this process's PyTorch an accelerator of the type CUDA that computes nothing.

    Fake tensors can have the device ``cuda:0`` in any build of PyTorch, but the autograd engine needs a device guard
    and an accelerator from the C++ side, which a CPU build does not have (pytorch#92627). Both are interfaces with
    virtual methods. Here they get method tables whose methods do nothing and return 1, which is interpreted as true, as
    the device type CUDA, as ``cuda:0``, as one device, and as its default stream. Raises ``BackendError``: PyTorch's
    libraries or this machine are not supported.
    """
    if _kept:
        return
    machine = platform.machine()
    if machine not in _RETURN_ONE:
        raise BackendError(f"a dry run works on x86_64 and aarch64, not on {machine}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_RETURN_ONE[machine])
    function = ctypes.addressof(ctypes.c_char.from_buffer(page))
    folder = Path(torch.__file__).parent / "lib"
    try:
        core, cpu = (ctypes.CDLL(str(folder / name)) for name in ("libc10.so", "libtorch_cpu.so"))
        guards = (ctypes.c_void_p * (_CUDA + 1)).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
        get_hooks: Any = cpu._ZN2at6detail12getCUDAHooksEv
    except (OSError, ValueError, AttributeError) as error:
        raise BackendError(f"PyTorch {torch.__version__} cannot do a dry run: {error}") from None
    get_hooks.restype = ctypes.c_void_p
    guard_table = (ctypes.c_void_p * (_HEAD + _METHODS))(None, None, *[function] * _METHODS)
    guard = (ctypes.c_void_p * 1)(ctypes.addressof(guard_table) + _HEAD * ctypes.sizeof(ctypes.c_void_p))
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    before = hooks[0]
    assert before is not None
    old = ctypes.cast(before - _HEAD * ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p))
    hooks_table = (ctypes.c_void_p * (_HEAD + _METHODS))(*[old[i] for i in range(_HEAD + _METHODS)])
    for method in _HOOKS:
        hooks_table[_HEAD + method] = function
    _kept.extend([page, guard_table, guard, hooks_table])
    guards[_CUDA] = ctypes.addressof(guard)
    hooks[0] = ctypes.addressof(hooks_table) + _HEAD * ctypes.sizeof(ctypes.c_void_p)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        raise BackendError(f"PyTorch {torch.__version__} does not take a CUDA accelerator for a dry run")


_WITHOUT_EFFECT = (
    *("_lazy_init", "init", "synchronize", "set_device", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "reset_max_memory_cached", "manual_seed", "manual_seed_all", "seed"),
    *("set_rng_state", "set_rng_state_all", "ipc_collect", "_lazy_call"),
)


class Stream:
    """A CUDA stream: a number by which the caching allocator separates blocks."""

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._count += 1
        self.stream_id = self.cuda_stream = Stream._count
        self.priority = priority
        self.device = torch.device("cuda", 0)
        self.device_index, self.device_type = 0, 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def synchronize(self, *_: Any) -> None:
        """Do nothing."""

    wait_stream = wait_event = synchronize

    def query(self) -> bool:
        """Return True, as nothing runs."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or Event()


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def synchronize(self, *_: Any) -> None:
        """Do nothing."""

    record = wait = synchronize

    def query(self) -> bool:
        """Return True."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return one millisecond."""
        return 1.0


class Device:
    """The device of a dry run."""

    def __init__(self, recorder: Recorder, gpu: Gpu) -> None:
        self.recorder = recorder
        self.properties = SimpleNamespace(
            name=f"NVIDIA {gpu.name}",
            total_memory=gpu.memory_bytes,
            major=gpu.capability[0],
            minor=gpu.capability[1],
            multi_processor_count=132,
            is_integrated=False,
            gcnArchName="",
        )
        self.capability = gpu.capability
        self._streams = {0: Stream()}
        self._streams[0].stream_id = self._streams[0].cuda_stream = 0

    def install(self) -> None:
        """Replace functions of ``torch.cuda`` and ``torch.Tensor`` that call the driver, for the whole process."""
        install()
        trace = self.recorder.trace

        state = torch.zeros(16, dtype=torch.uint8)
        constants: dict[str, Any] = {
            "is_available": True,
            "is_initialized": True,
            "device_count": 8,
            "current_device": 0,
            "get_device_capability": self.capability,
            "get_device_name": self.properties.name,
            "get_device_properties": self.properties,
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "initial_seed": 0,
            "mem_get_info": (self.properties.total_memory, self.properties.total_memory),
        }
        replaced: dict[str, Any] = {name: (lambda *_, _value=value, **__: _value) for name, value in constants.items()}
        # A separate function for each name: Dynamo's tables refuse one object under two names.
        for name in ("allocated", "reserved", "cached"):
            replaced[f"memory_{name}"] = lambda *_: trace.current.get("cuda", 0)
            replaced[f"max_memory_{name}"] = lambda *_: trace.peaks().allocated_bytes
        replaced |= {name: lambda *_, **__: None for name in _WITHOUT_EFFECT}
        ranges = {name: lambda *_, **__: None for name in ("range_push", "range_pop", "mark")}
        replaced |= {
            "memory_stats": lambda *_: {
                "allocated_bytes.all.peak": trace.peaks().allocated_bytes,
                "allocated_bytes.all.current": trace.current.get("cuda", 0),
            },
            "empty_cache": lambda: trace.empty_cache(),
            "get_rng_state": lambda *_: state.clone(),
            "get_rng_state_all": lambda *_: [state.clone()],
            "Stream": Stream,
            "Event": Event,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda *_: self._streams[0],
            "StreamContext": self._context_class(),
            "nvtx": SimpleNamespace(**ranges, range=contextlib.nullcontext),
        }
        cuda: Any = torch.cuda
        for name, value in replaced.items():
            setattr(cuda, name, value)
        cuda.nccl.version = lambda: (2, 27, 3)
        tensor: Any = torch.Tensor
        recorder = self.recorder

        def record_stream(this: Any, stream: Any) -> None:
            handle = recorder.handle_of(this)
            if handle is not None:
                trace.use(handle, stream.stream_id)

        def pin_memory(this: Any, *_: Any) -> Any:
            if getattr(this, "dry_pinned", False):
                return this
            copy: Any = torch.empty_like(this, requires_grad=False)
            recorder.rename(copy, "pinned")
            copy.dry_pinned = True
            return copy

        tensor.record_stream = record_stream
        tensor.pin_memory = pin_memory
        tensor.is_pinned = lambda this, *_: bool(getattr(this, "dry_pinned", False))

    def _context_class(self) -> type:
        """Return the class of the contexts that ``stream`` returns: Dynamo asks for it."""
        enter = self.stream

        class StreamContext(contextlib.ExitStack):
            def __init__(self, stream: Any) -> None:
                super().__init__()
                self.enter_context(enter(stream))

        return StreamContext

    def current_stream(self, *_: Any) -> Stream:
        """Return the stream of new allocations."""
        return self._streams[self.recorder.stream]

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Generator[None]:
        """Make a stream the current one in the body."""
        if stream is None:
            yield
            return
        self._streams[stream.stream_id] = stream
        with self.recorder.on_stream(stream.stream_id):
            yield


_aten: Any = torch.ops.aten
_FLASH_MOST_WIDTH = 256


def install_attention(capability: tuple[int, int]) -> None:
    """Replace ``scaled_dot_product_attention`` permanently in this process: a CPU build would use the math path."""
    functional: Any = torch.nn.functional
    plain = functional.scaled_dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        on_gpu = query.device.type == "cuda" and query.dim() == 4
        width = query.shape[-1]
        half = query.dtype in (torch.float16, torch.bfloat16)
        flash = half and attn_mask is None and width == value.shape[-1] and width <= _FLASH_MOST_WIDTH
        if on_gpu and flash and capability >= (8, 0):
            return _flash(query, key, value, dropout_p, is_causal, scale)
        if on_gpu and not enable_gqa:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        return plain(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    functional.scaled_dot_product_attention = attention
    builtins: Any = torch._C
    builtins._nn.scaled_dot_product_attention = attention


def _flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Run FlashAttention, with widths padded to a multiple of 8 (``sdp_utils``, ``pad_last_dim``)."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        query, key, value = (torch.nn.functional.pad(part, (0, missing)) for part in (query, key, value))
    result = _aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    return result[..., :width] if missing else result


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None) -> Any:
    """Run memory-efficient attention; a mask becomes a bias, expanded and aligned to 16 elements."""
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        missing = -mask.shape[-1] % 16
        if missing:
            mask = torch.nn.functional.pad(mask, (0, missing))[..., : mask.shape[-1]]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needed = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    return _aten._scaled_dot_product_efficient_attention(query, key, value, mask, needed, dropout, causal, scale=scale)[
        0
    ]


_ATTRIBUTES = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
"""Attributes of bitsandbytes' parameter that peft and its modules read."""


def hold_in_4_bits(model: Any, settings: Any) -> None:
    """Replace the linear layers of a model on the meta device as ``from_pretrained`` does, and move it to the GPU.

    bitsandbytes' parameter is a tensor subclass, which cannot be fake: a plain parameter with the same attributes
    replaces it. Its operations have fake kernels.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    bitsandbytes: Any = import_module("bitsandbytes")
    kinds = {name: module.weight.dtype for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    biases = {name: model.get_submodule(name).bias for name in kinds}
    quantizer: Any = AutoHfQuantizer.from_config(settings)
    with left():
        quantizer.preprocess_model(model=model, device_map=None)
    _warm_up(model, quantizer)
    for name, dtype in kinds.items():
        module: Any = model.get_submodule(name)
        if not isinstance(module, bitsandbytes.nn.Linear4bit):
            continue
        before = module.weight
        # As in loading: each is moved to the GPU whole, and converted to 4 bits there.
        whole = torch.empty(module.out_features, module.in_features, dtype=dtype, device="cuda")
        packed, state = bitsandbytes.functional.quantize_4bit(
            whole,
            blocksize=before.blocksize,
            compress_statistics=before.compress_statistics,
            quant_type=before.quant_type,
        )
        weight: Any = torch.nn.Parameter(packed, requires_grad=False)
        for attribute in _ATTRIBUTES:
            setattr(weight, attribute, getattr(before, attribute))
        weight.quant_state = module.quant_state = state
        module.weight, module.bias = weight, biases[name]
    quantizer.postprocess_model(model)
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if tensor.device.type != "meta":
                continue
            placed = torch.empty_like(tensor, device="cuda")
            setattr(module, name, torch.nn.Parameter(placed) if isinstance(tensor, torch.nn.Parameter) else placed)
    model.tie_weights()


def _warm_up(model: Any, quantizer: Any) -> None:
    """Allocate and free one block of the size of all weights, as ``from_pretrained`` does before it loads them.

    transformers' ``modeling_utils.py``, ``caching_allocator_warmup``.
    """
    places = {name: torch.device("cuda", 0) for name, _ in model.named_parameters()}
    for size in modeling_utils.get_total_byte_count(model, places, quantizer).values():
        torch.empty(int(size // 2), dtype=torch.float16, device="cuda")


_FEW_ROWS = 128
_CHUNK = 1 << 16  # Elements per block of a kernel over many tensors: ``MultiTensorApply.cuh``


def _workspaces(capability: tuple[int, int]) -> Hidden:
    """CuBLAS workspaces, at the first matrix product: one per thread's handle and stream, never freed.

    ``aten/src/ATen/cuda/CublasHandlePool.cpp``, ``getChosenWorkspaceSize``: 32 MiB on Hopper and Blackwell, 8,320 KiB
    on other GPUs. The autograd engine's device thread has a handle of its own.
    """
    size = 32 << 20 if capability[0] in (9, 10) else 8320 << 10
    made: set[tuple[int, int]] = set()

    def allocate(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        first = result[0] if isinstance(result, tuple) else result
        key = (threading.get_ident(), recorder.stream)
        if first.device.type == "cuda" and key not in made:
            made.add(key)
            recorder.trace.allocate(size, "cuda", recorder.stream)

    return allocate


def _flash_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """FlashAttention 2's backward: fp32 sums of dQ, and dK and dV per query head if several share a key head.

    ``csrc/flash_attn/flash_api.cpp``, ``mha_bwd``.
    """
    query, key = args[1], args[2]
    if query.device.type != "cuda":
        return
    batch, heads, length, width = query.shape
    key_heads, key_length = key.shape[1], key.shape[2]
    rounded = math.ceil(length / 128) * 128
    sizes = [batch * heads * rounded * 4, batch * heads * rounded * _rounded(width) * 4]
    if key_heads != heads:
        sizes += [batch * heads * key_length * width * key.element_size()] * 2
    recorder.trace.moment(*sizes, stream=recorder.stream)


def _varlen_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """The same for packed rows, with 128 more rows per document: ``flash_api.cpp``, ``mha_varlen_bwd``."""
    query, key, documents = args[1], args[2], args[6].shape[0] - 1
    if query.device.type != "cuda":
        return
    length, heads, width = query.shape
    rows = length + 128 * documents
    sizes = [heads * rows * 4, heads * rows * _rounded(width) * 4]
    if key.shape[1] != heads:
        sizes += [key.shape[0] * heads * width * key.element_size()] * 2
    recorder.trace.moment(*sizes, stream=recorder.stream)


def _cudnn_backward(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """CuDNN's backward of packed rows, in one workspace: dQ in fp32, and dK and dV if several heads share a key head.

    As cuDNN 9.19 asks for on an H200, in eleven shapes, to the part that grows with the documents (456 bytes each).
    """
    query, key = args[1], args[2]
    if query.device.type == "cuda":
        tokens, heads, width = query.shape
        sums = 1 if key.shape[1] == heads else 3
        recorder.trace.moment(tokens * heads * (sums * width + 1) * 4, stream=recorder.stream)


def _dequantized(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """A product with a weight in 4 bits: with more than a few rows, the whole weight in the inputs' type.

    bitsandbytes 0.50, ``backends/cuda/ops.py``, ``gemm_4bit``; the kernel for up to 1,536 rows depends on the GPU.
    """
    inputs, shape, blocksize = args[0], args[2], args[4]
    if inputs.device.type != "cuda" or inputs.numel() // inputs.shape[-1] <= _FEW_ROWS:
        return
    elements = math.prod(shape)
    recorder.trace.moment(elements // blocksize * 4, elements * inputs.element_size(), stream=recorder.stream)


def _norms(recorder: Recorder, func: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Norms of many tensors: one per chunk, with as many chunks for each tensor as the largest has.

    ``ForeachReduceOp.cu``, ``foreach_tensor_norm_cuda``.
    """
    tensors = args[0]
    if tensors[0].device.type == "cuda":
        chunks = math.ceil(max(one.numel() for one in tensors) / _CHUNK)
        recorder.trace.moment(len(tensors) * chunks * result[0].element_size(), stream=recorder.stream)


def _rounded(width: int) -> int:
    """Return the padded width of a head in FlashAttention."""
    return math.ceil(width / 32) * 32 if width <= 128 else math.ceil(width / 64) * 64


def hidden(capability: tuple[int, int]) -> dict[Any, Hidden]:
    """Return the functions that record what CUDA kernels allocate besides their outputs, by operation.

    For a GPU of this compute capability; every entry follows the named source of PyTorch 2.11 to 2.13.
    """
    workspaces = _workspaces(capability)
    products = (
        *(_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default),
        *(_aten.mm.out, _aten.bmm.out, _aten.addmm.out, _aten.addmv.default, _aten.mv.default),
    )
    found: dict[Any, Hidden] = dict.fromkeys(products, workspaces)
    if find_spec("bitsandbytes") is not None:
        import_module("bitsandbytes")  # registers the operation
        if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
            found[torch.ops.bitsandbytes.gemm_4bit.default] = _dequantized
    found[_aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward
    found[_aten._foreach_norm.Scalar] = _norms
    import_module("torch.nn.attention.varlen")  # registers the operation
    found[torch.ops.torch_attn._varlen_attn_backward.default] = _varlen_backward
    import_module("..recipe.model.attention", __package__)  # registers the operation
    found[torch.ops.ftmon.attend_backward.default] = _cudnn_backward
    return found
