"""GPUs by name, and how well a training uses them (MFU); the memory and processors that a process may use on this host.

The latter are its own and its control groups'. Only Linux has the files that are read; elsewhere they are unknown.
"""

import math
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from ..text import sanitize
from .process import proc_text

# GPUs: memory, data-sheet rates and bandwidths, by their names in PyTorch or NVML. One table for all of ftmon.
#
# Sources. Rates (dense, sums in fp32; ``fp32`` is that of the CUDA cores) and bandwidths: NVIDIA's data sheets of the
# A100, A30, A40, A10, L4, L40, L40S, H100, H200, H20, GH200, V100 and T4; the HGX B200/B300 and GB200 NVL72
# specifications per GPU; those of the RTX A6000, A5000, 6000 Ada and PRO 6000; the white papers of the GA102, Ada and
# RTX Blackwell architectures (GeForce: half the rate if sums are in fp32). Memory: the "total capacity" of PyTorch's
# out-of-memory messages (``cudaMemGetInfo``), which is the base of ``set_per_process_memory_fraction``. It is less
# than the name states, by ECC and the driver's own memory, and varies by up to 0.3 % with the driver's version.
# NVIDIA publishes no rates of the A10G: only its memory is known.
GIB = 2**30


class Gpu(NamedTuple):
    """One kind of GPU. Rates in TFLOP/s (0: it does not compute in that type), bandwidths in GB/s (10^9 bytes)."""

    pattern: str  # regular expression for the whole name, without the maker's name
    title: str  # name in tables; empty: the kind is not in fit tables
    memory_gib: float  # the device's total capacity as PyTorch reports it
    bf16: float
    fp16: float
    tf32: float
    fp32: float
    memory_gbs: float
    link_gbs: float  # bandwidth to the other GPUs of a host, in one direction: NVLink, or PCIe without NVLink
    host_gbs: float  # bandwidth to the host's memory, in one direction
    capability: tuple[int, int]  # compute capability: kernels and workspaces differ by it

    @property
    def name(self) -> str:
        """The title, or the name that the first alternative of the pattern matches."""
        first = re.sub(r"\[(.)[^]]*\]", r"\1", self.pattern.split("|")[0])
        return self.title or first.replace(".*", "").rstrip(" -")

    @property
    def memory_bytes(self) -> int:
        """Total capacity as PyTorch reports it, bytes."""
        return round(self.memory_gib * GIB)

    def peak_flops(self, precision: str) -> float | None:
        """Return the data-sheet peak in FLOP/s for ``bf16``, ``fp16``, ``tf32`` or ``fp32``; None if there is none."""
        if precision not in ("bf16", "fp16", "tf32", "fp32"):
            return None
        return getattr(self, precision) * 1e12 or None


