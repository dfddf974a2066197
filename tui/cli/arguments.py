"""The command line's grammar. The only import is argparse.

Each command names its handler as ``module:function`` of this package; ``main`` imports it on demand.
"""

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ... import __version__
from ...protocol.run import end

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


# Types of command-line arguments: each parses one word, or raises ``ArgumentTypeError`` with the valid form.


def positive(text: str) -> int:
    """Parse a whole number of 1 or more."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more, not {text!r}")
    return number


_LONGEST = 100_000_000
"""Maximum sequence length in tokens."""


def lengths(text: str) -> list[int]:
    """Parse whole numbers of 1 or more, separated by commas, into a list without duplicates."""
    found = list(dict.fromkeys(positive(part) for part in text.split(",")))
    if max(found) > _LONGEST:
        raise argparse.ArgumentTypeError(f"must be {_LONGEST:,} tokens or less, not {max(found):,}")
    return found


def byte_size(text: str) -> int:
    """Parse a size with its unit, such as ``24GiB`` or ``80gb``, into bytes."""
    units = {"gib": 1 << 30, "mib": 1 << 20, "gb": 10**9, "mb": 10**6}
    unit = next((unit for unit in units if text.lower().endswith(unit)), "")
    try:
        size = int(float(text[: -len(unit)]) * units[unit]) if unit else 0
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 24GiB or 80GB, not {text!r}")
    return size


def seconds(text: str) -> float:
    """Parse finite seconds, more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0, not {text!r}")
    return number


def rank(text: str) -> int:
    """Parse a rank's number."""
    from ...protocol.messages.telemetry import MAX_RANKS  # not needed for the help

    if not text.isdecimal() or len(text) > len(str(MAX_RANKS)) or int(text) >= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"must be a rank's number, not {text!r}")
    return int(text)


def device(text: str) -> int:
    """Parse a device's number."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a device's number, not {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Return a whole number of 0 or more."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be a whole number of 0 or more, not {text!r}")
    return int(text)


def price(text: str) -> float:
    """Return a price above 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return found


def share(text: str) -> float:
    """Return a share between 0 and 1, given as ``3%`` or ``0.03``."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"must be a share such as 3% or 0.03, not {text!r}")
    return found


# Help of the whole ``ftmon`` command, with its commands grouped by purpose.


GROUPS = {
    "train": ("predict", "demo", "train", "resume", "sweep", "data", "chat"),
    "watch": ("run", "attach", "replay", "ls", "status", "logs"),
    "investigate": ("memory", "events", "oom", "snapshot", "capture", "stacks", "console", "report", "compare"),
    "end": ("stop", "kill", "release", "cleanup"),
    "set up": ("doctor", "keys", "completion"),
}
INTERNAL = ("relay",)
"""Commands that other commands run; help leaves them out."""


class GroupedParser(argparse.ArgumentParser):
    """A parser whose help lists its commands under ``GROUPS``."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        """Refuse an unknown command with a suggestion, instead of the list of all commands."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = [name for names in GROUPS.values() for name in names]
            near = get_close_matches(value, known, n=1, cutoff=0.7)
            meant = f"did you mean {near[0]}?" if near else "ftmon --help lists them"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {meant}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """Return usage, description, options, the groups of commands and the epilog."""
        helps: dict[str, str] = {}
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [OPTIONS] COMMAND ...", [], [])
        formatter.add_text(self.description)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                helps = {str(choice.dest): choice.help or "" for choice in action._choices_actions}
        for title, names in GROUPS.items():
            formatter.start_section(title)
            formatter.add_arguments([_Listed(name, helps[name]) for name in names])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class _Listed(argparse.Action):
    """A command as one line of the help."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(option_strings=[], dest=name, metavar=name, help=text)

    def __call__(self, *_: object) -> None:
        """Do nothing: a line of the help is not parsed."""


# Adds commands, and arguments that several commands share.


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


# The commands of the group "end" of ``ftmon --help``.


SIGNALS = ("INT", "TERM", "KILL")


def add_end(commands: "Commands") -> None:
    """Add the group's commands."""
    _stop(commands)
    _kill(commands)
    _release(commands)
    _cleanup(commands)


