"""Runs first in every Python process of a job: determines its role, and hooks into a rank's framework imports."""

import os
import sys
from types import ModuleType
from typing import Any

from .. import guard
from ..hooks.imports import after_import
from ..link import run_files
from ..link.redirect import redirect_output
from ..link.steady_output import steady_output
from ..rank.roles import RANK_PID_ENV, decide, launcher_name, parse_program, parse_rank


def begin() -> None:
    """Act on the role of this process; called from ``sitecustomize``, so it must stay quick and import little."""
    steady_output()
    role = decide(sys.orig_argv, os.environ, os.getpid())
    if role == "refused":
        _refuse()
    if role not in ("rank", "candidate"):
        return
    os.register_at_fork(after_in_child=leave_to_parent)
    if role == "rank":
        os.environ[RANK_PID_ENV] = str(os.getpid())
        _settle()
        known = parse_rank(os.environ)
        redirect_output(known[0] if known else 0)
    keep_peak_resident()
    await_frameworks()


def _settle() -> None:
    """Find this host's directory of the run; without one, training continues unwatched and that is reported once."""
    try:
        run_files.settle()
    except Exception as error:
        guard.log_error("this host cannot join the run", error)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"ftmon: the ranks of this host are not watched: {error}\n")


def keep_peak_resident() -> None:
    """Patch ``resource.getrusage``, before a script can bind the name, to correct for peaks that the probe resets."""
    from ..device.rusage import install

    install()


def await_frameworks() -> None:
    """Install the hooks of each framework when it is imported, or at once if it already is."""
    after_import("torch", _on_torch)
    after_import("torch._dynamo.trace_rules", _on_dynamo)
    after_import("deepspeed", _on_deepspeed)
    after_import("accelerate.data_loader", _on_accelerate)
    after_import("transformers.trainer", _on_trainer)
    after_import("transformers.modeling_utils", _on_modeling)
    after_import("transformers.generation.utils", _on_generation)


def _on_torch(_module: ModuleType) -> None:
    from ..hooks import collectives, parallel, torch
    from .begin import become_rank, begin_rank

    torch.install(become_rank)
    parallel.install()
    collectives.install()
    if os.environ.get(RANK_PID_ENV) == str(os.getpid()):
        begin_rank()


def _on_dynamo(module: ModuleType) -> None:
    """Exclude the hooks from ``torch.compile``: it would trace them, guard on their counters and recompile."""
    module.add(str(__package__).rpartition(".")[0])


def _on_deepspeed(_module: ModuleType) -> None:
    from ..hooks import deepspeed
    from .begin import become_rank

    deepspeed.install(become_rank)


def _on_accelerate(module: ModuleType) -> None:
    from ..hooks import accelerate

    accelerate.install(module)


def _on_trainer(module: ModuleType) -> None:
    from ..hooks import transformers

    transformers.install_trainer(module)


def _on_generation(module: ModuleType) -> None:
    from ..hooks import transformers

    transformers.install_generation(module)


def _on_modeling(module: ModuleType) -> None:
    from ..hooks import transformers

    transformers.install_modeling(module)


def leave_to_parent() -> None:
    """Disable the probe in a forked child of a rank, such as a dataloader worker."""
    active: Any = sys.modules.get("ftmon.trainer.probe.active")
    if active is not None:
        active.leave_to_parent()


def _refuse() -> None:
    name = launcher_name(parse_program(sys.orig_argv))
    text = (
        f"ftmon: refused: '{name}' was started from inside a rank (pid {os.environ[RANK_PID_ENV]}), and would start "
        "every rank once more for each rank; start it once, outside of the training script\n"
    )
    guard.log(text.strip())
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    finally:
        # A SystemExit from sitecustomize would be reported as a failure to initialise the interpreter.
        os._exit(2)
