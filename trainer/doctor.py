"""Checks of the training side on this machine: ``python -m ftmon.trainer.doctor [--json]``.

Every check stands alone and none may fail: what is not installed is a finding, not an error of the doctor's.
"""

import argparse
import contextlib
import ctypes
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import msgspec

from ..protocol.checks import Check, State, faults_of, version_check
from ..protocol.text import duration

INSTALL = "pip install 'ftmon[train]'"
_PACKAGES: dict[str, State] = {
    **dict.fromkeys(("torch", "deepspeed", "transformers", "datasets"), "error"),
    **dict.fromkeys(("peft", "accelerate"), "warning"),
}
_GIB = 1 << 30
_MIN_SHM = _GIB
_MIN_FILES = 4096
_BUILD_SECONDS = 900.0  # No build of one extension takes longer


def packages() -> Iterator[Check]:
    """Check which packages of the training side are installed, and whether their versions were tested."""
    for name, lack in _PACKAGES.items():
        try:
            yield version_check(name, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, lack, "not installed", INSTALL)


def known() -> Iterator[Check]:
    """Name the known faults of the installed versions."""
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    for fault, version in faults_of(versions):
        condition = " and ".join(
            f"{name.replace('_', ' ')} {' or '.join(map(str, values))}" for name, values in fault.when.items()
        )
        told = f"{version}: {fault.what}" + (f" ({condition})" if condition else "")
        yield Check(f"known fault of {fault.library}", "note", f"{told}; {fault.remedy}: {fault.thread}")


def gpus() -> Iterator[Check]:
    """Check whether PyTorch sees the GPUs that the driver has, and the backend between them."""
    torch: Any = import_module("torch")
    from .recipe.hardware import visible_gpus

    present = len(visible_gpus())
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    note = f" (CUDA_VISIBLE_DEVICES={setting})" if setting is not None else ""
    if torch.version.cuda is None:
        remedy = "install a CUDA build of PyTorch: https://pytorch.org/get-started/locally"
        text = f"{present} here, but this PyTorch is built for the CPU only"
        lacks = Check("GPUs", "warning", text, remedy)
        yield lacks if present else Check("GPUs", "ok", f"none{note}: training runs on the CPU, over gloo")
        return
    seen = int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if seen < present:
        yield Check("GPUs", "error", f"PyTorch sees {seen} of {present}{note}", "update the driver; see nvidia-smi")
        return
    names = sorted({str(torch.cuda.get_device_name(index)) for index in range(seen)})
    yield Check("GPUs", "ok", f"{seen}: {', '.join(names)}{note}" if seen else f"none visible{note}")
    yield Check("CUDA", "ok", f"PyTorch is built for {torch.version.cuda}")
    if seen:
        version = torch.cuda.nccl.version()
        yield Check("NCCL", "ok", ".".join(map(str, version)) if isinstance(version, tuple) else str(version))