def _stop(commands: "Commands") -> None:
    stop = add_command(commands, "stop", "end:stop", "save a checkpoint and end the run after its current step")
    add_run(stop)


def _kill(commands: "Commands") -> None:
    kill = add_command(commands, "kill", "end:kill", "end a run, or some of its ranks, by signals")
    add_run(kill)
    kill.add_argument("--rank", type=rank, action="append", default=[], metavar="R", help="this rank only; repeatable")
    kill.add_argument("--signal", choices=SIGNALS, help="send only this signal (default: INT, then TERM, then KILL)")
    kill.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _release(commands: "Commands") -> None:
    release = add_command(commands, "release", "oom:release", "release ranks that are held at an out-of-memory error")
    add_run(release)
    release.add_argument(
        "--rank", type=rank, action="append", default=[], metavar="R", help="this rank (default: all held); repeatable"
    )


def _cleanup(commands: "Commands") -> None:
    cleanup = add_command(commands, "cleanup", "end:cleanup", "find and end processes that finished runs left behind")
    cleanup.add_argument("--yes", "-y", action="store_true", help="do not ask")
    cleanup.add_argument("--json", action="store_true", help="list what was found as JSON, and end nothing")
    cleanup.add_argument(
        "--elsewhere",
        action="store_true",
        help="include processes of other hosts' runs whose hub is not reachable from this host",
    )


# The commands of the group "investigate" of ``ftmon --help``.


def add_investigate(commands: "Commands") -> None:
    """Add the group's commands."""
    _memory(commands)
    _events(commands)
    _oom(commands)
    _snapshot(commands)
    _capture(commands)
    _stacks(commands)
    _console(commands)
    _report(commands)
    _compare(commands)


def _memory(commands: "Commands") -> None:
    memory = add_command(commands, "memory", "memory:show_memory", "show what the memory peak of a step consists of")
    memory.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    memory.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    memory.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _events(commands: "Commands") -> None:
    events = add_command(commands, "events", "memory:show_events", "print the allocator events of a run's ranks")
    events.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    events.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    events.add_argument("--follow", "-f", action="store_true", help="print new events until the run ends")
    events.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")


def _oom(commands: "Commands") -> None:
    oom = add_command(commands, "oom", "oom:show_oom", "explain an out-of-memory error, with remedies")
    oom.add_argument("target", metavar="RUN|FILE", help="a run, a recording, or a PyTorch memory snapshot")
    oom.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    oom.add_argument("--json", action="store_true", help="one JSON object for scripts (docs/protocol.md, oom_report)")


def _snapshot(commands: "Commands") -> None:
    snapshot = add_command(commands, "snapshot", "memory:explore", "open a PyTorch memory snapshot, or compare two")
    snapshot.add_argument("file", metavar="FILE", help="what torch.cuda.memory._dump_snapshot wrote, gzip or not")
    snapshot.add_argument("second", nargs="?", metavar="FILE2", help="a later snapshot: show the difference")
    printed = snapshot.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="one JSON object for scripts (docs/snapshot.md)")
    printed.add_argument("--text", action="store_true", help="lines of text, not the app")
    snapshot.add_argument("--device", type=device, metavar="D", help="this device only (default: all)")
    snapshot.add_argument(
        "--top", type=positive, default=20, metavar="N", help="stacks and blocks listed (default: 20)"
    )
    add_ascii(snapshot)


def _capture(commands: "Commands") -> None:
    capture = add_command(
        commands, "capture", "memory:capture", "capture memory snapshots of ranks and print their paths"
    )
    add_run(capture)
    capture.add_argument(
        "--rank", type=rank, action="append", default=[], metavar="R", help="this rank (default: all); repeatable"
    )


