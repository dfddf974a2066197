"""This machine's devices and tools for training, detected without importing torch."""

import os
import random
import shutil
import socket
from importlib import metadata, util
from pathlib import Path

from ...protocol.checks import TRAINING_PACKAGES
from ...protocol.host.machine import ROOT, cpu_quota


def visible_gpus() -> list[str]:
    """Return the NVIDIA GPUs that a CUDA process of this environment sees, as named in ``CUDA_VISIBLE_DEVICES``.

    Empty without a driver. The GPUs are listed by NVML; ``CUDA_VISIBLE_DEVICES`` is applied as CUDA does: the list ends
    at the first entry that names no device.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    return select_visible(uuids, os.environ.get("CUDA_VISIBLE_DEVICES"))


def usable_gpus() -> list[str]:
    """Return the visible GPUs; none if the installed PyTorch was built for the CPU only."""
    return [] if torch_is_cpu_only() else visible_gpus()


def torch_is_cpu_only() -> bool:
    """Return whether the installed PyTorch was built without CUDA, by its version (``2.9.0+cpu``)."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def missing_packages() -> list[str]:
    """Return the names of packages that training needs and that are not installed; nothing is imported."""
    return [name for name in TRAINING_PACKAGES if util.find_spec(name) is None]


def select_visible(uuids: list[str], setting: str | None) -> list[str]:
    """Apply a ``CUDA_VISIBLE_DEVICES`` setting (None: not set) to the devices of these UUIDs."""
    if setting is None:
        return [str(index) for index in range(len(uuids))]
    chosen: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        known = entry.isdigit() and int(entry) < len(uuids)
        by_uuid = entry.startswith("GPU-") and sum(uuid.startswith(entry) for uuid in uuids) == 1
        if not (known or by_uuid or entry.startswith("MIG-")) or entry in chosen:
            break
        chosen.append(entry)
    return chosen


def cores(root: Path = ROOT) -> int:
    """Return the number of CPU cores this process may use: its affinity, limited by the quota of its cgroups."""
    count = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return count if quota is None else max(1, min(count, round(quota)))


def compiler(device: str) -> str | None:
    """Return the compiler that torch.compile calls (C++ for ``cpu``, C for ``cuda`` by Triton), or None."""
    variable, *names = ("CXX", "g++", "clang++") if device == "cpu" else ("CC", "gcc", "clang")
    tried = (shutil.which(name) for name in (os.environ.get(variable, ""), *names) if name)
    return next((found for found in tried if found), None)


_claims: list[socket.socket] = []
"""A UNIX socket for each port returned by ``free_port``; its name is the claim, which ends with this process."""


def _claim(port: int) -> bool:
    """Reserve a port against every other ``free_port`` of this host; return False if it is reserved."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0ftmon-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def port_is_free(port: int) -> bool:
    """Return whether a TCP port of the loopback address can be bound now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a free TCP port below Linux's ephemeral range, so that no outgoing connection can use it meanwhile.

    Ranks bind it only after their imports: until this process ends, no other call on this host returns it.
    """
    for _ in range(100):
        port = random.randrange(20000, 32768)
        if port_is_free(port) and _claim(port):
            return port
    raise OSError("no free TCP port between 20000 and 32767 in 100 tries")
