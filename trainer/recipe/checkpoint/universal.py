"""Converts checkpoints of another number of ranks through DeepSpeed's universal format.

https://www.deepspeed.ai/tutorials/universal-checkpointing/
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch

from ....protocol.errors import ConfigError
from ....protocol.run.environment import RUN_ENV
from ..engine.distributed import World

_MODULE = "deepspeed.checkpoint.ds_to_universal"


@contextlib.contextmanager
def converted(path: Path, world: World) -> Generator[Path]:
    """Yield a universal copy of a checkpoint beside it, removed at the end. All ranks call this.

    Raises:
        ConfigError: DeepSpeed cannot convert it.
    """
    copy = path.with_name(path.name + "-universal.part")
    problem = _convert(path, copy) if world.is_first else ""
    problem = world.share_text(problem)
    try:
        if problem:
            raise ConfigError(
                f"checkpoint.resume: {path} was written by another number of ranks, and DeepSpeed cannot convert it "
                f"({problem}); set run.ranks to what it was"
            )
        yield copy
    finally:
        world.barrier()
        if world.is_first:
            shutil.rmtree(copy, ignore_errors=True)


@contextlib.contextmanager
def loading(engine: Any) -> Generator[None]:
    """Make an engine load the universal format within a ``with`` block."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
        move_step_counts(engine.optimizer.optimizer)
    finally:
        engine._config.load_universal_checkpoint = False


def move_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move step counts to the device of the weights, as fused optimizers require.

    DeepSpeed leaves them in host memory: ``base_optimizer.py`` and ``stage3.py`` set ``step`` to the file's value
    without ``Optimizer.load_state_dict``, which would move it. All states are moved: under ZeRO-3 a group holds its
    parameters only during a step.
    """
    if not any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return
    for parameter, state in optimizer.state.items():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(parameter.device)


def _convert(path: Path, copy: Path) -> str:
    """Convert a checkpoint; return the error, or an empty text."""
    shutil.rmtree(copy, ignore_errors=True)
    # A separate process on the CPU: the conversion forks workers, which a process with CUDA must not.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FTMON", "LOCAL_"))}
    for name in (RUN_ENV, "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = [f"--input_folder={path}", f"--output_folder={copy}", "--inject_missing_state"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", _MODULE, *words, "--num_extract_workers=2", "--num_merge_workers=2"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
    return ""
