"""``torch.cuda`` for a dry run: one device with the properties of a kind of GPU, streams and counters."""

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import torch

from ...protocol.host.gpus import Gpu
from . import cuda_backend
from .memory import Recorder


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
        """Equal to the same stream."""
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Return True, as nothing runs."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or Event()


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Do nothing."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""

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
        cuda_backend.install()
        trace = self.recorder.trace

        def allocated(*_: Any) -> int:
            return trace.current.get("cuda", 0)

        def peak(*_: Any) -> int:
            return trace.peaks().allocated_bytes

        # A separate function for each name: Dynamo's tables refuse one object under two names.
        def nothing() -> Any:
            return lambda *_, **__: None

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
        replaced |= {
            name: (lambda *_: allocated()) for name in ("memory_allocated", "memory_reserved", "memory_cached")
        }
        replaced |= {
            name: (lambda *_: peak()) for name in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached")
        }
        replaced |= {
            name: nothing()
            for name in (
                *("_lazy_init", "init", "synchronize", "set_device", "reset_peak_memory_stats"),
                *("reset_max_memory_allocated", "reset_max_memory_cached", "manual_seed", "manual_seed_all", "seed"),
                *("set_rng_state", "set_rng_state_all", "ipc_collect", "_lazy_call"),
            )
        }
        replaced |= {
            "memory_stats": lambda *_: {"allocated_bytes.all.peak": peak(), "allocated_bytes.all.current": allocated()},
            "empty_cache": lambda: trace.empty_cache(),
            "get_rng_state": lambda *_: state.clone(),
            "get_rng_state_all": lambda *_: [state.clone()],
            "Stream": Stream,
            "Event": Event,
            "stream": self.stream,
            "current_stream": self.current_stream,
            "default_stream": lambda *_: self._streams[0],
            "StreamContext": self.stream,
            "nvtx": SimpleNamespace(
                range_push=nothing(), range_pop=nothing(), mark=nothing(), range=contextlib.nullcontext
            ),
        }
        cuda: Any = torch.cuda
        for name, value in replaced.items():
            setattr(cuda, name, value)
        cuda.nccl.version = lambda: (2, 27, 3)
        tensor: Any = torch.Tensor
        tensor.record_stream = self._record_stream
        tensor.pin_memory = self._pin
        tensor.is_pinned = lambda this, *_: bool(getattr(this, "dry_pinned", False))

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

    @property
    def _record_stream(self) -> Any:
        recorder = self.recorder

        def record_stream(tensor: Any, stream: Any) -> None:
            handle = recorder.handle_of(tensor)
            if handle is not None:
                recorder.trace.use(handle, stream.stream_id)

        return record_stream

    @property
    def _pin(self) -> Any:
        recorder = self.recorder

        def pin_memory(tensor: Any, *_: Any) -> Any:
            if getattr(tensor, "dry_pinned", False):
                return tensor
            copy: Any = torch.empty_like(tensor, requires_grad=False)
            recorder.rename(copy, "pinned")
            copy.dry_pinned = True
            return copy

        return pin_memory
