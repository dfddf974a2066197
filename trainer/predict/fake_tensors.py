"""Patches of fake tensors for a dry run of real training code."""

import contextlib
from collections.abc import Generator
from importlib import import_module
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _python_dispatch
from transformers import masking_utils

find_packed_sequence_indices: Any = masking_utils.find_packed_sequence_indices
"""transformers' own function for packed batches; ``patch`` replaces it."""


def patch() -> None:
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
            with torch.no_grad():
                parameter.grad.data = function(parameter.grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextlib.contextmanager
def left() -> Generator[None]:
    """Disable fake tensors and their recording in the body."""
    dispatch: Any = _python_dispatch
    with dispatch._disable_current_modes():
        yield
