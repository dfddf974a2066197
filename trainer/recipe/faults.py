"""Real faults, caused at one step of one rank to test the monitor: memory is touched, processes die.

The command's side reads their names, so torch is imported where a fault needs it.
"""

import ctypes
import os
import resource
import select
import signal
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import psutil

from ...protocol.errors import UsageError

if TYPE_CHECKING:
    from .distributed import World

Kind = Literal["spike", "hang", "slow", "oom", "crash", "stop"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DEFAULT_STEP = 20  # Late enough that a rank has a history for comparison, and early enough for a short test
_GIB = 1 << 30
_SLOW_SHARE = 1.5  # Additional time of a slow rank in each step, as a share of a usual step
_USUAL_STEPS = 6  # Latest steps that tell how long a step usually takes, without the fault's own time


class Fault(msgspec.Struct, frozen=True):
    """A fault: its kind, rank and step (for ``slow`` the first of its steps)."""

    kind: Kind
    rank: int
    step: int


def parse(text: str, ranks: int) -> Fault:
    """Read ``KIND[:rank=R,step=S]``, else raise ``UsageError``; the default is the last rank at step 20."""
    name, _, rest = text.partition(":")
    kind: Kind | None = next((known for known in KINDS if known == name), None)
    if kind is None:
        raise UsageError(f"must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {name!r}")
    numbers = {"rank": ranks - 1, "step": DEFAULT_STEP}
    for part in rest.split(",") if rest else []:
        key, _, value = part.strip().partition("=")
        if key not in numbers or not (value.isascii() and value.isdigit()):
            raise UsageError(f"must be of the form {kind}:rank=R,step=S, not {text!r}")
        numbers[key] = int(value)
    if numbers["rank"] >= ranks:
        raise UsageError(f"names rank {numbers['rank']}, but the ranks are 0 to {ranks - 1}")
    if numbers["step"] < 1:
        raise UsageError("names step 0, but steps count from 1")
    return Fault(kind, numbers["rank"], numbers["step"])


class FaultMaker:
    """Causes the fault at its step; does nothing in other ranks, or without a fault."""

    def __init__(self, fault: Fault | None, world: "World", engine: Any) -> None:
        self._fault = fault if fault is not None and fault.rank == world.rank else None
        self._world = world
        self._step = 0
        self._began = 0.0
        self._durations_s: deque[float] = deque(maxlen=_USUAL_STEPS)
        self._worked_s = 0.0
        self._done = False
        if self._fault is None:
            return
        if self._fault.kind == "spike":
            engine.basic_optimizer.register_step_pre_hook(
                lambda *_: _spike(self._world) if self._now("spike") else None
            )
        elif self._fault.kind in ("oom", "crash"):
            engine.module.register_forward_pre_hook(lambda *_: self._in_forward())

    def begin(self, step: int) -> None:
        """Record the beginning of a step, and the time of the one before, without what the fault added."""
        now = time.perf_counter()
        if self._fault is not None and step > 2:
            self._durations_s.append(now - self._began - self._worked_s)
        self._step, self._began, self._worked_s = step, now, 0.0

    def in_data(self) -> None:
        """Cause the faults of the data phase: hang, stop or slow."""
        fault = self._fault
        if fault is None or self._step < fault.step:
            return
        if fault.kind == "slow":
            if not self._worked_s:  # once in a step, not in each micro-step
                began = time.perf_counter()
                _work(statistics.median(self._durations_s or [0.0]) * _SLOW_SHARE or 0.2)
                self._worked_s = time.perf_counter() - began
        elif fault.kind == "stop" and self._now("stop"):
            _announce("stops itself (SIGSTOP)")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "hang" and self._now("hang"):
            _announce("goes no further: it will enter no more collectives")
            select.select([], [], [])  # blocks forever

    def _in_forward(self) -> None:
        if self._now("oom"):
            _out_of_memory(self._world)
        elif self._now("crash"):
            _announce("reads address 0")
            ctypes.string_at(0)

    def _now(self, kind: str) -> bool:
        """Return whether ``kind`` is due now; true once, although ZeRO steps once for each parameter group."""
        fault = self._fault
        if self._done or fault is None or fault.kind != kind or fault.step != self._step:
            return False
        self._done = True
        return True


def _announce(text: str) -> None:
    print(f"fault: this rank {text}", flush=True)


def _work(seconds: float) -> None:
    """Compute on the host for a while, as a slow data pipeline does."""
    import torch

    end = time.perf_counter() + seconds
    matrix = torch.rand(256, 256)
    while time.perf_counter() < end:
        matrix = (matrix @ matrix).clamp_(0.0, 1.0)


def _spike(world: "World") -> None:
    """Allocate a tenth of a GPU (at least 1 GiB), or up to 1 GiB of the host's memory; touch it, and free it."""
    import torch

    if world.on_gpu:
        free, total = torch.cuda.mem_get_info(world.device)
        size = min(free // 2, max(total // 10, _GIB))
    else:
        size = min(psutil.virtual_memory().available // 4, _GIB)
    _announce(f"takes {size / _GIB:.2f} GiB more inside the optimizer step")
    torch.ones(size, dtype=torch.uint8, device=world.device)


def _out_of_memory(world: "World") -> None:
    import torch

    if world.on_gpu:
        _, total = torch.cuda.mem_get_info(world.device)
        _announce(f"asks for {2 * total / _GIB:.0f} GiB of the GPU's {total / _GIB:.0f} GiB")
        torch.empty(2 * total, dtype=torch.uint8, device=world.device)
        return
    # A kernel that overcommits grants any size. A limit on the address space makes malloc itself fail.
    size = 8 * _GIB
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    room = psutil.Process().memory_info().vms + _GIB
    resource.setrlimit(resource.RLIMIT_AS, (room if hard == resource.RLIM_INFINITY else min(room, hard), hard))
    _announce(f"asks for {size / _GIB:.0f} GiB, with an address-space limit that leaves room for 1 GiB")
    try:
        torch.empty(size, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
