"""``ftmon kill``, ``stop`` and ``cleanup``: end a run, some of its ranks, or what earlier runs left behind."""

import subprocess
import sys
from argparse import Namespace

from ...protocol.errors import FtmonError
from ...protocol.messages import control
from ...protocol.run import rundir
from ...protocol.run.rundir import RunDir
from .access import ask, living_hub, wait_for_end, words_of


def cleanup(arguments: Namespace) -> int:
    """Run the trainer's clean-up, which asks on this terminal; return its status."""
    words = words_of(arguments, ("yes", "json", "elsewhere"))
    return subprocess.run(
        [sys.executable, "-P", "-m", "ftmon.trainer.host.end.cleanup", *words], check=False
    ).returncode


_WRITTEN_SECONDS = 10.0


def kill(arguments: Namespace) -> int:
    """End a run, or some of its ranks; return 0 only if all their processes have ended."""
    run = rundir.find(arguments.run)
    if _is_over(run):
        print(f"{run.id} has ended already; no process of it is left")
        return 0
    if not _confirmed(run, arguments):
        print("nothing was killed")
        return 1
    return _act(run, control.Kill(sorted(set(arguments.rank)), arguments.signal or ""))


def stop(arguments: Namespace) -> int:
    """Make a run save a checkpoint and end after its step; a foreign script receives INT."""
    run = rundir.find(arguments.run)
    if _is_over(run):
        print(f"{run.id} has ended already")
        return 0
    return _act(run, control.Stop())


def _is_over(run: RunDir) -> bool:
    return run.read_exit() is not None


def _confirmed(run: RunDir, arguments: Namespace) -> bool:
    if arguments.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    ranks = ", ".join(map(str, sorted(set(arguments.rank))))
    target = f"rank{'s' if len(set(arguments.rank)) > 1 else ''} {ranks} of {run.id}" if ranks else f"all of {run.id}"
    steps = arguments.signal or "INT, TERM and KILL in steps"
    print(f"This sends {steps} to {target}, dataloader workers included.", file=sys.stderr)
    if ranks:
        print("DeepSpeed ends the whole node when one rank dies.", file=sys.stderr)
    print("Kill? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _act(run: RunDir, verb: control.Verb) -> int:
    try:
        result = ask(living_hub(run), verb, on_accepted=lambda text: print(text or "accepted", flush=True))
    except FtmonError:
        if not _is_over(run):  # the run may have ended meanwhile
            raise
        print(f"{run.id} has ended")
        return 0
    print(result.text)
    if result.ok and isinstance(verb, control.Kill) and not verb.ranks:
        wait_for_end(run, _WRITTEN_SECONDS)  # so that the next command sees that it is over
    return 0 if result.ok else 1
