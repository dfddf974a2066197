"""The command line's grammar, and nothing else: importing it costs argparse alone.

Each command names its handler as ``module:function`` of this package; ``main`` imports it when it is needed.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ... import __version__

SIGNALS = ("INT", "TERM", "KILL")
SHELLS = ("bash", "zsh", "tcsh")

_EPILOG = """\
RUN is a run's identifier or the beginning of one ('ftmon ls' lists them); without it, the newest live run.
Exit status: 0 done, 1 the run failed, 2 wrong usage or configuration, 3 it hung and --on-hang ended it, 4 its work was
done but it did not end and --exit-timeout ended it, 130 interrupted."""


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Cut ``run [options] -- COMMAND ...`` at its first ``--``; None for the command where there is no such cut."""
    words = list(argv)
    if "run" not in words or "--" not in words[words.index("run") :]:
        return words, None
    cut = words.index("--", words.index("run"))
    return words[:cut], words[cut + 1 :]


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of the whole ``ftmon`` command."""
    parser = argparse.ArgumentParser(
        prog="ftmon",
        description="Train language models with DeepSpeed, and watch the memory, step times and ranks of any training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ftmon {__version__}")
    parser.add_argument("--ascii", action="store_true", help="draw in plain ASCII")
    parser.set_defaults(handler="view:choose", plain=False, read_only=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_starting(commands)
    _add_looking(commands)
    _add_acting(commands)
    _add_helping(commands)
    return parser


if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _add_starting(commands: "Commands") -> None:
    demo = _command(commands, "demo", "start:demo", "fine-tune a small model here and now, and watch it")
    demo.add_argument(
        "--fault",
        metavar="KIND[:rank=R,step=S]",
        help="make a real fault happen: spike, hang, slow, oom, crash or stop",
    )
    demo.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps to train")
    demo.add_argument(
        "--ranks", type=_positive, metavar="N", help="how many ranks (default: every GPU, or 2 on the CPU)"
    )
    _overrides(demo)
    _start_options(demo)

    train = _command(commands, "train", "start:train", "train with a configuration of your own, and watch it")
    train.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration")
    train.add_argument("--print-config", action="store_true", help="write a commented default configuration and end")
    _overrides(train)
    _start_options(train)

    run = _command(
        commands,
        "run",
        "start:run",
        "watch a training script that knows nothing of ftmon",
        usage="ftmon run [options] -- COMMAND ...",
    )
    run.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: deepspeed train.py")
    run.add_argument(
        "--join", metavar="FILE|RUN", help="be a part of a run begun on another host: its join.json, or its name"
    )
    run.add_argument("--no-logs", action="store_true", help="leave the ranks' output where the script sends it")
    _start_options(run)


def _add_looking(commands: "Commands") -> None:
    attach = _command(commands, "attach", "view:attach", "watch a run that is on, with its whole history")
    _run_argument(attach, optional=True, more=", ssh://[USER@]HOST[:PORT][/RUN], or tcp://HOST:PORT (--listen)")
    attach.add_argument("--key", metavar="KEY|FILE", help="for tcp://: the hub's public key, or a file that holds it")
    _view_options(attach)

    relay = _command(commands, "relay", "relay:relay", "pass a run on over stdin and stdout ('attach ssh://' runs it)")
    _run_argument(relay, optional=True)

    listing = _command(commands, "ls", "runs:list_runs", "list live and recorded runs")
    listing.add_argument("--json", action="store_true", help="one JSON array for scripts")

    status = _command(commands, "status", "status:show_status", "tell how a run stands, in a few lines")
    _run_argument(status)
    status.add_argument("--json", action="store_true", help="one JSON object for scripts")

    logs = _command(commands, "logs", "logs:show_logs", "print what the ranks of a run printed")
    logs.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    logs.add_argument("--rank", type=_rank, metavar="R", help="of this rank only")
    logs.add_argument("--text", default="", help="only lines that contain it")
    logs.add_argument("--lines", "-n", type=_positive, default=200, metavar="N", help="the last N (default: 200)")

    memory = _command(commands, "memory", "memory:show_memory", "tell where the memory of a step's peak goes")
    memory.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    memory.add_argument("--rank", type=_rank, metavar="R", help="this rank only (default: all)")
    memory.add_argument("--json", action="store_true", help="one JSON object for scripts")

    events = _command(commands, "events", "events:show_events", "print what the CUDA allocators of a run do")
    events.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    events.add_argument("--rank", type=_rank, metavar="R", help="this rank only (default: all)")
    events.add_argument("--follow", "-f", action="store_true", help="go on as they come, until the run ends")
    events.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")

    oom = _command(commands, "oom", "oom:show_oom", "tell why an allocation failed for want of memory, and what to try")
    oom.add_argument("target", metavar="RUN|FILE", help="a run, a recording, or a PyTorch memory snapshot")
    oom.add_argument("--rank", type=_rank, metavar="R", help="of this rank only")
    oom.add_argument("--json", action="store_true", help="one JSON object for scripts (docs/protocol.md, oom_report)")

    replay = _command(commands, "replay", "view:replay", "play a recording")
    replay.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    replay.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="print what happened as lines")
    _ascii_option(replay)

    snapshot = _command(commands, "snapshot", "snapshot:explore", "open a PyTorch memory snapshot, or compare two")
    snapshot.add_argument("file", metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote, gzip or not")
    snapshot.add_argument("second", nargs="?", metavar="FILE2", help="a later one: show what it has more and less")
    printed = snapshot.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="one JSON object for scripts (docs/snapshot.md)")
    printed.add_argument("--text", action="store_true", help="lines of text, not the app")
    snapshot.add_argument("--device", type=_device, metavar="D", help="this device only (default: all)")
    snapshot.add_argument(
        "--top", type=_positive, default=20, metavar="N", help="stacks and blocks listed (default: 20)"
    )
    _ascii_option(snapshot)


def _add_acting(commands: "Commands") -> None:
    kill = _command(commands, "kill", "act:kill", "end a run, or some of its ranks, with signals")
    _run_argument(kill)
    kill.add_argument(
        "--rank", type=_rank, action="append", default=[], metavar="R", help="this rank only; may be repeated"
    )
    kill.add_argument("--signal", choices=SIGNALS, help="send this one only (default: INT, TERM, KILL in steps)")
    kill.add_argument("--yes", "-y", action="store_true", help="do not ask")

    stacks = _command(commands, "stacks", "stacks:show_stacks", "show where the ranks of a run are, line by line")
    _run_argument(stacks)
    stacks.add_argument(
        "--rank", type=_rank, action="append", default=[], metavar="R", help="this rank; may be repeated"
    )
    stacks.add_argument("--all-threads", action="store_true", help="all threads, not only the one that trains")
    stacks.add_argument(
        "--native", action="store_true", help="native frames too, where py-spy is installed and allowed"
    )
    stacks.add_argument("--json", action="store_true", help="one JSON object for scripts")

    cleanup = _command(commands, "cleanup", "cleanup:cleanup", "find and end what runs that are over left running here")
    cleanup.add_argument("--yes", "-y", action="store_true", help="do not ask")
    cleanup.add_argument("--json", action="store_true", help="list what was found as JSON, and end nothing")
    cleanup.add_argument(
        "--elsewhere", action="store_true", help="also what is of other hosts' runs whose hub does not answer from here"
    )

    stop = _command(commands, "stop", "act:stop", "let a run save a checkpoint and end after the step it is in")
    _run_argument(stop)

    release = _command(commands, "release", "console:release", "let ranks go that are held at an out-of-memory error")
    _run_argument(release)
    release.add_argument(
        "--rank", type=_rank, action="append", default=[], metavar="R", help="this rank (default: all held); repeatable"
    )

    console = _command(commands, "console", "console:console", "run Python in the failing frame of a rank that is held")
    _run_argument(console)
    console.add_argument("--rank", type=_rank, required=True, metavar="R", help="the rank that is held")
    console.add_argument("-c", "--code", metavar="CODE", help="run this and end (default: read what to run)")

    take = _command(commands, "take", "take:take", "have ranks write a PyTorch memory snapshot, and print its path")
    _run_argument(take)
    take.add_argument(
        "--rank", type=_rank, action="append", default=[], metavar="R", help="of this rank (default: all); repeatable"
    )


def _add_helping(commands: "Commands") -> None:
    doctor = _command(commands, "doctor", "doctor:doctor", "say what works on this machine, and how to mend the rest")
    doctor.add_argument("--json", action="store_true", help="one JSON object for scripts")

    keys = _command(commands, "keys", "remote:manage_keys", "show and change who may attach from other hosts")
    keys.add_argument("--allow", metavar="KEY", help="let this public key in")
    keys.add_argument("--remark", default="", metavar="TEXT", help="whose it is, to remember")
    keys.add_argument("--remove", metavar="KEY", help="let this public key in no more")

    completion = _command(commands, "completion", "complete:completion", "write a completion script for a shell")
    completion.add_argument("shell", choices=SHELLS)


def _command(
    commands: "Commands",
    name: str,
    handler: str,
    summary: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name, help=summary, description=summary[0].upper() + summary[1:] + ".", usage=usage, allow_abbrev=False
    )
    parser.set_defaults(handler=handler)
    return parser


def _run_argument(parser: argparse.ArgumentParser, *, optional: bool = False, more: str = "") -> None:
    parser.add_argument(
        "run", nargs="?" if optional else None, metavar="RUN", help=f"a run's identifier or its beginning{more}"
    )


def _overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key.sub=value", help="set a key of the configuration"
    )


def _start_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", help="what the run is called")
    parser.add_argument("--listen", metavar="HOST:PORT", help="also let other hosts attach, encrypted and by key")
    parser.add_argument("--no-allocator-events", action="store_true", help="do not sample the allocator's own trace")
    parser.add_argument("--detach", action="store_true", help="start it and return at once")
    parser.add_argument(
        "--on-oom",
        choices=("raise", "hold"),
        default="raise",
        help="hold: a rank waits in the frame in which an allocation failed until it is released. The other ranks wait "
        "in their next collective, and give up after their process group's timeout (NCCL 10 min, gloo 30 min, "
        "DeepSpeed 10 min, or what the script sets)",
    )
    parser.add_argument(
        "--allow-console", action="store_true", help="let 'ftmon console' run Python in a rank that is held"
    )
    parser.add_argument(
        "--hold-timeout", type=_seconds, metavar="SECONDS", help="let go by itself after so long (default: never)"
    )
    _hang_options(parser)
    _view_options(parser)


def _hang_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on-hang",
        choices=("warn", "stacks", "stop", "kill"),
        default="warn",
        help="what to do about a hang that has stood for --hang-grace: an alert alone (default); write all stacks to a "
        "file too; then interrupt the ranks, and kill what has not ended a minute later; or kill. Ends with status 3",
    )
    parser.add_argument(
        "--hang-grace", type=_seconds, metavar="SECONDS", help="how long a hang must have stood (default: 30)"
    )
    parser.add_argument(
        "--exit-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="once a rank has finished, kill the rest after so long without progress (default: never). Ends with "
        "status 4",
    )


def _view_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    parser.add_argument("--read-only", action="store_true", help="watch only: no stop and no kill from here")
    _ascii_option(parser)


def _ascii_option(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: a default here would overwrite `ftmon --ascii attach`.
    parser.add_argument(
        "--ascii", action="store_true", default=argparse.SUPPRESS, help="draw with ASCII characters only"
    )


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, not {text!r}")
    return seconds


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a rank's number, not {text!r}")
    return int(text)


def _device(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a device's number, not {text!r}")
    return int(text)
