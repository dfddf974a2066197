"""Adds commands, and arguments that several commands share."""

import argparse
from typing import TYPE_CHECKING

from .argument_types import seconds, whole

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_command(
    commands: "Commands",
    name: str,
    handler: str,
    summary: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command; ``handler`` is ``module:function`` of ``tui.cli``, imported when it is run."""
    parser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", usage=usage, allow_abbrev=False
    )
    parser.set_defaults(handler=handler, parser=parser)
    return parser


def add_run(parser: argparse.ArgumentParser, *, optional: bool = False, more: str = "") -> None:
    """Add the positional argument ``RUN``."""
    parser.add_argument(
        "run", nargs="?" if optional else None, metavar="RUN", help=f"a run's identifier or its beginning{more}"
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add assignments to keys of the configuration."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="set a key of the configuration"
    )


def add_start_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command that starts a run."""
    parser.add_argument("--name", help="name of the run")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also let other hosts attach, encrypted and by key")
    parser.add_argument("--no-allocator-events", action="store_true", help="do not sample the allocator's own trace")
    parser.add_argument("--detach", action="store_true", help="start the run and return at once")
    parser.add_argument(
        "--on-oom",
        choices=("raise", "hold"),
        default="raise",
        help="hold: a rank waits in the frame in which an allocation failed until it is released. The other ranks wait "
        "in their next collective, and fail after their process group's timeout (NCCL 10 min, gloo 30 min, "
        "DeepSpeed 10 min, or what the script sets)",
    )
    parser.add_argument(
        "--allow-console", action="store_true", help="allow 'ftmon console' to run Python in a held rank"
    )
    parser.add_argument(
        "--hold-timeout",
        type=seconds,
        metavar="SECONDS",
        help="release a held rank after this long (default: never)",
    )
    _add_hang_options(parser)
    _add_notify_options(parser)
    parser.add_argument(
        "--stop-grace",
        type=seconds,
        metavar="SECONDS",
        help="time for the run to end after SIGTERM, or after this command was killed, before it is killed "
        "(default: 30)",
    )
    add_view_options(parser, starts=True)


def _add_hang_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-hang",
        choices=("warn", "stacks", "stop", "kill"),
        default="warn",
        help="action on a hang that has lasted --hang-grace. warn: only the alert (default); stacks: also write all "
        "stacks to a file; stop: also interrupt the ranks, and kill the rest a minute later; kill: also kill. stop and "
        "kill end with status 193",
    )
    parser.add_argument(
        "--hang-grace", type=seconds, metavar="SECONDS", help="how long a hang must stand after its alert (default: 30)"
    )
    parser.add_argument(
        "--exit-timeout",
        type=seconds,
        metavar="SECONDS",
        help="once a rank has finished, kill the others after this long without progress (default: never). Ends with "
        "status 194",
    )


def _add_notify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--notify",
        action="append",
        default=[],
        metavar="TARGET",
        help="send notifications of the run's events to a webhook's URL, a shell command (JSON on its standard "
        "input), 'desktop', or 'terminal' for the terminal that shows the run; repeatable",
    )
    parser.add_argument(
        "--notify-on", metavar="EVENTS", help="events to notify of: any of finish,failure,hang,oom,nan (default: all)"
    )


_WATCH_ONLY = "watch only: this app cannot stop or kill"
_ACT_NOT = "the run's hub refuses stop, kill and every other action, from anyone, until the run ends"


def add_view_options(parser: argparse.ArgumentParser, *, starts: bool = False) -> None:
    """Add the options of every command that shows a live run; ``starts``: whether it also starts that run."""
    parser.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    parser.add_argument("--read-only", action="store_true", help=_ACT_NOT if starts else _WATCH_ONLY)
    add_ascii(parser)


def add_ascii(parser: argparse.ArgumentParser) -> None:
    """Add ``--ascii``."""
    # SUPPRESS: a default here would overwrite `ftmon --ascii attach`.
    parser.add_argument(
        "--ascii", action="store_true", default=argparse.SUPPRESS, help="draw with ASCII characters only"
    )


def add_warm_up(parser: argparse.ArgumentParser) -> None:
    """Add ``--warm-up``."""
    parser.add_argument(
        "--warm-up",
        type=whole,
        default=5,
        metavar="N",
        help="ignore the first N steps of a run (default: 5)",
    )
