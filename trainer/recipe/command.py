"""The command that starts the ranks: DeepSpeed's launcher of one host, and the environment it needs."""

import base64
import json
import os
import sys
from collections.abc import Mapping

from .config.resolve import Resolved
from .hardware import free_port


def launch_command(resolved: Resolved) -> list[str]:
    """Write the command for all ranks of this host.

    It is the launcher that ``deepspeed`` itself ends up starting on one host; without that front half there is one
    import of torch less to wait for, and no hostfile of another job is read.
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
    """Return what the environment of the ranks has besides ``base``."""
    result = {
        "DS_ACCELERATOR": resolved.device,
        # The person's working directory must not shadow modules (a script called datasets.py, say).
        "PYTHONSAFEPATH": "1",
        # All ranks are on this host. Without it gloo looks up the host's own name, which often leads nowhere.
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
