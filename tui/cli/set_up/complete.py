"""``ftmon completion SHELL``: prints a completion script made from the parser, with the names of this user's runs."""

import argparse
from collections.abc import Iterator
from typing import cast

import shtab

from ..parser import build_parser

_TCSH_RUNS = "`ls -1t ${FTMON_HOME}/runs`"
_RUNS = {"bash": "_ftmon_runs", "zsh": "_ftmon_runs", "tcsh": _TCSH_RUNS}
_RUNS_AND_FILES = {"bash": "_ftmon_recordings", "zsh": "_ftmon_recordings", "tcsh": _TCSH_RUNS}

_RUN_ARGUMENTS = ("run", "runs", "target", "targets", "before", "after")

# Completion must be instant, so it reads the directory of runs and starts no Python.
_PREAMBLE = {
    "bash": """
_ftmon_runs() {
  local runs="${FTMON_HOME:-${XDG_STATE_HOME:-$HOME/.local/state}/ftmon}/runs"
  compgen -W "$(command ls -1t "$runs" 2>/dev/null)" -- "$1"
}
_ftmon_recordings() { _ftmon_runs "$1"; compgen -f -- "$1"; }
""",
    "zsh": """
_ftmon_runs() {
  local -a runs
  runs=(${(f)"$(command ls -1t "${FTMON_HOME:-${XDG_STATE_HOME:-$HOME/.local/state}/ftmon}/runs" 2>/dev/null)"})
  compadd -V runs -a runs
}
_ftmon_recordings() { _ftmon_runs; _files; }
""",
    "tcsh": "",
}


def completion(arguments: argparse.Namespace) -> int:
    """Print the completion script of one shell."""
    parser = build_parser()
    for action in _actions(parser):
        if action.dest in _RUN_ARGUMENTS:  # shtab reads the attribute `complete` of an action
            action.complete = _RUNS if action.metavar == "RUN" else _RUNS_AND_FILES  # type: ignore[attr-defined]
        elif action.dest in ("config", "key", "file", "second", "sweep"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    # shtab annotates `preamble` as a string and documents a dictionary by shell.
    print(shtab.complete(parser, arguments.shell, preamble=cast(str, _PREAMBLE)))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
