"""One rank that trains with each of several configurations; rank 0 saves the weights and what the optimizer holds.

For a job ``FILE.yaml`` it writes ``FILE.pt``: ``weights`` by name, ``masters`` (those that DeepSpeed keeps in fp32),
``rows``, ``holds`` (the data types of the parameters that the optimizer steps, and of their states, with bytes an
element of a parameter), ``waits`` (how often DeepSpeed had waited for the device after each micro-step).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils import safe_get_full_fp32_param
from ftmon.trainer.recipe.distributed import World
from recipe_ranks import runs, save

# On a CPU that has bf16 Muon orthogonalizes in it, whose rounding would hide what stages do differently.
original_muon.ns_compute_dtype = lambda *_: torch.float32


def work(world: World, jobs: list[str]) -> None:
    for path, run in runs(world, jobs):
        stepped: list[Any] = []
        record_stepped(run.engine, stepped)
        waits: list[int] = []
        with counted_waits(run.engine, waits):
            run.fit()
        holds = max(stepped, key=lambda one: one["count"])
        save(path, run, run.data.examples.rows, holds=holds, masters=masters(run.engine.module), waits=waits)


def masters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: (one, safe_get_full_fp32_param(one)) for name, one in module.named_parameters()}
    return {
        name: master.detach().clone().view(getattr(one, "ds_shape", one.shape))
        for name, (one, master) in found.items()
        if master is not None
    }


@contextmanager
def counted_waits(engine: Any, waits: list[int]) -> Generator[None]:
    """Append, after each ``engine.step()``, how often DeepSpeed has waited for the device so far."""
    accelerator: Any = type(get_accelerator())
    synchronize, step, calls = accelerator.synchronize, engine.step, 0

    def wait(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return synchronize(*arguments, **named)

    def record(*arguments: Any, **named: Any) -> None:
        step(*arguments, **named)
        waits.append(calls)

    accelerator.synchronize, engine.step = wait, record
    try:
        yield
    finally:
        accelerator.synchronize = synchronize


def record_stepped(engine: Any, stepped: list[Any]) -> None:
    optimizer = engine.basic_optimizer
    step = optimizer.step

    def record(*arguments: Any, **named: Any) -> Any:
        result = step(*arguments, **named)
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        states = [optimizer.state[one] for one in parameters]
        count = sum(one.numel() for one in parameters)
        vectors = [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()]
        stepped.append(
            {
                "count": count,
                "parameters": {one.dtype for one in parameters},
                "states": {value.dtype for value in vectors},
                "state_bytes": sum(value.nbytes for value in vectors) / count,
            }
        )
        return result

    optimizer.step = record
