"""Ranks as forks of a process that has imported everything (``fork_server``).

A plan is a list of ``{"ranks": 2, "module": "resume_ranks", "jobs": [...]}``. For each entry so many ranks of a gloo
process group are forked, and each calls ``work(world, jobs)`` of the module. ``all ranks ended with 0`` is the last
line printed unless a rank failed; the ranks of an entry that is ``killed`` must be, by SIGKILL.
"""

import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import datasets  # noqa: F401  # before the fork
import deepspeed  # noqa: F401
import peft  # noqa: F401
import torch
import torch._dynamo
import transformers.models.llama  # noqa: F401
from ftmon.trainer.recipe import train  # noqa: F401
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.hardware import free_port


def launch(ranks: int, work: Callable[[World], None]) -> list[int]:
    """Fork ``ranks`` ranks that call ``work``; return how each ended."""
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
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run(plan: list[dict[str, Any]]) -> None:
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    for entry in plan:
        module = importlib.import_module(entry["module"])
        ends = launch(entry["ranks"], lambda world, entry=entry, module=module: module.work(world, entry["jobs"]))
        expected = -signal.SIGKILL if entry.get("killed") else 0
        if any(end != expected for end in ends):
            print(f"\nranks ended with {ends}")
            return
    print("\nall ranks ended with 0")
