"""``ftmon doctor`` and ``completion``: checks of this machine, and completion scripts made from the parser."""

import argparse
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import msgspec
import shtab

from ... import __version__
from ...protocol.checks import TRAINING_PACKAGES, Check, State, tested_versions, version_check, version_parts
from ...protocol.errors import RunDirError
from ...protocol.run.rundir import checked_home
from ...protocol.text import counted, gib, names_c_locale, wrapped
from . import output
from .arguments import build_parser
from .output import print_json

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


_ELSEWHERE = "set FTMON_HOME to a directory of yours"


def terminal_checks() -> Iterator[Check]:
    """Check the terminal: whether the app opens in it, its colours and characters, a multiplexer around it."""
    if not output.is_terminal():
        yield Check("terminal", "ok", "none here: commands print plain lines")
    elif reason := output.why_no_app():
        yield Check("terminal", "warning", reason, "enlarge the window, or set TERM to the terminal's type")
    else:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        inside = f", in {name}" if (name := output.multiplexer()) else ""
        yield Check("terminal", "ok", f"{os.environ.get('TERM', '')} {columns}x{lines}{inside}")
    yield _colour_check()
    if output.wants_ascii():
        lacking = "the C locale" if names_c_locale() else sys.stdout.encoding
        text = f"{lacking} has no block characters: graphs are drawn in plain ASCII"
        yield Check("characters", "warning", text, "set LANG to a UTF-8 locale, such as C.UTF-8")
    else:
        yield Check("characters", "ok", "UTF-8")


def _colour_check() -> Check:
    found = output.colours()
    if found == "16" and not output.why_no_app():
        inside = output.multiplexer()
        remedy = "set TERM=xterm-256color" if not inside else f"in {inside}, set default-terminal to {inside}-256color"
        return Check("colours", "warning", "16: shades of the memory graph look the same", remedy)
    return Check("colours", "ok", found)


def home_check() -> Check:
    """Check whether run directories can be made in their folder, and are closed to others."""
    try:
        path = checked_home()
    except RunDirError as error:
        return Check("run directory", "error", str(error), _ELSEWHERE)
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check("run directory", "error", f"{path}: cannot write there: {error.strerror}", _ELSEWHERE)
    runs = path / "runs"
    if runs.exists() and (problem := _exposure(runs)):
        return Check("run directory", *problem)
    free = os.statvfs(existing) if hasattr(os, "statvfs") else None
    room = f", {gib(free.f_bavail * free.f_frsize, 1)} free" if free else ""
    return Check("run directory", "ok", f"{path}{room}")


def _exposure(runs: Path) -> tuple[State, str, str] | None:
    info = runs.stat()
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        return "error", f"{runs}: belongs to another user", _ELSEWHERE
    if stat.S_IMODE(info.st_mode) & 0o077:
        return "warning", f"{runs}: is open to other users", f"chmod 700 {shlex.quote(str(runs))}"
    return None


def nvml_check() -> Check:
    """Check that NVML works, and list its GPUs."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Check("NVML", "ok", f"no NVIDIA driver here ({error}): CPU figures only")
    try:
        count = pynvml.nvmlDeviceGetCount()
        names = {str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)}
        driver = pynvml.nvmlSystemGetDriverVersion()
        return Check("NVML", "ok", f"driver {driver}, {counted(count, 'GPU')}: {', '.join(sorted(names))}")
    except pynvml.NVMLError as error:
        return Check("NVML", "error", f"the driver answers with: {error}", "run nvidia-smi and fix what it reports")
    finally:
        pynvml.nvmlShutdown()


_REQUIREMENT = re.compile(r"""([\w.-]+)(?:\[.*?\])?\s*([^;]*);.*\bextra\s*==\s*["']([\w.-]+)["']""")
"""Name, versions and extra of a requirement: ``resvg-py<1,>=0.5; extra == "png"``."""
_NOT_FOR_USERS = ("test",)


def extra_checks() -> Iterator[Check]:
    """Name the optional extras of ftmon, and which of their packages are installed."""
    try:
        lines = metadata.requires("ftmon") or []
    except metadata.PackageNotFoundError:
        yield Check("extras", "ok", "not known: ftmon is not installed as a package")
        return
    extras: dict[str, list[tuple[str, str]]] = {}
    for name, versions, extra in (found.groups() for line in lines if (found := _REQUIREMENT.match(line))):
        if extra not in _NOT_FOR_USERS:
            extras.setdefault(extra, []).append((name, versions))
    for extra, packages in extras.items():
        lacks = [f"{name}{versions}".strip() for name, versions in packages if not _is_new_enough(name, versions)]
        present = ", ".join(f"{name} {_installed(name)}" for name, _ in packages)
        text = f"not installed ({', '.join(lacks)} missing): pip install 'ftmon[{extra}]'" if lacks else present
        yield Check(f"ftmon[{extra}]", "ok", text)


def _installed(name: str) -> str:
    """Return the version of a package; empty: not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _is_new_enough(name: str, versions: str) -> bool:
    least = re.search(r">=\s*([\w.]+)", versions)
    version = _installed(name)
    return bool(version) and (least is None or version_parts(version) >= version_parts(least.group(1)))


_MARKS = {"ok": ("✓", "ok"), "note": ("·", "--"), "warning": ("▲", "!!"), "error": ("✖", "XX")}
_TRAINER_SECONDS = 120.0  # time limit: importing torch and DeepSpeed from a cold, shared disk is slow
INSTALL = 'pip install "ftmon[train]"'


def doctor(arguments: Namespace) -> int:
    """Print the checks of this machine; return 1 if one of them is an error."""
    own = Check("ftmon", "ok", f"{__version__}, Python {sys.version.split()[0]}")
    groups = {
        "terminal": [own, *terminal_checks(), home_check(), nvml_check()],
        "extras": list(extra_checks()),
        "training": trainer_checks(),
    }
    broken = any(check.state == "error" for checks in groups.values() for check in checks)
    if arguments.json:
        print_json({"ok": not broken, **groups})
    else:
        plain = output.draws_ascii(arguments)
        for title, checks in groups.items():
            print(title)
            for check in checks:
                print(wrapped(f"  {_MARKS[check.state][plain]} {check.name:<19} {check.text}", 1))
                if check.remedy and check.state != "ok":
                    print(wrapped(f"    {'':<19} {'->' if plain else '→'} {check.remedy}", 1))
    return 1 if broken else 0


def trainer_checks() -> list[Check]:
    """Return the training side's checks; if that side is not installed, one that reports it, and those of versions."""
    if missing := missing_training_packages():
        lacks = Check("training side", "warning", f"not installed here ({', '.join(missing)} missing)", INSTALL)
        present = {name: version for name in tested_versions() if (version := _installed(name))}
        return [lacks, *(version_check(name, version) for name, version in present.items())]
    command = [sys.executable, "-P", "-m", "ftmon.trainer.doctor", "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRAINER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return [Check("training side", "error", f"no answer in {_TRAINER_SECONDS:.0f} s: {' '.join(command)}")]
    try:
        return msgspec.json.decode(done.stdout, type=list[Check])
    except msgspec.MsgspecError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        reason = words[-1] if words else f"ended with status {done.returncode}"
        return [Check("training side", "error", reason, INSTALL)]


def missing_training_packages() -> list[str]:
    """Return the missing packages that ftmon's own trainer requires, without importing any package."""
    return [name for name in TRAINING_PACKAGES if find_spec(name) is None]
