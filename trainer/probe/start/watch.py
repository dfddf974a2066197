"""``ftmon.watch(engine)``: one line in a script that is started without ``ftmon run``."""

import fcntl
import functools
import hashlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....protocol.host.process import make_private, start_ticks
from ....protocol.run.environment import RANK_PID_ENV, RUN_ENV
from ....protocol.run.rundir import RunDir, checked_home, create
from ....protocol.run.start import spawn_hub
from .. import guard
from ..active import current, switched_on
from ..hooks.frameworks import callback_class
from ..probe import Probe
from .activate import await_frameworks, leave_to_parent
from .begin import begin_rank

__all__ = ["Callback", "load_ipython_extension", "watch"]


def watch(target: Any = None, *, name: str | None = None, model: Any = None) -> Probe | None:
    """Report this process to the monitor from now on.

    Under ``ftmon run`` the process is watched already and this call has no effect. Otherwise every rank of the job
    joins one new run, the first rank starts its hub, and ``ftmon`` in another terminal shows it. A failure is logged
    and never raised: the training continues unwatched.

    Args:
        target: a DeepSpeed engine or a PyTorch optimizer, whose updates are the steps; None: the first one that steps.
            A GAN has one row a step of this optimizer, and both losses if both are scalars that ``backward`` was called
            on.
        name: name of a new run (default: the script's name).
        model: the model, for its name and size, if ``target`` is an optimizer.

    Returns:
        The probe (see ``Probe.report`` and ``Probe.stop_requested``), or None when this process cannot be watched.
    """
    try:
        probe = current() or _begin(name or Path(sys.argv[0]).stem or "watch")
        if probe is not None and (target is not None or model is not None):
            _attach(target, model)
    except Exception as error:
        guard.log_error("watch", error)
        sys.stderr.write(f"ftmon: this process is not watched: {error}\n")
        return None
    return probe


def _begin(name: str) -> Probe | None:
    sends_logs = not os.environ.get(RUN_ENV)
    if sends_logs:
        os.environ[RUN_ENV] = str(_join_run(name).path)
    await_frameworks()
    os.register_at_fork(after_in_child=leave_to_parent)
    os.environ[RANK_PID_ENV] = str(os.getpid())
    return begin_rank(sends_logs)


def load_ipython_extension(shell: Any) -> None:
    """Report a notebook, or IPython's prompt: ``%load_ext ftmon`` calls this.

    A cell with a backward, before any optimizer has stepped, is reported when it ends; later the steps are those of any
    loop.
    """
    probe = watch(name="notebook")
    if probe is None:
        return
    from ..hooks.torch import await_forward

    def begin(_info: Any = None) -> None:
        probe.begin_cell()
        if not probe.step:
            await_forward()

    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", probe.end_cell)


def _attach(target: Any, model: Any) -> None:
    events = switched_on()
    if events is None:
        return
    if hasattr(target, "is_gradient_accumulation_boundary"):
        from ..hooks.deepspeed import attach

        attach(target)
    if hasattr(target, "is_gradient_accumulation_boundary") or hasattr(target, "param_groups"):
        events.watch(target)
    elif target is not None:
        return
    if model is not None:
        events.trains("", model)


def _join_run(name: str) -> RunDir:
    """Join the run that another rank of this job has created, or create it and start its hub."""
    folder = checked_home() / "watch"
    make_private(folder.parent)
    make_private(folder)
    path = folder / hashlib.sha256(_job_key().encode()).hexdigest()[:16]
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = file.read().strip()
        if known and Path(known, "run.json").exists():
            return RunDir(known)
        run = create(name, list(sys.argv), "watch")
        file.truncate(0)
        file.write(str(run.path))
        with (run.logs / "hub.log").open("ab") as log:
            spawn_hub(run, log)
    return run


def _job_key() -> str:
    """Return a key of this process's job: equal for all its ranks on this host, and for no other job."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    # The ranks of one host are children of one launcher; a process without a launcher is a separate job.
    launcher = os.getppid() if "RANK" in os.environ else os.getpid()
    return f"{address}:{port}:{launcher}:{start_ticks(launcher)}"


if TYPE_CHECKING:
    from transformers import TrainerCallback as Callback
else:

    def __getattr__(name: str) -> Any:
        """Return ``Callback``, created on first access: importing ftmon does not import transformers."""
        if name == "Callback":
            return _watching_class()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _watching_class() -> Any:
    class Callback(callback_class()):
        """Reports a ``Trainer`` to ftmon, in a script that is started without ``ftmon run``."""

        def __init__(self, start: bool = True) -> None:
            # An empty name is that of the script.
            begin = lambda args: watch(None, name=str(getattr(args, "run_name", None) or ""))  # noqa: E731
            super().__init__(begin if start else None)

    return Callback
