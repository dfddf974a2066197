"""The command line's grammar. The only import is argparse.

Each command names its handler as ``module:function`` of this package; ``main`` imports it on demand.
"""

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import __version__
from ...protocol.run import exits
from ...protocol.run.targets import REPORT_TARGETS, TRACKERS

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def _whole_number(least: int, what: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal()) or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")
        return int(text)

    return parse


positive = _whole_number(1, "a whole number of 1 or more")
whole = _whole_number(0, "a whole number of 0 or more")
device = _whole_number(0, "a device's number")


_LONGEST = 100_000_000  # maximum sequence length in tokens


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


def budget(text: str) -> float:
    """Convert a percentage, 0 to 100."""
    try:
        percent = float(text)
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"must be a percentage, 0 to 100, not {text!r}")
    return percent


def _above_zero(what: str, *, below: float = float("inf"), percent: bool = False) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text.removesuffix("%")) / 100 if percent and text.endswith("%") else float(text)
        except ValueError:
            number = -1.0
        if not 0 < number < below:
            raise argparse.ArgumentTypeError(f"must be {what}, not {text!r}")
        return number

    return parse


seconds = _above_zero("seconds, more than 0")
price = _above_zero("a number above 0")
share = _above_zero("a share such as 3% or 0.03", below=1, percent=True)


def rank(text: str) -> int:
    """Parse a rank's number."""
    from ...protocol.messages.telemetry import MAX_RANKS  # not needed for the help

    if not text.isdecimal() or len(text) > len(str(MAX_RANKS)) or int(text) >= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"must be a rank's number, not {text!r}")
    return int(text)


ENGINES = ("local", "slurm", "ray", "submitit")  # of `trainer.sweep.engines`
EXPORT_FORMATS = ("parquet", "arrow", "csv", "perfetto", "memory_viz", "flamegraph", *TRACKERS)
SERIES = ("steps", "phases", "evaluations", "alerts", "devices")  # of `protocol.recording.series`

INTERNAL = ("relay",)


