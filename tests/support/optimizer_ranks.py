"""One rank that trains with each of several configurations; rank 0 saves the weights and what the optimizer holds.

For a job ``FILE.yaml`` it writes ``FILE.pt``: ``weights`` by name, ``rows``, ``holds`` (the data types of the
parameters that the optimizer steps, and of their states, with bytes an element of a parameter).
"""

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.muon import original_muon
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.train import setup

# On a CPU that has bf16 Muon orthogonalizes in it, whose rounding would hide what stages do differently.
original_muon.ns_compute_dtype = lambda *_: torch.float32


def work(world: World, jobs: list[str]) -> None:
    for path in map(Path, jobs):
        world.log(f"== {path.stem}")
        try:
            run = setup(load(str(path)).config, world)
        except FtmonError as error:
            world.log(f"refused: {error}")
            continue
        stepped: list[Any] = []
        record_stepped(run.engine, stepped)
        run.fit()
        weights: dict[str, torch.Tensor] = {}
        for name, parameter in run.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=run.config.zero.stage == 3):
                weights[name] = parameter.detach().clone()
        if world.is_first:
            rows = [{name: row[name].tolist() for name in ("input_ids", "labels")} for row in run.data.examples.rows]
            torch.save(
                {"weights": weights, "rows": rows, "holds": max(stepped, key=lambda one: one["count"])},
                path.with_suffix(".pt"),
            )
        run.engine.destroy()


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
