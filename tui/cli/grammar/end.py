"""The commands of the group "end" of ``ftmon --help``."""

from typing import TYPE_CHECKING

from .argument_types import rank
from .parts import add_command, add_run

if TYPE_CHECKING:
    from .parts import Commands

SIGNALS = ("INT", "TERM", "KILL")


def add(commands: "Commands") -> None:
    """Add the group's commands."""
    _stop(commands)
    _kill(commands)
    _release(commands)
    _cleanup(commands)


def _stop(commands: "Commands") -> None:
    stop = add_command(
        commands, "stop", "end.kill_stop:stop", "save a checkpoint and end the run after its current step"
    )
    add_run(stop)


def _kill(commands: "Commands") -> None:
    kill = add_command(commands, "kill", "end.kill_stop:kill", "end a run, or some of its ranks, by signals")
    add_run(kill)
    kill.add_argument("--rank", type=rank, action="append", default=[], metavar="R", help="this rank only; repeatable")
    kill.add_argument("--signal", choices=SIGNALS, help="send only this signal (default: INT, then TERM, then KILL)")
    kill.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _release(commands: "Commands") -> None:
    release = add_command(
        commands, "release", "investigate.console:release", "release ranks that are held at an out-of-memory error"
    )
    add_run(release)
    release.add_argument(
        "--rank", type=rank, action="append", default=[], metavar="R", help="this rank (default: all held); repeatable"
    )


def _cleanup(commands: "Commands") -> None:
    cleanup = add_command(
        commands, "cleanup", "end.cleanup:cleanup", "find and end processes that finished runs left behind"
    )
    cleanup.add_argument("--yes", "-y", action="store_true", help="do not ask")
    cleanup.add_argument("--json", action="store_true", help="list what was found as JSON, and end nothing")
    cleanup.add_argument(
        "--elsewhere",
        action="store_true",
        help="include processes of other hosts' runs whose hub is not reachable from this host",
    )
