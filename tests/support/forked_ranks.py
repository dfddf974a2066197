"""Ranks as forks of one process that has imported everything: the imports of a launch are paid for once.

``forked_ranks.py PLAN`` reads ``[{"ranks": 2, "jobs": [...]}, ...]`` from the JSON file PLAN. For each entry so many
ranks of a gloo process group are forked, and each calls ``jobs_of(kind)`` of the module that the job names.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  # before the fork
import deepspeed  # noqa: F401
import peft  # noqa: F401
import torch
import transformers.models.llama  # noqa: F401
from ftmon.trainer.recipe import train  # noqa: F401
from ftmon.trainer.recipe.engine.distributed import World
from ftmon.trainer.recipe.hardware import free_port

sys.path.insert(0, str(Path(__file__).parent))


def launch(ranks: int, work: Callable[[World], None]) -> None:
    """Fork ``ranks`` ranks that call ``work``; raise SystemExit when one fails."""
    port = free_port()
    children: list[int] = []
    sys.stdout.flush()
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_PORT=str(port))
            torch.set_num_threads(1)
            world = World()
            work(world)
            world.leave()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    if failed:
        raise SystemExit(f"{len(failed)} of {ranks} ranks failed")


def main() -> None:
    gc.freeze()  # DeepSpeed collects garbage for every engine: not again and again in what was imported
    plan: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for entry in plan:
        module = importlib.import_module(entry["module"])
        launch(entry["ranks"], lambda world, entry=entry, module=module: module.work(world, entry["jobs"]))


if __name__ == "__main__":
    main()