def process_groups() -> Iterator[Check]:
    """Check whether ranks could find each other on this host."""
    distributed: Any = import_module("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        yield Check("gloo", "error", "this PyTorch has no gloo", "install an official build of PyTorch")
        return
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        remedy = "add it to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo (ftmon's own trainer does)"
        yield Check("gloo", "warning", f"this host's name, {name}, resolves to no address: gloo may not start", remedy)
    else:
        yield Check("gloo", "ok", "available")


def op_builder() -> Iterator[Check]:
    """Check what DeepSpeed compiles its kernels with: compiler, ninja, and nvcc where there are GPUs."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        remedy = "install one (apt install g++), or use optimizer.kind=torch_fused, which needs none"
        yield Check("compiler", "warning", f"no {compiler}: DeepSpeed cannot build its Adam", remedy)
    else:
        yield Check("compiler", "ok", _first_line([compiler, "--version"]))
    missing = Check("ninja", "warning", "not found: DeepSpeed cannot build its kernels", "pip install ninja")
    yield Check("ninja", "ok", _first_line(["ninja", "--version"])) if shutil.which("ninja") else missing
    yield from _nvcc()
    yield arch_list(os.environ.get("TORCH_CUDA_ARCH_LIST"))


def extension_locks() -> Iterator[Check]:
    """Check for locks of killed builds: every later process waits for them for ever."""
    name = "extension locks"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    old: list[tuple[Path, float]] = []
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            age = time.time() - lock.stat().st_mtime
            old += [(lock, age)] if age > _BUILD_SECONDS else []
    if not old:
        yield Check(name, "ok", "no unfinished builds")
    for lock, age in old:
        text = f"{lock} is {duration(age)} old: DeepSpeed waits at start-up until it is removed"
        yield Check(name, "warning", text, f"if nothing is being built: rm {shlex.quote(str(lock))}")


def _nvcc() -> Iterator[Check]:
    torch: Any = import_module("torch")
    wanted: str | None = torch.version.cuda
    if wanted is None:
        return
    extension: Any = import_module("torch.utils.cpp_extension")
    root: str | None = extension.CUDA_HOME
    nvcc = Path(root) / "bin" / "nvcc" if root else None
    if nvcc is None or not nvcc.exists():
        remedy = "install the CUDA toolkit and set CUDA_HOME, or use optimizer.kind=torch_fused, which needs none"
        yield Check("CUDA_HOME", "warning", "no CUDA compiler: DeepSpeed cannot build its GPU kernels", remedy)
        return
    found = re.search(r"release (\d+)\.(\d+)", _output([str(nvcc), "--version"]))
    if found and found.group(1) != wanted.split(".")[0]:
        text = f"{root} is CUDA {found.group(1)}.{found.group(2)}, PyTorch is built for {wanted}"
        yield Check("CUDA_HOME", "warning", text, f"set CUDA_HOME to a CUDA {wanted.split('.')[0]} toolkit")
    else:
        yield Check("CUDA_HOME", "ok", f"{root}" + (f", CUDA {found.group(1)}.{found.group(2)}" if found else ""))


def arch_list(setting: str | None) -> Check:
    """Judge a ``TORCH_CUDA_ARCH_LIST``: DeepSpeed's builder reads numbers only, and fails over ``9.0a``."""
    name = "TORCH_CUDA_ARCH_LIST"
    if not setting or not setting.strip():
        return Check(name, "ok", "not set: kernels are built for the GPUs that are here")
    entries = re.split(r"[;\s]+", setting.strip(" ;"))
    readable = re.compile(r"\d+\.\d+(\+PTX)?").fullmatch
    bad = [entry for entry in entries if not readable(entry)]
    if not bad:
        return Check(name, "ok", setting)
    corrected = [re.sub(r"(\d+\.\d+)[a-z]", r"\1", entry) for entry in entries]
    remedy = "unset TORCH_CUDA_ARCH_LIST"
    if all(map(readable, corrected)):
        remedy = f"export TORCH_CUDA_ARCH_LIST='{';'.join(corrected)}'"
    return Check(name, "warning", f"{setting}: DeepSpeed's op builder cannot read {', '.join(bad)}", remedy)


def deepspeed_ops() -> Iterator[Check]:
    """Ask DeepSpeed itself which of its Adams it could build here."""
    accelerator: Any = import_module("deepspeed.accelerator").get_accelerator()
    yield Check("accelerator", "ok", f"DeepSpeed trains on {accelerator.device_name()}")
    for title, builder in (("CPU Adam", "CPUAdamBuilder"), ("fused Adam", "FusedAdamBuilder")):
        made = accelerator.create_op_builder(builder)
        lacks = Check(title, "warning", "DeepSpeed cannot build it here", "use optimizer.kind=torch_fused")
        builds = made is not None and made.is_compatible(False)
        yield Check(title, "ok", "DeepSpeed can build it at first use") if builds else lacks


def limits() -> Iterator[Check]:
    """Check shared memory and the limits of this shell."""
    import resource

    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        yield Check("shared memory", "warning", "no /dev/shm: data-loading workers and NCCL need it", "mount a tmpfs")
    else:
        size = shm.f_blocks * shm.f_frsize
        text = f"/dev/shm has {size / _GIB:.1f} GiB, {shm.f_bavail * shm.f_frsize / _GIB:.1f} free"
        if size < _MIN_SHM:
            remedy = "start the container with --shm-size=8g or --ipc=host"
            yield Check("shared memory", "warning", f"{text}: too little for data-loading workers and NCCL", remedy)
        else:
            yield Check("shared memory", "ok", text)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_FILES:
        most = hard if hard != resource.RLIM_INFINITY else 65536
        remedy = f"ulimit -n {min(most, 65536)}" if most >= _MIN_FILES else "raise nofile in /etc/security/limits.conf"
        yield Check("open files", "warning", f"at most {soft}: few for many workers", remedy)
    else:
        yield Check("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        text = f"limited to {soft / _GIB:.0f} GiB: CUDA reserves far more than it uses"
        yield Check("address space", "warning", text, "ulimit -v unlimited")


def cpu_memory() -> Iterator[Check]:
    """Check whether memory of CPU ranks can be measured as it should be."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):
        yield Check("mallinfo2", "ok", "glibc reports what CPU ranks have allocated")
    else:
        text = "this C library has none: for CPU ranks the resident set is shown as allocated"
        yield Check("mallinfo2", "warning", text, "use a system with glibc 2.33 or later")
    try:
        Path("/proc/self/clear_refs").write_bytes(b"5")
    except OSError as error:
        text = f"/proc/self/clear_refs cannot be written ({error.strerror}): no peaks per phase for CPU ranks"
        yield Check("clear_refs", "warning", text, "run outside of a sandbox that forbids it")
    else:
        yield Check("clear_refs", "ok", "peaks per phase can be measured for CPU ranks")


_ALL: tuple[Callable[[], Iterator[Check]], ...] = (
    *(packages, known, gpus, process_groups, op_builder, extension_locks, deepspeed_ops, limits, cpu_memory),
)


def examine() -> list[Check]:
    """Run every check; one that cannot be made is itself a finding."""
    found: list[Check] = []
    for look in _ALL:
        try:
            found.extend(look())
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:  # those are findings of their own
                found.append(Check(_title(look), "error", f"{error.name} is not installed", INSTALL))
        except Exception as error:  # a broken installation fails in its own way
            first = (str(error).strip() or repr(error)).splitlines()[0]
            found.append(Check(_title(look), "error", f"cannot be checked: {first}", f"reinstall: {INSTALL}"))
    return found


def _title(look: Callable[[], Iterator[Check]]) -> str:
    return look.__name__.replace("_", " ")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _first_line(command: list[str]) -> str:
    return next(iter(_output(command).splitlines()), "installed, version unknown")


def main() -> int:
    """Print the findings; status 1 when one of them stands in the way of training."""
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print a JSON list of {name, state, text, remedy}")
    arguments = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints while it is imported
        found = examine()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for check in found:
            print(f"{check.state:<8} {check.name:<20} {check.text}" + (f"  -> {check.remedy}" if check.remedy else ""))
    return 1 if any(check.state == "error" for check in found) else 0


if __name__ == "__main__":
    sys.exit(main())