def _stacks(commands: "Commands") -> None:
    stacks = add_command(commands, "stacks", "oom:show_stacks", "show the Python stacks of a run's ranks")
    stacks.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    stacks.add_argument("--rank", type=rank, action="append", default=[], metavar="R", help="this rank; repeatable")
    stacks.add_argument("--all-threads", action="store_true", help="all threads, not only the training thread")
    stacks.add_argument(
        "--native", action="store_true", help="native frames too, where py-spy is installed and allowed"
    )
    stacks.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _console(commands: "Commands") -> None:
    console = add_command(commands, "console", "oom:console", "run Python in the failing frame of a held rank")
    add_run(console)
    console.add_argument("--rank", type=rank, required=True, metavar="R", help="a rank held at an out-of-memory error")
    console.add_argument(
        "-c", "--code", metavar="CODE", help="run this code and exit (default: read from standard input)"
    )


def _report(commands: "Commands") -> None:
    report = add_command(
        commands, "report", "report:show_report", "show runs, sweeps and CSV files as charts and tables"
    )
    report.epilog = (
        "Targets with the same axes share one chart. Exit status: 0, or 2 for wrong usage. Figures and the format of "
        "CSV files: docs/report.md."
    )
    report.add_argument(
        "targets", nargs="+", metavar="RUN|SWEEP|FILE.csv", help="runs, recordings, results of sweeps, CSV files"
    )
    report.add_argument("--html", metavar="FILE", help="write one HTML file that opens offline")
    report.add_argument("--svg", metavar="FILE", help="write the charts as one picture")
    report.add_argument("--png", metavar="FILE", help="the same as PNG, with the extra ftmon[png]")
    report.add_argument("--csv", metavar="FILE", help="write the rows, one per rank and phase")
    report.add_argument("--parquet", metavar="FILE", help="the same as Parquet, where pyarrow is installed")
    report.add_argument("--json", action="store_true", help="one JSON object for scripts: what is drawn")
    report.add_argument(
        "--columns",
        metavar="NAME=COLUMN,...",
        help="columns of CSV files: length=COLUMN and figures such as allocated=gpu_{rank}_mib; also rank, iteration, "
        "unit",
    )
    report.add_argument("--price", type=price, metavar="P", help="price of all GPUs together per hour, for costs")
    add_warm_up(report)
    add_ascii(report)


def _compare(commands: "Commands") -> None:
    compare = add_command(
        commands,
        "compare",
        "report:show_comparison",
        "compare two runs or sweeps, relative to their noise",
    )
    compare.epilog = (
        "The gate checks step time, the highest peak, reserved memory and loss. Exit status: 0, 1 if a regression "
        "exceeds the gate, 2 for wrong usage. Method: docs/report.md."
    )
    compare.add_argument("before", metavar="A", help="a run, a recording, or results of a sweep")
    compare.add_argument("after", metavar="B", help="another of the same kind")
    compare.add_argument(
        "--gate", type=share, metavar="SHARE", help="exit with status 1 on a larger regression, such as 3%%"
    )
    compare.add_argument("--json", action="store_true", help="one JSON object for scripts")
    add_warm_up(compare)


# The commands of the group "set up" of ``ftmon --help``.


SHELLS = ("bash", "zsh", "tcsh")


def add_set_up(commands: "Commands") -> None:
    """Add the group's commands."""
    _doctor(commands)
    _keys(commands)
    _completion(commands)


def _doctor(commands: "Commands") -> None:
    doctor = add_command(
        commands, "doctor", "set_up:doctor", "check what works on this machine, with fixes for the rest"
    )
    doctor.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _keys(commands: "Commands") -> None:
    keys = add_command(commands, "keys", "remote:manage_keys", "show and change which hosts may attach")
    keys.add_argument("--allow", metavar="KEY", help="allow this public key to attach")
    keys.add_argument("--remark", default="", metavar="TEXT", help="a note about the owner of the key")
    keys.add_argument("--remove", metavar="KEY", help="revoke this public key")


