"""Runs first in every Python process of a job: determines its role, and hooks into a rank's framework imports."""

import os
import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from ....protocol.run.environment import RANK_PID_ENV
from .. import guard
from ..hooks.imports import after_import
from ..link import output
from ..rank.roles import decide, launcher_name, parse_program, parse_rank


def begin() -> None:
    """Act on the role of this process; called from ``sitecustomize``, so it must stay quick and import little."""
    output.steady_output()
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
        output.redirect_output(known[0] if known else 0)
    from ..device.memory import install

    install()  # before a script can bind ``resource.getrusage``, which shows peaks that the probe resets
    await_frameworks()


def _settle() -> None:
    """Find this host's directory of the run; without one, training continues unwatched and that is reported once."""
    try:
        output.settle()
    except Exception as error:
        guard.log_error("this host cannot join the run", error)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            sys.stderr.write(f"ftmon: the ranks of this host are not watched: {error}\n")


HOOKS = (
    ("torch", "torch.install"),
    ("torch", "distributed.install"),
    ("torch", "distributed.install_collectives"),
    ("deepspeed", "deepspeed.install"),
    ("accelerate.data_loader", "frameworks.install"),
    ("transformers.trainer", "frameworks.install_trainer"),
    ("transformers.modeling_utils", "frameworks.install_modeling"),
    ("transformers.masking_utils", "frameworks.install_masking"),
    ("transformers.generation.utils", "frameworks.install_generation"),
)
"""The function in ``hooks`` to call with a module once it was imported; ``docs/frameworks.md`` shows how to add one."""


def await_frameworks() -> None:
    """Install the hooks of each framework when it is imported, or at once if it already is."""
    after_import("torch", _on_torch)
    after_import("torch._dynamo.trace_rules", _on_dynamo)
    for name, install in HOOKS:
        if name != "torch":
            after_import(name, partial(_install, install))


def _install(install: str, module: ModuleType) -> None:
    file, function = install.split(".")
    hooks = import_module(f"..hooks.{file}", __package__)
    getattr(hooks, function)(module)


def _on_torch(module: ModuleType) -> None:
    """Install the hooks of PyTorch, in their order, and begin a rank that is known to be one."""
    from .. import active
    from ..memory.snapshots import watch_script
    from .begin import become_rank, begin_rank

    active.become_rank = become_rank
    watch_script()
    for name, install in HOOKS:
        if name == "torch":
            _install(install, module)
    if os.environ.get(RANK_PID_ENV) == str(os.getpid()):
        begin_rank()


def _on_dynamo(module: ModuleType) -> None:
    """Exclude the hooks from ``torch.compile``: it would trace them, guard on their counters and recompile."""
    module.add(str(__package__).rpartition(".")[0])


def leave_to_parent() -> None:
    """Disable the probe in a forked child of a rank, such as a dataloader worker."""
    active: Any = sys.modules.get("ftmon.trainer.probe.active")
    if active is not None:
        active.leave_to_parent()
        if active.forked:
            from ..link.stacks import answer_signals

            answer_signals()


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
