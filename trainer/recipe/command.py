"""The command that starts the ranks: DeepSpeed's launcher of one host, and the environment it needs."""

import base64
import json
import os
import sys
from collections.abc import Mapping

from .hardware import free_port
from .preflight.resolve import Resolved


def launch_command(resolved: Resolved) -> list[str]:
    """Return the command for all ranks of this host.

    It is the launcher that ``deepspeed`` itself starts on one host; calling it directly saves one import of torch, and
    no hostfile of another job is read.
    """
    slots = resolved.gpus or list(range(resolved.ranks))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": slots}).encode()).decode()
    return [
        sys.executable,
        "-u",
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={world}",
        "--master_addr=127.0.0.1",
        f"--master_port={resolved.config.run.master_port or free_port()}",
        "--no_local_rank",
        "--module",
        "--log_level=warning",
        "ftmon.trainer.recipe",
    ]


def launch_environment(resolved: Resolved, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of the ranks to add to ``base``."""
    result = {
        "DS_ACCELERATOR": resolved.device,
        # The working directory must not shadow modules (such as a script called datasets.py).
        "PYTHONSAFEPATH": "1",
        # All ranks are on this host. Without it gloo resolves the host's own name, which often fails.
        "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"),
        "TOKENIZERS_PARALLELISM": base.get("TOKENIZERS_PARALLELISM", "false"),
    }
    threads = str(resolved.config.run.threads)
    if resolved.device == "cpu":
        result["OMP_NUM_THREADS"] = threads
        result["CUDA_VISIBLE_DEVICES"] = ""
    else:
        result["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS", threads)
    return result