GPUS = (
    Gpu(r"RTX 4060", "RTX 4060 8 GB", 7.63, 30.2, 30.2, 15.1, 15.1, 272, 16, 16, (8, 9)),
    Gpu(r"RTX 3060", "RTX 3060 12 GB", 11.76, 25.5, 25.5, 12.7, 12.7, 360, 32, 32, (8, 6)),
    Gpu(r"T4", "T4 16 GB", 14.56, 0.0, 65.0, 0.0, 8.1, 320, 16, 16, (7, 5)),
    Gpu(r"RTX 4080", "", 15.70, 97.5, 97.5, 48.7, 48.7, 717, 32, 32, (8, 9)),
    Gpu(r"V100-SXM2-32GB.*", "", 31.74, 0.0, 125.0, 0.0, 15.7, 900, 150, 16, (7, 0)),
    Gpu(r"V100-SXM2.*", "", 15.77, 0.0, 125.0, 0.0, 15.7, 900, 150, 16, (7, 0)),
    Gpu(r"V100-PCIE-32GB.*", "", 31.74, 0.0, 112.0, 0.0, 14.0, 900, 16, 16, (7, 0)),
    Gpu(r"V100-PCIE.*", "", 15.77, 0.0, 112.0, 0.0, 14.0, 900, 16, 16, (7, 0)),
    Gpu(r"L4", "L4 24 GB", 22.03, 121.0, 121.0, 60.0, 30.3, 300, 32, 32, (8, 9)),
    Gpu(r"A10", "", 22.06, 125.0, 125.0, 62.5, 31.2, 600, 32, 32, (8, 6)),
    Gpu(r"A10G", "A10G 24 GB", 22.06, 0.0, 0.0, 0.0, 0.0, 600, 32, 32, (8, 6)),
    Gpu(r"RTX 3090", "RTX 3090 24 GB", 23.69, 71.0, 71.0, 35.6, 35.6, 936, 56, 32, (8, 6)),
    Gpu(r"RTX 4090", "RTX 4090 24 GB", 23.64, 165.2, 165.2, 82.6, 82.6, 1008, 32, 32, (8, 9)),
    Gpu(r"A30", "", 23.53, 165.0, 165.0, 82.0, 10.3, 933, 100, 32, (8, 0)),
    Gpu(r"RTX A5000", "", 23.68, 111.1, 111.1, 55.6, 27.8, 768, 56, 32, (8, 6)),
    Gpu(r"RTX 5090", "RTX 5090 32 GB", 31.36, 209.5, 209.5, 104.8, 104.8, 1792, 64, 64, (12, 0)),
    Gpu(r"A[18]00[- ].*80GB.*", "A100 80 GB", 79.25, 312.0, 312.0, 156.0, 19.5, 2039, 300, 32, (8, 0)),
    Gpu(r"A[18]00[- ].*", "A100 40 GB", 39.39, 312.0, 312.0, 156.0, 19.5, 1555, 300, 32, (8, 0)),
    Gpu(r"A40", "A40 48 GB", 44.35, 149.7, 149.7, 74.8, 37.4, 696, 56, 32, (8, 6)),
    Gpu(r"RTX A6000", "", 47.41, 154.8, 154.8, 77.4, 38.7, 768, 56, 32, (8, 6)),
    Gpu(r"RTX 6000 Ada Generation", "", 47.37, 364.2, 364.2, 182.1, 91.1, 960, 32, 32, (8, 9)),
    Gpu(r"L40", "", 44.40, 181.05, 181.05, 90.5, 90.5, 864, 32, 32, (8, 9)),
    Gpu(r"L40S", "L40S 48 GB", 44.40, 362.05, 362.05, 183.0, 91.6, 864, 32, 32, (8, 9)),
    Gpu(r"H100|H100 80GB HBM[23]e?|H100 SXM5?.*|H800( SXM5?.*)?", "H100 80 GB", 79.11,
        989.4, 989.4, 494.7, 66.9, 3350, 450, 64, (9, 0)),
    Gpu(r"H[18]00 PCIe", "", 79.11, 756.0, 756.0, 378.0, 51.0, 2039, 64, 64, (9, 0)),
    Gpu(r"H100 NVL", "", 93.00, 835.5, 835.5, 417.5, 60.0, 3938, 300, 64, (9, 0)),
    Gpu(r"RTX PRO 6000 Blackwell.*", "RTX PRO 6000 96 GB", 94.97, 503.8, 503.8, 251.9, 126.0, 1792, 64, 64, (12, 0)),
    Gpu(r"GH200.*", "", 94.50, 989.4, 989.4, 494.7, 66.9, 4000, 450, 450, (9, 0)),
    Gpu(r"H20", "", 95.00, 148.0, 148.0, 74.0, 44.0, 4000, 450, 64, (9, 0)),
    Gpu(r"H200", "H200 141 GB", 139.80, 989.4, 989.4, 494.7, 66.9, 4800, 450, 64, (9, 0)),
    Gpu(r"H200 NVL", "", 139.80, 835.5, 835.5, 417.5, 60.0, 4800, 450, 64, (9, 0)),
    Gpu(r"B200", "B200 180 GB", 178.35, 2250.0, 2250.0, 1125.0, 75.0, 8000, 900, 64, (10, 0)),
    Gpu(r"B300( SXM6.*)?", "B300 288 GB", 267.69, 2250.0, 2250.0, 1125.0, 75.0, 8000, 900, 128, (10, 3)),
    Gpu(r"GB200", "", 184.00, 2500.0, 2500.0, 1250.0, 80.0, 8000, 900, 450, (10, 0)),
)  # fmt: skip
"""All kinds; the first that matches a name is used."""
FIT_TABLE = tuple(sorted((gpu for gpu in GPUS if gpu.title), key=lambda gpu: gpu.memory_gib))
"""The kinds in "does it fit" tables, 8 to 288 GB, by memory."""
_MAKER = re.compile(r"^(NVIDIA |Tesla |GeForce |Quadro )+")


