"""The command line's grammar. The only import is argparse.

Each command names its handler as ``module:function`` of this package; ``main`` imports it on demand.
"""

import argparse
from collections.abc import Sequence

from ... import __version__
from .grammar import end, investigate, set_up, train, watch
from .grammar.grouped import GroupedParser

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
    parser.set_defaults(handler="watch.attach:choose", parser=parser, plain=False, read_only=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=argparse.ArgumentParser)
    for group in (train, watch, investigate, end, set_up):
        group.add(commands)
    return parser