def _completion(commands: "Commands") -> None:
    completion = add_command(commands, "completion", "set_up:completion", "write a completion script for a shell")
    completion.add_argument("shell", choices=SHELLS)


# The commands of the group "train" of ``ftmon --help``.


def add_train(commands: "Commands") -> None:
    """Add the group's commands."""
    _predict(commands)
    _demo(commands)
    _train(commands)
    _resume(commands)
    _sweep(commands)
    _data(commands)
    _chat(commands)


def _predict(commands: "Commands") -> None:
    predict = add_command(
        commands,
        "predict",
        "train:predict",
        "predict the memory of a training step, without a GPU",
        usage="ftmon predict [options] CONFIG.yaml [key.sub=value ...] | --model M [options] | [options] -- COMMAND",
    )
    predict.set_defaults(command=[])
    predict.epilog = (
        "COMMAND starts a script: deepspeed, torchrun, accelerate launch or python. The script is run up to "
        "deepspeed.initialize. "
        "The allocator's settings are read from PYTORCH_ALLOC_CONF, or else PYTORCH_CUDA_ALLOC_CONF. Exit status: 0 "
        "predicted, 2 wrong usage or a configuration that cannot be used. Method and errors: docs/predict.md."
    )
    predict.add_argument(
        "config", nargs="?", metavar="CONFIG.yaml", help="the configuration that 'ftmon train' would run"
    )
    add_overrides(predict)
    predict.add_argument(
        "--ranks", type=positive, metavar="N", help="GPUs of the run (default: the configuration's, or 1)"
    )
    predict.add_argument(
        "--sequence-length", type=lengths, metavar="S[,S...]", help="in tokens (default: the configuration's, or 1024)"
    )
    script = predict.add_argument_group("with --model, or to change what '-- COMMAND' predicts")
    script.add_argument(
        "--model",
        metavar="FOLDER|NAME|FILE",
        help="a folder with config.json, a name on the Hugging Face Hub, or a file",
    )
    script.add_argument("--deepspeed", metavar="FILE", help="DeepSpeed's configuration (default: bf16, ZeRO stage 0)")
    script.add_argument(
        "--micro-batch", type=positive, metavar="B", help="sequences per GPU (default: the file's, or 1)"
    )
    script.add_argument(
        "--accumulation", type=positive, metavar="A", help="micro-steps per step (default: the file's, or 1)"
    )
    script.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, without use_reentrant")
    script.add_argument("--lora-rank", type=positive, metavar="R", help="LoRA on the linear layers, with peft")
    script.add_argument(
        "--optimizer",
        choices=("deepspeed", "torch"),
        help="use DeepSpeed's or PyTorch's AdamW instead of the configuration's",
    )
    predict.add_argument(
        "--capacity",
        type=byte_size,
        metavar="SIZE",
        help="memory that PyTorch may reserve on a GPU, such as 24GiB; reports whether the step fits",
    )
    predict.add_argument(
        "--data",
        action="store_true",
        help="also read CONFIG.yaml's data set and report which steps of an epoch do not fit",
    )
    predict.add_argument(
        "--largest",
        action="store_true",
        help="search the largest sequence length and micro-batch that fit each GPU, or --capacity (takes minutes)",
    )
    predict.add_argument(
        "--what-if",
        action="store_true",
        help="also predict changes of the configuration, the cheapest that fits first (takes minutes)",
    )
    predict.add_argument("--gpu", metavar="NAME", help="the kind of GPU, such as 'A100 80 GB' (default: H200)")
    predict.add_argument(
        "--price", type=price, metavar="P", help="price of a GPU hour in any currency, for the cost of tokens"
    )
    predict.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _demo(commands: "Commands") -> None:
    demo = add_command(commands, "demo", "train:demo", "fine-tune a small model and watch it")
    demo.add_argument(
        "--fault",
        metavar="KIND[:rank=R,step=S]",
        help="cause a real fault: spike, hang, slow, oom, crash or stop",
    )
    demo.add_argument("--steps", type=positive, metavar="N", help="optimizer steps to train")
    demo.add_argument(
        "--ranks", type=positive, metavar="N", help="how many ranks (default: every GPU, or 2 on the CPU)"
    )
    add_overrides(demo)
    _no_predict(demo)
    add_start_options(demo)