def find_gpu(device: str) -> Gpu | None:
    """Return the GPU for a name in PyTorch or NVML, or a title of the table; None for others, MIG slices and CPUs."""
    name = _MAKER.sub("", device.strip())
    if "MIG" in name:
        return None
    return next((gpu for gpu in GPUS if name == gpu.title or re.fullmatch(gpu.pattern, name)), None)


# Control groups, of cgroup version 2 and 1. A limit applies to a group and all groups below it, so a process's own
# group and its ancestors all count: under SLURM without a cgroup namespace, only the job's group has a limit.
ROOT = Path("/")


def hierarchies(controller: str, pid: int | str, root: Path = ROOT) -> Iterator[tuple[Path, Path]]:
    """Yield (directory, mount point) of each cgroup of a process in which ``memory`` or ``cpu`` may be limited.

    In a container the group's path may be that on the host, which does not exist here: then the mount is the group.
    ``root``, the directory of the kernel's files, differs only in tests.
    """
    mounts = root / "sys/fs/cgroup"
    for line in proc_text(root / f"proc/{pid}/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        is_unified = number == "0" and not controllers
        if is_unified or controller in controllers.split(","):
            mount = mounts if is_unified else mounts / controller
            yield mount / path.lstrip("/"), mount


def own_groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the directories of this process's cgroups and of their ancestors, up to the mount points."""
    for own, mount in hierarchies(controller, "self", root):
        for group in [own, *own.parents]:
            yield group
            if group == mount:
                break


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPU time per wall-clock time that this process's cgroups allow; None: no limit, or unknown."""
    found = (_quota_of(group) for group in own_groups("cpu", root))
    return min((quota for quota in found if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    """Return a group's quota per period: ``cpu.max`` in version 2, ``cpu.cfs_*_us`` (-1: no limit) in version 1."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


_UNLIMITED = 1 << 60  # cgroup version 1 reports "no limit" as a number near 2^63


def memory_group(root: Path = ROOT) -> Path | None:
    """Return the directory of the own cgroup or ancestor with the lowest memory limit; None without a limit."""
    return min(_limited_groups(root), default=(0, None), key=lambda found: found[0])[1]


def group_limit(group: Path) -> int | None:
    """Return the memory limit of a cgroup in bytes; None: there is none, or it cannot be read."""
    limit = _number(group, "memory.max", "memory.limit_in_bytes")
    return limit if limit is not None and limit < _UNLIMITED else None


def group_memory(group: Path) -> tuple[int, int] | None:
    """Return (used, limit) bytes of a cgroup; reclaimable file cache does not count as used."""
    limit, used = group_limit(group), _number(group, "memory.current", "memory.usage_in_bytes")
    return None if limit is None or used is None else (max(0, used - _droppable(group)), limit)


def memory_limit(root: Path = ROOT) -> int:
    """Return the bytes that this process may use: the host's, or a control group's lower limit; 0 if unknown."""
    found = [limit for limit, _ in _limited_groups(root)]
    total = _meminfo("MemTotal:", root)
    return min([*found, total] if total else found, default=0)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that this process can still allocate on the host and in its control groups; 0 if unknown."""
    memories = [memory for _, group in _limited_groups(root) if (memory := group_memory(group)) is not None]
    found = [max(0, limit - used) for used, limit in memories]
    available = _meminfo("MemAvailable:", root)
    return min([*found, available] if available else found, default=0)


def cpu_model(root: Path = ROOT) -> str:
    """Return the name of the host's processor, or of its architecture if /proc has none."""
    model = _field(root / "proc/cpuinfo", "model name")
    return sanitize(model.partition(":")[2].strip(), 80) or platform.machine()


def _limited_groups(root: Path) -> Iterator[tuple[int, Path]]:
    groups = ((group_limit(group), group) for group in own_groups("memory", root))
    return ((limit, group) for limit, group in groups if limit is not None)


def _number(group: Path, *names: str) -> int | None:
    """Return the number in the first of a cgroup's files that has one."""
    texts = (proc_text(group / name).strip() for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)


def _droppable(group: Path) -> int:
    """Return bytes of ``inactive_file`` (``total_inactive_file`` in version 1, which includes child groups)."""
    lines = proc_text(group / "memory.stat").splitlines()
    figures = dict(line.split(" ", 1) for line in lines if " " in line)
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def _meminfo(field: str, root: Path) -> int:
    return int([*_field(root / "proc/meminfo", field).split(), "0", "0"][1]) * 1024


def _field(path: Path, name: str) -> str:
    return next((line for line in proc_text(path).splitlines() if line.startswith(name)), "")


Precision = Literal["bf16", "fp16", "tf32", "fp32"]


class ModelFlops(msgspec.Struct, frozen=True, omit_defaults=True):
    """Coefficients of the FLOPs of one training step of a model, forward and backward: those that its training needs.

    Recomputed activations (gradient checkpointing), padding and an optimizer's arithmetic do not count.

    - Matrix products: 6 FLOPs for each parameter and token, 2 in the forward and 4 in the backward pass (2 for the
      gradient of the input, 2 for the gradient of the weight). A frozen parameter has no gradient of its own: 4, or 2
      if nothing below it is trained. Adapters count as parameters. Input embeddings are looked up, not multiplied: they
      do not count unless they are also the output layer's weights. In a mixture of experts, only the experts that a
      token uses count.
    - Attention: 12 FLOPs for each layer, pair of query and key, head and element of a head (4 in the forward, 8 in the
      backward pass). A causal mask admits n(n+1)/2 pairs in a document of n tokens; pairs across packed documents do
      not count.

    Source of both terms: Chowdhery et al., PaLM (2022), appendix B, which does not halve attention for the causal mask;
    the halving is that of FlashAttention-2 (Dao, 2023).
    """

    token: float  # FLOPs per token: matrix products with parameters
    pair: float = 0.0  # FLOPs per pair of query and key, summed over the layers with full causal attention
    windowed_pair: float = 0.0  # the same for the layers that attend to a sliding window
    window: int = 0  # tokens of that window; 0: none

    def of(self, tokens: int, pairs: int, longest: int = 0) -> float:
        """Return the FLOPs of a step of ``tokens``, without padding, and ``pairs`` (``causal_pairs``).

        If ``longest``, the tokens of the longest document, exceeds the window, windowed layers count fewer pairs.
        """
        shrink = min(1.0, self.window / longest * (2 - self.window / longest)) if 0 < self.window < longest else 1.0
        return self.token * tokens + (self.pair + self.windowed_pair * shrink) * pairs


def causal_pairs(lengths: "list[int] | tuple[int, ...]") -> int:
    """Return the number of causal pairs of query and key in documents of these lengths in tokens."""
    return sum(length * (length + 1) // 2 for length in lengths)


def causal_pairs_of_rows(tokens: int, rows: int) -> int:
    """Estimate the causal pairs of ``tokens`` tokens in ``rows`` equal rows, if document lengths are unknown."""
    if rows <= 0:
        return 0
    length = tokens / rows
    return round(rows * length * (length + 1) / 2)


def peak_flops(device: str, precision: str) -> float | None:
    """Return a device's data-sheet peak in FLOP/s for matrix products in ``precision``; named as by PyTorch or NVML.

    None for a CPU, a GPU that is not in the table (such as a MIG slice), or an unsupported data type.
    """
    gpu = find_gpu(device)
    return None if gpu is None else gpu.peak_flops(precision)


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Return the model FLOPs utilisation, ``flops / seconds`` as a share of ``peak`` FLOP/s; None if one is unknown.

    ``peak`` is the data-sheet peak of the device for the data type of its matrix products.
    """
    if not peak or flops <= 0 or seconds <= 0:
        return None
    share = flops / seconds / peak
    return share if math.isfinite(share) else None
