"""Begins the probe inside a rank that already trains: ``sys.remote_exec`` runs ``attach_running`` there (Python 3.14).

Most hooks replace functions of classes and modules, so objects that exist already have them too: loaders, backward,
DDP's and FSDP's forward, every optimizer's step. What a hook does when an object is made is done here for those found
by the garbage collector: DeepSpeed's engines, DDP modules, Trainers, gradient scalers. Not seen until they are made
anew: names that the script has bound itself (``from torch.nn.utils import clip_grad_norm_``), where a model or an
optimizer was made, and the numbers of the steps before, except those that an engine or a Trainer counts.
"""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ....protocol.run.environment import RANK_PID_ENV, RUN_ENV
from .. import guard
from .activate import await_frameworks, leave_to_parent

_KEPT: list[Any] = []  # The pending call: freed while it waits, it would end the process


def attach_running(run: str, report: str) -> None:
    """Import the probe in this thread, then begin it in the main thread; called in a thread of its own.

    Importing takes a second, in which the training goes on. ``report`` is the path of a file for the seconds that the
    main thread then stood; its text begins with ``!`` if the probe did not begin.
    """
    os.environ[RUN_ENV] = run
    os.environ[RANK_PID_ENV] = str(os.getpid())
    for name in ("..hooks.torch", "..hooks.distributed", "..hooks.frameworks", ".begin"):
        import_module(name, __package__)

    def begin(_argument: Any) -> int:
        began = time.perf_counter()
        try:
            _begin()
            text = f"{time.perf_counter() - began:.4f}"
        except Exception as error:
            guard.log_error("attach", error)
            text = f"!{type(error).__name__}: {error}"
        # Elsewhere, so that the training does not wait for the disk.
        threading.Thread(target=_write, args=(report, text), daemon=True).start()
        return 0

    call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(begin)
    _KEPT.append(call)
    while ctypes.pythonapi.Py_AddPendingCall(call, None):  # the queue is full
        time.sleep(0.01)


def _begin() -> None:
    from .begin import begin_rank

    await_frameworks()
    os.register_at_fork(after_in_child=leave_to_parent)
    if begin_rank() is None:
        raise RuntimeError("the probe did not begin; see logs/probe.log of the run")
    for module, name, adopt in (
        ("deepspeed.runtime.engine", "DeepSpeedEngine", _adopt_engine),
        ("torch.nn.parallel.distributed", "DistributedDataParallel", _adopt_parallel),
        ("transformers.trainer", "Trainer", _adopt_trainer),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        for found in _instances(kind) if kind is not None else ():
            adopt(found)


def _instances(kind: type) -> Iterator[Any]:
    for each in gc.get_objects():
        if kind in type(each).__mro__:  # not isinstance: a proxy's __class__ may run code
            yield each


def _adopt_engine(engine: Any) -> None:
    from ..hooks.deepspeed import attach

    attach(engine)


def _adopt_parallel(_module: Any) -> None:
    from ..hooks import torch

    torch.time_reducer()


def _adopt_trainer(trainer: Any) -> None:
    from ..hooks.frameworks import add_callback

    add_callback(trainer)


def _write(path: str, text: str) -> None:
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w") as file:
        file.write(text)
    os.replace(temporary, path)
