"""CUDA devices for fake tensors on a machine without CUDA.

Fake tensors can have the device ``cuda:0`` in any build of PyTorch, but the autograd engine needs a device guard and an
accelerator from the C++ side, which a CPU build does not have (pytorch#92627). Both are interfaces with virtual
methods. Here they get method tables whose methods do nothing and return 1, which is interpreted as true, as the device
type CUDA, as ``cuda:0``, as one device, and as its default stream. Nothing is computed: tensors are fake.
"""

import ctypes
import mmap
import platform
from pathlib import Path
from typing import Any

import torch

from ...protocol.errors import FtmonError

_RETURN_ONE = {
    "x86_64": bytes.fromhex("b80100000031d2c3"),  # mov eax, 1; xor edx, edx; ret
    "aarch64": bytes.fromhex("200080d2010080d2c0035fd6"),  # mov x0, #1; mov x1, #0; ret
}
"""A function that returns 1 in the first result register and 0 in the second, by machine.

A ``c10::Stream`` is returned in both: the device ``cuda:0`` in the first, the number of the stream in the second.
"""
_CUDA = 1  # c10::DeviceType::CUDA
_METHODS = 64
"""Methods per table, more than either interface has."""
_HEAD = 2
"""Words of a method table before its first method (Itanium C++ ABI: offset to top, type information)."""
_HOOKS = range(2, 7)
"""``AcceleratorHooksInterface``: isBuilt, isAvailable, hasPrimaryContext, init, deviceCount, after two destructors."""

_kept: list[Any] = []


class BackendError(FtmonError):
    """This build of PyTorch cannot run a dry run."""


def install() -> None:
    """Give this process's PyTorch an accelerator of the type CUDA that computes nothing.

    Raises:
        BackendError: PyTorch's libraries or this machine are not supported.
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
