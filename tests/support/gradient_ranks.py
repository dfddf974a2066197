"""One rank that trains one step with each of several configurations, and rank 0 saves the step's gradients.

For a job ``FILE.yaml`` it writes ``FILE.pt``: the gradients that the optimizer was about to apply, by parameter
name, the rows that the step took, and the data types that gradients were reduced in.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.utils import safe_get_full_grad
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.train import setup

LARGE = 1000
"""Elements; smaller tensors are losses, norms and flags."""


def work(world: World, jobs: list[str]) -> None:
    reduced: set[torch.dtype] = set()
    record_dtypes(dist, "all_reduce", reduced)
    record_dtypes(dist, "reduce", reduced)
    # DeepSpeed has looked this one up when it was imported.
    record_dtypes(comm.cdb, "reduce_scatter_function", reduced)
    for path in map(Path, jobs):
        world.log(f"== {path.stem}")
        reduced.clear()
        run = setup(load(str(path)).config, world)
        grads: dict[str, torch.Tensor] = {}
        dtypes: set[torch.dtype] = set()
        record_gradients(run.engine, grads, lambda dtypes=dtypes: dtypes.update(reduced))
        run.fit()
        if world.is_first:
            rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in run.data.examples.rows]
            torch.save({"grads": grads, "rows": rows, "reduced": list(dtypes)}, path.with_suffix(".pt"))
        run.engine.destroy()


def record_gradients(engine: Any, grads: dict[str, torch.Tensor], first: Callable[[], None]) -> None:
    step = engine.step

    def record() -> None:
        if engine.is_gradient_accumulation_boundary():
            first()  # before the gradients are gathered to be saved
            for name, parameter in engine.module.named_parameters():
                if parameter.requires_grad:
                    grad = safe_get_full_grad(parameter)
                    assert grad is not None, name
                    grads[name] = grad.detach().clone().float()
        step()

    engine.step = record


def record_dtypes(place: Any, name: str, seen: set[torch.dtype]) -> None:
    plain = getattr(place, name)

    def recording(tensor: torch.Tensor, *others: Any, **named: Any) -> Any:
        if tensor.numel() >= LARGE:
            seen.add(tensor.dtype)
        return plain(tensor, *others, **named)

    setattr(place, name, recording)
