"""Ranks as forks of one process that has imported everything: the imports are paid for once in a session of tests.

``forked_ranks.py SOCKET PID`` forks a child for each request until the process PID is gone. A request is a line of
JSON: the child's environment and a plan, a list of ``{"ranks": 2, "module": "resume_ranks", "jobs": [...]}``. For each
entry so many ranks of a gloo process group are forked, and each calls ``work(world, jobs)`` of the module. What they
print is the answer, and ``all ranks ended with 0`` its last line unless a rank failed; the ranks of an entry that is
``killed`` must be, by SIGKILL.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  # before the fork
import deepspeed  # noqa: F401
import peft  # noqa: F401
import psutil
import torch
import torch._dynamo
import transformers.models.llama  # noqa: F401
from ftmon.trainer.recipe import train  # noqa: F401
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.hardware import free_port

sys.path.insert(0, str(Path(__file__).parent))


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


def run(plan: list[dict[str, Any]]) -> str:
    torch._dynamo.config.disable = os.environ.get("TORCHDYNAMO_DISABLE") == "1"
    for entry in plan:
        module = importlib.import_module(entry["module"])
        ends = launch(entry["ranks"], lambda world, entry=entry, module=module: module.work(world, entry["jobs"]))
        expected = -signal.SIGKILL if entry.get("killed") else 0
        if any(end != expected for end in ends):
            return f"ranks ended with {ends}"
    return "all ranks ended with 0"


def answer(connection: socket.socket) -> None:
    """Do what a request asks for, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    for place in (1, 2):
        os.dup2(connection.fileno(), place)
    os.environ.clear()
    os.environ.update(request["environment"])
    end = "failed"
    try:
        end = run(request["plan"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os.write(1, f"\n{end}\n".encode())
        os._exit(0)


def main() -> None:
    # DeepSpeed collects garbage for every engine: not again and again in what was imported.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    path, watched = Path(sys.argv[1]), psutil.Process(int(sys.argv[2]))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        os.rename(f"{path}.new", path)
        server.settimeout(1.0)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            if not os.fork():
                server.close()
                answer(connection)
            connection.close()
    for end in (".sock", ".lock", ".log"):
        path.with_suffix(end).unlink(missing_ok=True)
    os.killpg(0, signal.SIGKILL)  # whatever hangs


if __name__ == "__main__":
    main()
