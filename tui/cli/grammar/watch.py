"""The commands of the group "watch" of ``ftmon --help``."""

import argparse
from typing import TYPE_CHECKING

from ....protocol.run import exits
from .argument_types import positive, rank
from .parts import add_ascii, add_command, add_run, add_start_options, add_view_options

if TYPE_CHECKING:
    from .parts import Commands

_RUN_EPILOG = (
    "Exit status: the training's own (128 + N if signal N killed it), or\n"
    + "\n".join(f"  {code}  {meaning}" for code, meaning in exits.OWN.items())
    + """
Signals INT, TERM, HUP, USR1 and USR2 are forwarded to the training. Without the app the run ends with this command:
after SIGTERM, or when this command is killed, it has --stop-grace seconds, then it is killed. With --detach, or after
leaving the app, it keeps running."""
)


def add(commands: "Commands") -> None:
    """Add the group's commands."""
    _run(commands)
    _attach(commands)
    _relay(commands)
    _replay(commands)
    _ls(commands)
    _status(commands)
    _logs(commands)


def _run(commands: "Commands") -> None:
    run = add_command(
        commands,
        "run",
        "train.start:run",
        "run an unmodified training script and watch it",
        usage="ftmon run [options] -- COMMAND ...",
    )
    run.epilog, run.formatter_class = _RUN_EPILOG, argparse.RawDescriptionHelpFormatter
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: deepspeed train.py")
    run.add_argument(
        "--join", metavar="FILE|RUN", help="join a run that was started on another host: its join.json, or its name"
    )
    run.add_argument("--no-logs", action="store_true", help="do not redirect the ranks' output")
    add_start_options(run)


def _attach(commands: "Commands") -> None:
    attach = add_command(commands, "attach", "watch.attach:attach", "watch a live run, with its whole history")
    add_run(attach, optional=True, more=", ssh://[USER@]HOST[:PORT][/RUN], or tcp://HOST:PORT (--listen)")
    attach.add_argument("--key", metavar="KEY|FILE", help="for tcp://: the hub's public key, or a file with it")
    add_view_options(attach)


def _relay(commands: "Commands") -> None:
    relay = add_command(
        commands,
        "relay",
        "watch.relay:relay",
        "report a run's sockets and wait for its end (started by 'attach ssh://')",
    )
    add_run(relay, optional=True)


def _replay(commands: "Commands") -> None:
    replay = add_command(commands, "replay", "watch.attach:replay", "replay a recording")
    replay.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    replay.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    add_ascii(replay)


def _ls(commands: "Commands") -> None:
    listing = add_command(commands, "ls", "watch.runs:list_runs", "list live and recorded runs")
    listing.add_argument("runs", nargs="*", metavar="FILE|RUN", help="these runs only (default: all of this user)")
    listing.add_argument("--json", action="store_true", help="one JSON array for scripts")


def _status(commands: "Commands") -> None:
    status = add_command(commands, "status", "watch.status:show_status", "print the state of a run in a few lines")
    status.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    status.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _logs(commands: "Commands") -> None:
    logs = add_command(commands, "logs", "watch.logs:show_logs", "print the output of a run's ranks")
    logs.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    logs.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    logs.add_argument("--text", default="", help="only lines that contain this text")
    logs.add_argument("--lines", "-n", type=positive, default=200, metavar="N", help="the last N lines (default: 200)")
