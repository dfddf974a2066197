"""One rank that trains each of several configurations with gradients or losses broken as the job's name says.

``overflow-at-N`` makes the gradients of the Nth batch infinite, ``overflow-from-N`` of all from then on, ``nan-from-N``
the loss not a number.
"""

import re

import torch
from ftmon.protocol.errors import FtmonError
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.trainer import Trainer
from recipe_ranks import runs


def work(world: World, jobs: list[str]) -> None:
    for path, run in runs(world, jobs):
        spoil(run, path.stem)
        try:
            run.fit()
            world.log(f"batches taken: {run.state.batches}")
        except FtmonError as error:
            world.log(f"refused: {error}")


def spoil(run: Trainer, name: str) -> None:
    found = re.match(r"(overflow|nan)-(at|from)-(\d+)", name)
    if not found:
        return
    kind, when, number = found[1], found[2], int(found[3])

    def due() -> bool:
        # Batches of the rehearsal are taken before the first one.
        batch = run.state.batches + 1
        return rehearsed and (batch == number if when == "at" else batch >= number)

    rehearsed = False
    steps = run._steps

    def begin(batches: object) -> bool:
        nonlocal rehearsed
        rehearsed = True
        return steps(batches)  # type: ignore[arg-type]

    run._steps = begin  # type: ignore[method-assign]
    if kind == "overflow":
        # Of a weight whose gradient autograd has: the embedding's goes into its sum.
        trained = (weight for weight in run.model.parameters() if weight.requires_grad)
        weight = next(weight for weight in trained if not hasattr(weight, "gradient_sum"))
        weight.register_hook(lambda grad: grad * float("inf") if due() else grad)
    else:
        head = run.model.get_output_embeddings()
        head.register_forward_hook(lambda *call: call[-1] * float("nan") if due() else call[-1])
    assert torch.is_grad_enabled()
