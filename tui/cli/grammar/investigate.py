"""The commands of the group "investigate" of ``ftmon --help``."""

from typing import TYPE_CHECKING

from .argument_types import device, positive, price, rank, share
from .parts import add_ascii, add_command, add_run, add_warm_up

if TYPE_CHECKING:
    from .parts import Commands


def add(commands: "Commands") -> None:
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
    memory = add_command(
        commands, "memory", "investigate.memory:show_memory", "show what the memory peak of a step consists of"
    )
    memory.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    memory.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    memory.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _events(commands: "Commands") -> None:
    events = add_command(
        commands, "events", "investigate.events:show_events", "print the allocator events of a run's ranks"
    )
    events.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    events.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    events.add_argument("--follow", "-f", action="store_true", help="print new events until the run ends")
    events.add_argument("--json", action="store_true", help="one JSON object a line, for scripts")


def _oom(commands: "Commands") -> None:
    oom = add_command(commands, "oom", "investigate.oom:show_oom", "explain an out-of-memory error, with remedies")
    oom.add_argument("target", metavar="RUN|FILE", help="a run, a recording, or a PyTorch memory snapshot")
    oom.add_argument("--rank", type=rank, metavar="R", help="this rank only (default: all)")
    oom.add_argument("--json", action="store_true", help="one JSON object for scripts (docs/protocol.md, oom_report)")


def _snapshot(commands: "Commands") -> None:
    snapshot = add_command(
        commands, "snapshot", "investigate.snapshot:explore", "open a PyTorch memory snapshot, or compare two"
    )
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
        commands, "capture", "investigate.capture:capture", "capture memory snapshots of ranks and print their paths"
    )
    add_run(capture)
    capture.add_argument(
        "--rank", type=rank, action="append", default=[], metavar="R", help="this rank (default: all); repeatable"
    )


def _stacks(commands: "Commands") -> None:
    stacks = add_command(
        commands, "stacks", "investigate.stacks:show_stacks", "show the Python stacks of a run's ranks"
    )
    stacks.add_argument("run", metavar="FILE|RUN", help="a recording.sqlite, a run directory, or a run")
    stacks.add_argument("--rank", type=rank, action="append", default=[], metavar="R", help="this rank; repeatable")
    stacks.add_argument("--all-threads", action="store_true", help="all threads, not only the training thread")
    stacks.add_argument(
        "--native", action="store_true", help="native frames too, where py-spy is installed and allowed"
    )
    stacks.add_argument("--json", action="store_true", help="one JSON object for scripts")


def _console(commands: "Commands") -> None:
    console = add_command(
        commands, "console", "investigate.console:console", "run Python in the failing frame of a held rank"
    )
    add_run(console)
    console.add_argument("--rank", type=rank, required=True, metavar="R", help="a rank held at an out-of-memory error")
    console.add_argument(
        "-c", "--code", metavar="CODE", help="run this code and exit (default: read from standard input)"
    )


def _report(commands: "Commands") -> None:
    report = add_command(
        commands, "report", "investigate.report:show_report", "show runs, sweeps and CSV files as charts and tables"
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
        "investigate.compare:show_comparison",
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