def _train(commands: "Commands") -> None:
    train = add_command(commands, "train", "train:train", "train with a configuration of your own, and watch it")
    train.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration")
    train.add_argument("--print-config", action="store_true", help="print a commented default configuration and exit")
    train.add_argument("--push", metavar="REPOSITORY", help="upload the final model to the Hugging Face Hub")
    add_overrides(train)
    _no_predict(train)
    add_start_options(train)


def _resume(commands: "Commands") -> None:
    resume = add_command(
        commands, "resume", "train:resume", "continue a run of 'ftmon train' from its newest complete checkpoint"
    )
    resume.epilog = (
        "The new run has the configuration of RUN with the given keys changed. A change with which training would "
        "not continue exactly is refused by name; checkpoint.allow=[NAME] accepts it (docs/training.md)."
    )
    add_run(resume)
    add_overrides(resume)
    _no_predict(resume)
    add_start_options(resume)


def _no_predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-predict", action="store_true", help="do not predict the run's memory in the background (GPU runs)"
    )


def _sweep(commands: "Commands") -> None:
    sweep = add_command(commands, "sweep", "train:sweep", "measure many configurations, each in a run of its own")
    sweep.epilog = (
        "Rows are kept in SWEEP.results.jsonl; the same command resumes an interrupted sweep. Exit status: 0 every run "
        "has a row, also failed ones; 1 the sweep ended early; 2 wrong usage or an invalid sweep file; 130 "
        "interrupted. Format of the sweep file: docs/sweep.md."
    )
    sweep.add_argument("sweep", metavar="SWEEP.yaml", help="what is varied, over which values, within which budget")
    sweep.add_argument("--output", metavar="FILE", help="file of the rows (default: SWEEP.results.jsonl beside it)")
    sweep.add_argument("--plan", action="store_true", help="print the planned runs with predictions, and exit")
    sweep.add_argument(
        "--fail-fast", action="store_true", help="run likely failures first, and end at the first failure"
    )
    sweep.add_argument("--json", action="store_true", help="one JSON object at the end; progress on standard error")
    sweep.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    add_ascii(sweep)


def _data(commands: "Commands") -> None:
    data = add_command(commands, "data", "train:check", "check what the model will see of the training data")
    parts = data.add_subparsers(metavar="ACTION", required=True)
    check = add_command(parts, "check", "train:check", "show tokens, labels, lengths and problems of the data")
    check.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    check.add_argument("--json", action="store_true", help="one JSON object for scripts")
    check.add_argument("--samples", type=positive, default=3, metavar="N", help="records to show (default: 3)")
    check.add_argument("--color", action="store_true", help="use colours even if the output is not a terminal")
    check.epilog = (
        "Exit status: 0 no problems, 1 problems found, 2 wrong usage or a configuration with which no training would "
        "start (such as an unusable chat template)."
    )
    add_overrides(check)


def _chat(commands: "Commands") -> None:
    chat = add_command(commands, "chat", "train:chat", "chat with a trained model, or with a checkpoint of a live run")
    chat.epilog = (
        "With piped standard input, each line is a separate message and each answer one line (line ends in it are "
        "written as \\n); --whole makes the entire input one message."
    )
    chat.add_argument(
        "target",
        metavar="MODEL|RUN",
        help="a model's folder, an output folder, a checkpoint, a run, or a name on the Hugging Face Hub",
    )
    chat.add_argument("--system", metavar="TEXT", help="the system prompt")
    chat.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: always the most likely token (default: the model's own, or 0.7)",
    )
    chat.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    chat.add_argument("--max-tokens", type=positive, metavar="N", help="maximum length of an answer (default: 512)")
    chat.add_argument("--seed", type=int, metavar="N", help="seed of the sampling, for reproducible answers")
    chat.add_argument("--device", choices=("auto", "cpu", "cuda"), help="auto: a GPU; for a checkpoint, the CPU")
    chat.add_argument("--whole", action="store_true", help="treat the entire piped input as one message")
    chat.add_argument("--debug", action="store_true", help="show the tokens that are sent and received")