class GroupedParser(argparse.ArgumentParser):
    """A parser whose help lists its commands under the titles of ``COMMANDS``."""

    def _check_value(self, action: argparse.Action, value: str) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            known = [name for name in action.choices if name not in INTERNAL]
            near = get_close_matches(value, known, n=1, cutoff=0.7)
            meant = f"did you mean {near[0]}?" if near else "ftmon --help lists them"
            raise argparse.ArgumentError(None, f"there is no command {value!r}; {meant}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """Return usage, description, options, the groups of commands and the epilog."""
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [OPTIONS] COMMAND ...", [], [])
        formatter.add_text(self.description)
        (subparsers,) = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        listed = {choice.dest: choice for choice in subparsers._choices_actions}
        options = [action for action in self._actions if action.option_strings]
        sections = {
            title: [listed[each.name] for each in commands if each.name not in INTERNAL]
            for title, commands in COMMANDS.items()
        }
        for title, actions in {**sections, "options": options}.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


class Argument(NamedTuple):
    """One call of ``argparse``'s ``add_argument``."""

    names: tuple[str, ...]
    options: dict[str, Any]
    group: str = ""  # title of the group in the help, `EXCLUSIVE` for options that exclude each other; empty: none


EXCLUSIVE = "exclusive"


def argument(names: str, metavar: str | None, text: str | None, *, group: str = "", **options: Any) -> Argument:
    """Declare an argument; ``names``: its names, separated by blanks; ``options``: others of ``add_argument``."""
    return Argument(tuple(names.split()), {"metavar": metavar, "help": text, **options}, group)


def flag(names: str, text: str, *, group: str = "", **options: Any) -> Argument:
    """Declare an option without a value."""
    return Argument(tuple(names.split()), {"action": "store_true", "help": text, **options}, group)


class Command(NamedTuple):
    """A command; ``handler`` is ``module:function`` of ``tui.cli``, imported when it is run."""

    name: str
    handler: str
    summary: str
    arguments: tuple[Argument, ...]
    options: dict[str, Any]  # of its parser
    action: "Command | None" = None  # a command of this command, which then has no arguments of its own

    def add_to(self, commands: "Commands") -> None:
        """Add the command's parser."""
        description = self.summary[0].upper() + self.summary[1:] + "."
        texts = {"help": self.summary, "description": description}
        parser = commands.add_parser(self.name, **texts, allow_abbrev=False, **self.options)
        parser.set_defaults(handler=self.handler, parser=parser)
        for group, arguments in groupby(self.arguments, lambda each: each.group):
            container: argparse._ActionsContainer = parser
            if group:
                exclusive = group == EXCLUSIVE
                container = parser.add_mutually_exclusive_group() if exclusive else parser.add_argument_group(group)
            for names, options, _ in arguments:
                container.add_argument(*names, **options)
        if self.action is not None:
            self.action.add_to(parser.add_subparsers(metavar="ACTION", required=True))


def command(name: str, handler: str, summary: str, *arguments: Argument, **options: Any) -> Command:
    """Declare a command; ``options``: of its parser."""
    return Command(name, handler, summary, arguments, options)


def run_argument(more: str = "", **options: Any) -> Argument:
    """Declare the positional argument ``RUN``; ``more``: what else it may be."""
    return argument("run", "RUN", f"a run's identifier or its beginning{more}", **options)


def json_flag(text: str = "one JSON object for scripts", **options: Any) -> Argument:
    """Declare ``--json``."""
    return flag("--json", text, **options)


def ranks_option(text: str) -> Argument:
    """Declare a repeatable ``--rank``."""
    return argument("--rank", "R", f"{text}; repeatable", type=rank, action="append", default=[])


RUN = run_argument()
FILE_OR_RUN = argument("run", "FILE|RUN", "a recording.sqlite, a run directory, or a run")
JSON = json_flag()
RANK = argument("--rank", "R", "this rank only (default: all)", type=rank)
YES = flag("--yes -y", "do not ask")
PLAIN = flag("--plain --no-app", "lines of text, not the app", dest="plain")
# SUPPRESS: a default here would overwrite `ftmon --ascii attach`.
ASCII = flag("--ascii", "draw with ASCII characters only", default=argparse.SUPPRESS)
WARM_UP = argument("--warm-up", "N", "ignore the first N steps of a run (default: 5)", type=whole, default=5)
PRICE = argument("--price", "P", "price of one GPU for one hour, any currency: costs are hours x GPUs x P", type=price)
OVERRIDES = argument("overrides", "key.sub=value", "set a key of the configuration", nargs="*", default=[])
START_OPTIONS = (
    argument("--name", None, "name of the run"),
    argument("--listen", "HOST:PORT", "also let other hosts attach, encrypted and by key"),
    argument(
        "--metrics",
        "[HOST:]PORT|FILE.prom",
        "serve the run's figures to Prometheus (without HOST, to this host only), or write them for node_exporter",
    ),
    argument(
        "--report-to",
        "TARGET[,TARGET...]",
        f"send the run to other systems, beside the training: {', '.join(REPORT_TARGETS)}",
    ),
    flag("--no-allocator-events", "do not sample the allocator's own trace"),
    argument(
        "--probe-budget",
        "PERCENT",
        "of a step's time that watching may cost the training thread (default: 0.5); where it costs more, memory is "
        "read by phase in 1 of k steps. 0: in every step",
        type=budget,
    ),
    flag("--detach", "start the run and return at once"),
    argument(
        "--on-oom",
        None,
        "hold: a rank waits in the frame in which an allocation failed until it is released. The other ranks wait "
        "in their next collective, and fail after their process group's timeout (NCCL 10 min, gloo 30 min, "
        "DeepSpeed 10 min, or what the script sets)",
        choices=("raise", "hold"),
        default="raise",
    ),
    flag("--allow-console", "allow 'ftmon console' to run Python in a held rank"),
    argument("--hold-timeout", "SECONDS", "release a held rank after this long (default: never)", type=seconds),
    argument(
        "--on-hang",
        None,
        "action on a hang that has lasted --hang-grace. warn: only the alert (default); stacks: also write all "
        "stacks to a file; stop: also interrupt the ranks, and kill the rest a minute later; kill: also kill. stop and "
        "kill end with status 193",
        choices=("warn", "stacks", "stop", "kill"),
        default="warn",
    ),
    argument("--hang-grace", "SECONDS", "how long a hang must stand after its alert (default: 30)", type=seconds),
    argument(
        "--exit-timeout",
        "SECONDS",
        "once a rank has finished, kill the others after this long without progress (default: never). Ends with "
        "status 194",
        type=seconds,
    ),
    argument(
        "--notify",
        "TARGET",
        "send notifications of the run's events to a webhook's URL, a shell command (JSON on its standard "
        "input), 'desktop', or 'terminal' for the terminal that shows the run; repeatable",
        action="append",
        default=[],
    ),
    argument("--notify-on", "EVENTS", "events to notify of: any of finish,failure,hang,oom,nan (default: all)"),
    argument(
        "--stop-grace",
        "SECONDS",
        "time for the run to end after SIGTERM, or after this command was killed, before it is killed (default: 30)",
        type=seconds,
    ),
    PLAIN,
    flag("--read-only", "the run's hub refuses stop, kill and every other action, from anyone, until the run ends"),
    ASCII,
)
"""Options of every command that starts a run."""
SIGNALS = ("INT", "TERM", "KILL")
SHELLS = ("bash", "zsh", "tcsh")
_NO_PREDICT = flag("--no-predict", "do not predict the run's memory in the background (GPU runs)")
_SCRIPT = "with --model, or to change what '-- COMMAND' predicts"
_CHECK = command(
    "check",
    "train:check",
    "show tokens, labels, lengths and problems of the data",
    argument("config", "CONFIG.yaml", "the run's configuration"),
    JSON,
    argument("--samples", "N", "records to show (default: 3)", type=positive, default=3),
    flag("--color", "use colours even if the output is not a terminal"),
    OVERRIDES,
    epilog="Exit status: 0 no problems, 1 problems found, 2 wrong usage or a configuration with which no training "
    "would start (such as an unusable chat template).",
)
_TRAIN = (
    command(
        "predict",
        "train:predict",
        "predict the memory of a training step, without a GPU",
        argument("config", "CONFIG.yaml", "the configuration that 'ftmon train' would run", nargs="?"),
        OVERRIDES,
        argument("--ranks", "N", "GPUs of the run (default: the configuration's, or 1)", type=positive),
        argument("--sequence-length", "S[,S...]", "in tokens (default: the configuration's, or 1024)", type=lengths),
        argument(
            "--model",
            "FOLDER|NAME|FILE",
            "a folder with config.json, a name on the Hugging Face Hub, or a file",
            group=_SCRIPT,
        ),
        argument("--deepspeed", "FILE", "DeepSpeed's configuration (default: bf16, ZeRO stage 0)", group=_SCRIPT),
        argument("--micro-batch", "B", "sequences per GPU (default: the file's, or 1)", type=positive, group=_SCRIPT),
        argument(
            "--accumulation", "A", "micro-steps per step (default: the file's, or 1)", type=positive, group=_SCRIPT
        ),
        flag("--checkpointing", "gradient checkpointing, without use_reentrant", group=_SCRIPT),
        argument("--lora-rank", "R", "LoRA on the linear layers, with peft", type=positive, group=_SCRIPT),
        argument(
            "--optimizer",
            None,
            "use DeepSpeed's or PyTorch's AdamW instead of the configuration's",
            choices=("deepspeed", "torch"),
            group=_SCRIPT,
        ),
        argument(
            "--capacity",
            "SIZE",
            "memory that PyTorch may reserve on a GPU, such as 24GiB; reports whether the step fits",
            type=byte_size,
        ),
        flag("--data", "also read CONFIG.yaml's data set and report which steps of an epoch do not fit"),
        flag(
            "--largest",
            "search the largest sequence length and micro-batch that fit each GPU, or --capacity (takes minutes)",
        ),
        flag("--what-if", "also predict changes of the configuration, the fastest that fits first"),
        flag("--explain", "also show each part of the memory as a sum made by hand, beside the predicted figure"),
        argument("--run", None, "with --explain: this run's configuration, and its measured figures"),
        argument("--gpu", "NAME", "the kind of GPU, such as 'A100 80 GB' (default: H200)"),
        PRICE,
        JSON,
        usage="ftmon predict [options] CONFIG.yaml [key.sub=value ...] | --model M [options] | [options] -- COMMAND",
        epilog="COMMAND starts a script: deepspeed, torchrun or python. The script is run up to "
        "deepspeed.initialize. "
        "The allocator's settings are read from PYTORCH_ALLOC_CONF, or else PYTORCH_CUDA_ALLOC_CONF. Exit status: 0 "
        "predicted, 2 wrong usage or a configuration that cannot be used. Method and errors: docs/predict.md.",
    ),
    command(
        "demo",
        "train:demo",
        "fine-tune a small model and watch it",
        argument("--fault", "KIND[:rank=R,step=S]", "cause a real fault: spike, hang, slow, oom, crash or stop"),
        argument("--steps", "N", "optimizer steps to train", type=positive),
        argument("--ranks", "N", "how many ranks (default: every GPU, or 2 on the CPU)", type=positive),
        OVERRIDES,
        _NO_PREDICT,
        *START_OPTIONS,
    ),
    command(
        "train",
        "train:train",
        "train a model on data, or with a configuration of your own, and watch it",
        argument("config", "MODEL DATA | CONFIG.yaml", "a model and data, or a configuration", nargs="?"),
        flag("--print-config", "print a commented default configuration and exit"),
        flag("--init", "write the configuration that is chosen for MODEL DATA, and exit"),
        argument("--output", "FILE", "file of --init (default: train.yaml)", default="train.yaml"),
        argument("--gpus", "NxNAME", "choose for these GPUs, such as 8xH100-80GB, with --init (default: this host's)"),
        flag("--no-measure", "do not measure the best of what is chosen before the training (GPUs)"),
        PRICE,
        argument("--push", "REPOSITORY", "upload the final model to the Hugging Face Hub"),
        OVERRIDES,
        _NO_PREDICT,
        *START_OPTIONS,
        usage="ftmon train [options] MODEL DATA | CONFIG.yaml [key.sub=value ...]",
        epilog="MODEL is a folder or a name on the Hugging Face Hub, DATA a file, a folder or a name there. What MODEL "
        "DATA leaves open, and what is auto in CONFIG.yaml, is chosen by dry runs: docs/training.md.",
    ),
    command(
        "resume",
        "train:resume",
        "continue a run of 'ftmon train' from its newest complete checkpoint",
        RUN,
        OVERRIDES,
        _NO_PREDICT,
        *START_OPTIONS,
        epilog="The new run has the configuration of RUN with the given keys changed. A change with which training "
        "would not continue exactly is refused by name; checkpoint.allow=[NAME] accepts it (docs/training.md).",
    ),
    command(
        "sweep",
        "train:sweep",
        "measure many configurations, each in a run of its own",
        argument("sweep", "SWEEP.yaml", "what is varied, over which values, within which budget"),
        argument("--output", "FILE", "file of the rows (default: SWEEP.results.jsonl beside it)"),
        flag("--plan", "print the planned runs with predictions, their time and cost, and exit"),
        PRICE,
        flag("--fail-fast", "run likely failures first, and end at the first failure"),
        argument(
            "--on",
            "ENGINE",
            f"where the runs are: one of {', '.join(ENGINES)} (default: local, this host, one after the other)",
            choices=ENGINES,
        ),
        argument("--jobs", "N", "with --on: jobs at a time, those in a queue included (default: 64)", type=positive),
        argument("--gpus", "N", "with --on: GPUs of a job (default: the ranks of its configuration)", type=whole),
        argument(
            "--slurm", "NAME=VALUE", "with --on slurm: an option of sbatch, such as partition=gpu", action="append"
        ),
        json_flag("one JSON object at the end; progress on standard error"),
        PLAIN,
        ASCII,
        epilog="Rows are kept in SWEEP.results.jsonl; the same command resumes an interrupted sweep. Exit status: 0 "
        "every run has a row, also failed ones; 1 the sweep ended early; 2 wrong usage or an invalid sweep file; 130 "
        "interrupted. Format of the sweep file: docs/sweep.md.",
    ),
    command("data", "train:check", "check what the model will see of the training data")._replace(action=_CHECK),
    command(
        "chat",
        "train:chat",
        "chat with a trained model, or with a checkpoint of a live run",
        argument(
            "target",
            "MODEL|RUN",
            "a model's folder, an output folder, a checkpoint, a run, or a name on the Hugging Face Hub (default: the "
            "newest run of 'ftmon train')",
            nargs="?",
        ),
        argument(
            "--adapter", "NAME=PATH", "adapters of that model, under a name; several times: several", action="append"
        ),
        argument("--system", "TEXT", "the system prompt"),
        argument(
            "--temperature", "T", "0: always the most likely token (default: the model's own, or 0.7)", type=float
        ),
        argument("--top-p", "P", "sample from the most likely tokens with total probability P", type=float),
        argument("--max-tokens", "N", "maximum length of an answer (default: 512)", type=positive),
        argument(
            "--stop", "TEXT", "end an answer before this text; several times: before any of them", action="append"
        ),
        argument("--seed", "N", "seed of the sampling, for reproducible answers", type=int),
        argument("--device", None, "auto: a GPU; for a checkpoint, the CPU", choices=("auto", "cpu", "cuda")),
        flag("--whole", "treat the entire piped input as one message"),
        flag("--debug", "show the tokens that are sent and received"),
        epilog="With piped standard input, each line is a separate message and each answer one line (line ends in it "
        "are written as \\n); --whole makes the entire input one message.",
    ),
)

_RUN_EPILOG = (
    "Exit status: the training's own (128 + N if signal N killed it), or\n"
    + "\n".join(f"  {code}  {meaning}" for code, meaning in exits.OWN.items())
    + """
Signals INT, TERM, HUP, USR1 and USR2 are forwarded to the training. Without the app the run ends with this command:
after SIGTERM, or when this command is killed, it has --stop-grace seconds, then it is killed. With --detach, or after
leaving the app, it keeps running."""
)

_WATCH = (
    command(
        "run",
        "train:run",
        "run an unmodified training script and watch it",
        argument("command", "COMMAND", "such as: deepspeed train.py", nargs=argparse.REMAINDER),
        argument("--join", "FILE|RUN", "join a run that was started on another host: its join.json, or its name"),
        flag("--no-logs", "do not redirect the ranks' output"),
        *START_OPTIONS,
        usage="ftmon run [options] -- COMMAND ...",
        epilog=_RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ),
    command(
        "attach",
        "watch:attach",
        "watch a live run, with its whole history",
        run_argument(", ssh://[USER@]HOST[:PORT][/RUN], or tcp://HOST:PORT (--listen)", nargs="?"),
        argument("--key", "KEY|FILE", "for tcp://: the hub's public key, or a file with it"),
        PLAIN,
        flag("--read-only", "watch only: this app cannot stop or kill"),
        ASCII,
    ),
    command(
        "watch",
        "watch:watch_foreign",
        "watch a run that was started without ftmon",
        argument("pid", "PID", "a rank, or a process above it such as torchrun", nargs="?", type=positive),
        flag("--all", "every such run of this user on this host"),
        flag("--detach", "begin to watch, and return at once"),
        PLAIN,
        flag("--read-only", "watch only: this app cannot stop or kill"),
        ASCII,
        epilog="Leaving it does not touch the run. Stacks need the extra ftmon[watch]. Memory by phase, losses and "
        "steps need 'ftmon run', or Python 3.14 in the ranks, into which the probe is then injected.",
    ),
    command(
        "relay",
        "remote:relay",
        "report a run's sockets and wait for its end (started by 'attach ssh://')",
        run_argument(nargs="?"),
    ),
    command("replay", "watch:replay", "replay a recording", FILE_OR_RUN, PLAIN, ASCII),
    command(
        "ls",
        "watch:list_runs",
        "list live and recorded runs",
        argument("runs", "FILE|RUN", "these runs only (default: all of this user)", nargs="*"),
        json_flag("one JSON array for scripts"),
    ),
    command("status", "watch:show_status", "print the state of a run in a few lines", FILE_OR_RUN, JSON),
    command(
        "logs",
        "watch:show_logs",
        "print the output of a run's ranks",
        FILE_OR_RUN,
        RANK,
        argument("--text", None, "only lines that contain this text", default=""),
        argument("--lines -n", "N", "the last N lines (default: 200)", type=positive, default=200),
    ),
)
_INVESTIGATE = (
    command("memory", "memory:show_memory", "show what the memory peak of a step consists of", FILE_OR_RUN, RANK, JSON),
    command(
        "events",
        "memory:show_events",
        "print the allocator events of a run's ranks",
        FILE_OR_RUN,
        RANK,
        flag("--follow -f", "print new events until the run ends"),
        json_flag("one JSON object a line, for scripts"),
    ),
    command(
        "oom",
        "ranks:show_oom",
        "explain an out-of-memory error, with remedies",
        argument("target", "RUN|FILE", "a run, a recording, or a PyTorch memory snapshot"),
        RANK,
        json_flag("one JSON object for scripts (docs/protocol.md, oom_report)"),
    ),
    command(
        "snapshot",
        "memory:explore",
        "open a PyTorch memory snapshot, or compare two",
        argument("file", "FILE", "what torch.cuda.memory._dump_snapshot wrote, gzip or not"),
        argument("second", "FILE2", "a later snapshot: show the difference", nargs="?"),
        json_flag("one JSON object for scripts (docs/snapshot.md)", group=EXCLUSIVE),
        flag("--text", "lines of text, not the app", group=EXCLUSIVE),
        argument("--device", "D", "this device only (default: all)", type=device),
        argument("--top", "N", "stacks and blocks listed (default: 20)", type=positive, default=20),
        ASCII,
    ),
    command(
        "capture",
        "memory:capture",
        "capture memory snapshots of ranks and print their paths",
        RUN,
        ranks_option("this rank (default: all)"),
    ),
    command(
        "stacks",
        "ranks:show_stacks",
        "show the Python stacks of a run's ranks",
        FILE_OR_RUN,
        ranks_option("this rank"),
        flag("--all-threads", "all threads, not only the training thread"),
        flag("--native", "native frames too, where py-spy is installed and allowed"),
        JSON,
    ),
    command(
        "console",
        "ranks:console",
        "run Python in the failing frame of a held rank",
        RUN,
        argument("--rank", "R", "a rank held at an out-of-memory error", type=rank, required=True),
        argument("-c --code", "CODE", "run this code and exit (default: read from standard input)"),
    ),
    command(
        "report",
        "report:show_report",
        "show runs, sweeps and CSV files as charts and tables",
        argument("targets", "RUN|SWEEP|FILE.csv", "runs, recordings, results of sweeps, CSV files", nargs="+"),
        argument("--html", "FILE", "write one HTML file that opens offline"),
        argument("--svg", "FILE", "write the charts as one picture"),
        argument("--png", "FILE", "the same as PNG, with the extra ftmon[png]"),
        argument("--csv", "FILE", "write the rows, one per rank and phase"),
        argument("--parquet", "FILE", "the same as Parquet, where pyarrow is installed"),
        json_flag("one JSON object for scripts: what is drawn"),
        argument(
            "--columns",
            "NAME=COLUMN,...",
            "columns of CSV files: length=COLUMN and figures such as allocated=gpu_{rank}_mib, its=rate; also rank, "
            "iteration, unit",
        ),
        PRICE,
        WARM_UP,
        ASCII,
        epilog="Targets with the same axes share one chart. Exit status: 0, or 2 for wrong usage. Figures and the "
        "format of CSV files: docs/report.md.",
    ),
    command(
        "export",
        "export:export",
        "write a run's recorded figures in formats of other tools",
        FILE_OR_RUN,
        argument("format", "FORMAT", f"one of {', '.join(EXPORT_FORMATS)}", choices=EXPORT_FORMATS),
        argument(
            "-o --output",
            "FILE",
            f"the file to write; a folder with --series all, and for files of {', '.join(TRACKERS)} (default: here)",
        ),
        argument(
            "--series", "NAME", f"of a table: {', '.join(SERIES)} or all (default: steps)", choices=(*SERIES, "all")
        ),
        argument(
            "--rank", "R", "of memory_viz and flamegraph: the rank whose snapshot is written (default: 0)", type=rank
        ),
        argument(
            "--step", "S", "of memory_viz and flamegraph: the step of the snapshot (default: the last one)", type=whole
        ),
        epilog="memory_viz writes a captured memory snapshot for PyTorch's viewer, flamegraph its memory by stack: as "
        "SVG if the name of FILE ends with .svg, else as folded stacks. parquet and arrow need pyarrow, "
        "perfetto and the trackers the extra of the same name. Columns and units: docs/recording.md. Trackers: "
        "docs/exporters.md.",
    ),
    command(
        "compare",
        "report:show_comparison",
        "compare two runs or sweeps, relative to their noise",
        argument("before", "A", "a run, a recording, or results of a sweep"),
        argument("after", "B", "another of the same kind"),
        argument("--gate", "SHARE", "exit with status 1 on a larger regression, such as 3%%", type=share),
        JSON,
        WARM_UP,
        epilog="The gate checks step time, the highest peak, reserved memory and loss. Exit status: 0, 1 if a "
        "regression exceeds the gate, 2 for wrong usage. Method: docs/report.md.",
    ),
    command(
        "import",
        "export:import_run",
        "make a run of the log of a training that ftmon did not watch",
        argument(
            "file",
            "FILE|FOLDER",
            "a trainer_state.json of transformers' Trainer, W&B's .wandb file, TensorBoard's event files, or what "
            "DeepSpeed printed",
        ),
        argument("--name", None, "name of the run (default: the file's folder)"),
        JSON,
        epilog="The run has the logged losses, learning rates, gradient norms, evaluations and times, for 'ftmon "
        "report' and 'ftmon compare'. .wandb needs the extra ftmon[wandb], event files ftmon[tensorboard]. What is "
        "imported: docs/report.md.",
    ),
)
_END = (
    command("stop", "ranks:stop", "save a checkpoint and end the run after its current step", RUN),
    command(
        "kill",
        "ranks:kill",
        "end a run, or some of its ranks, by signals",
        RUN,
        ranks_option("this rank only"),
        argument("--signal", None, "send only this signal (default: INT, then TERM, then KILL)", choices=SIGNALS),
        YES,
    ),
    command(
        "release",
        "ranks:release",
        "release ranks that are held at an out-of-memory error",
        RUN,
        ranks_option("this rank (default: all held)"),
    ),
    command(
        "cleanup",
        "ranks:cleanup",
        "find and end processes that finished runs left behind",
        YES,
        json_flag("list what was found as JSON, and end nothing"),
        flag("--elsewhere", "include processes of other hosts' runs whose hub is not reachable from this host"),
    ),
)
_SET_UP = (
    command("doctor", "set_up:doctor", "check what works on this machine, with fixes for the rest", JSON),
    command(
        "keys",
        "remote:manage_keys",
        "show and change which hosts may attach",
        argument("--allow", "KEY", "allow this public key to attach"),
        argument("--remark", "TEXT", "a note about the owner of the key", default=""),
        argument("--remove", "KEY", "revoke this public key"),
    ),
    command(
        "completion",
        "set_up:completion",
        "write a completion script for a shell",
        argument("shell", None, None, choices=SHELLS),
    ),
)
COMMANDS = {"train": _TRAIN, "watch": _WATCH, "investigate": _INVESTIGATE, "end": _END, "set up": _SET_UP}
"""The commands by the title under which the help lists them."""

_EPILOG = """\
RUN is a run's identifier or the beginning of one ('ftmon ls' lists them); 'ftmon attach' without it takes the newest
live run.
Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; of 'run', 'train', 'resume' and
'demo' the training's own, or one from 193 to 199 that says what ftmon did ('ftmon run --help' lists them)."""


_WITH_COMMAND = ("run", "predict")


def command_name(argv: Sequence[str]) -> str:
    """Return the name of the command in a command line; empty: none. Global options have no values."""
    return next((word for word in argv if not word.startswith("-")), "")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split ``run [options] -- COMMAND ...`` at its first ``--``, and ``predict`` likewise.

    The command is None without such a split.
    """
    words, name = list(argv), command_name(argv)
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
    parser.set_defaults(handler="watch:choose", parser=parser, plain=False, read_only=False, command=[])
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for group in COMMANDS.values():
        for each in group:
            each.add_to(commands)
    return parser
