"""Scripts, each in a fork of a process that has torch loaded (``fork_server``), which the probe watches from its start.

A plan is the words of the script, its number of ranks, the file for what it prints and its working folder. Prints the
fork's pid, then its exit status. Several ranks are forks of the fork, which is their launcher and has no probe.
"""

import os
from typing import Any

import start_ranks
import torch  # noqa: F401  # before the fork


def become(plan: dict[str, Any]) -> None:
    if child := os.fork():
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        os._exit(0)
    os.setsid()
    os.chdir(plan["folder"])
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, plan["log"], os.O_WRONLY)):
        os.dup2(os.open(path, flags), descriptor)
    os.dup2(1, 2)
    if plan["ranks"] > 1:
        start_ranks.launch(plan["ranks"], plan["words"])
    else:
        start_ranks.become(plan["words"])