# The commands of the group "watch" of ``ftmon --help``.


_RUN_EPILOG = (
    "Exit status: the training's own (128 + N if signal N killed it), or\n"
    + "\n".join(f"  {code}  {meaning}" for code, meaning in end.OWN.items())
    + """
Signals INT, TERM, HUP, USR1 and USR2 are forwarded to the training. Without the app the run ends with this command:
after SIGTERM, or when this command is killed, it has --stop-grace seconds, then it is killed. With --detach, or after
leaving the app, it keeps running."""
)


def add_watch(commands: "Commands") -> None:
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
        "train:run",
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
    attach = add_command(commands, "attach", "watch:attach", "watch a live run, with its whole history")
    add_run(attach, optional=True, more=", ssh://[USER@]HOST[:PORT][/RUN], or tcp://HOST:PORT (--listen)")
    attach.add_argument("--key", metavar="KEY|FILE", help="for tcp://: the hub's public key, or a file with it")
    add_view_options(attach)


def _relay(commands: "Commands") -> None:
    relay = add_command(
        commands,
        "relay",
        "remote:relay",
        "report a run's sockets and wait for its end (started by 'attach ssh://')",
    )
    add_run(relay, optional=True)


def _replay(commands: "Commands") -> None:
    replay = add_command(commands, "replay", "watch:replay", "replay a recording")
    replay.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    replay.add_argument("--plain", "--no-app", dest="plain", action="store_true", help="lines of text, not the app")
    add_ascii(replay)


def _ls(commands: "Commands") -> None:
    listing = add_command(commands, "ls", "watch:list_runs", "list live and recorded runs")
    listing.add_argument("runs", nargs="*", metavar="FILE|RUN", help="these runs only (default: all of this user)")
    listing.add_argument("--json", action="store_true", help="one JSON array for scripts")


def _status(commands: "Commands") -> None:
    status = add_command(commands, "status", "watch:show_status", "print the state of a run in a few lines")
    status.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    status.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _logs(commands: "Commands") -> None:
    logs = add_command(commands, "logs", "watch:show_logs", "print the output of a run's ranks")
    logs.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    logs.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    logs.add_argument("--text", default="", help="only lines that contain this text")
    logs.add_argument("--lines", "-n", type=positive, default=200, metavar="N", help="the last N lines (default: 200)")


_EPILOG = """\
RUN is a run's identifier or the beginning of one ('ftmon ls' lists them); 'ftmon attach' without it takes the newest
live run.
Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; of 'run', 'train', 'resume' and
'demo' the training's own, or one from 193 to 199 that says what ftmon did ('ftmon run --help' lists them)."""


_WITH_COMMAND = ("run", "predict")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split ``run [options] -- COMMAND ...`` at its first ``--``, and ``predict`` likewise.

    The command is None without such a split.
    """
    words = list(argv)
    name = next((word for word in words if not word.startswith("-")), "")  # global options have no values
    if name not in _WITH_COMMAND or "--" not in words[words.index(name) :]:
        return words, None
    cut = words.index("--", words.index(name))
    return words[:cut], words[cut + 1 :]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole ``ftmon`` command."""
    parser = GroupedParser(
        prog="ftmon",
        description="Train language models with DeepSpeed, and watch the memory, step times and ranks of any training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ftmon {__version__}")
    parser.add_argument("--ascii", action="store_true", help="draw in plain ASCII")
    parser.set_defaults(handler="watch:choose", parser=parser, plain=False, read_only=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for add in (add_train, add_watch, add_investigate, add_end, add_set_up):
        add(commands)
    return parser
