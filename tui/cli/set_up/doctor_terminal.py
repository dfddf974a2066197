"""The terminal side's checks of ``ftmon doctor``: terminal, run directory, NVML."""

import os
import shlex
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from .... import __version__
from ....protocol.checks import Check, State
from ....protocol.errors import RunDirError
from ....protocol.run.run_store import checked_home
from ....protocol.text import gib
from ..output import terminal

_ELSEWHERE = "set FTMON_HOME to a directory of yours"


def terminal_checks(environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Check the terminal: whether the app opens in it, its colours and characters, a multiplexer around it."""
    if not terminal.is_terminal():
        yield Check("terminal", "ok", "none here: commands print plain lines")
    elif reason := terminal.why_no_app(environ):
        yield Check("terminal", "warning", reason, "enlarge the window, or set TERM to the terminal's type")
    else:
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        inside = terminal.multiplexer(environ)
        yield Check(
            "terminal", "ok", f"{environ.get('TERM', '')} {columns}x{lines}" + (f", in {inside}" if inside else "")
        )
    yield _colour_check(environ)
    if terminal.wants_ascii(environ):
        yield Check(
            "characters",
            "warning",
            f"{sys.stdout.encoding} has no block characters: graphs are drawn in plain ASCII",
            "set LANG to a UTF-8 locale, such as C.UTF-8",
        )
    else:
        yield Check("characters", "ok", "UTF-8")


def _colour_check(environ: Mapping[str, str]) -> Check:
    found = terminal.colours(environ)
    if found == "16" and not terminal.why_no_app(environ):
        inside = terminal.multiplexer(environ)
        remedy = "set TERM=xterm-256color" if not inside else f"in {inside}, set default-terminal to {inside}-256color"
        return Check("colours", "warning", "16: shades of the memory graph look the same", remedy)
    return Check("colours", "ok", found)


def home_check() -> Check:
    """Check whether run directories can be made in their folder, and are closed to others."""
    try:
        path = checked_home()
    except RunDirError as error:
        return Check("run directory", "error", str(error), "set FTMON_HOME to a directory of yours")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(
            "run directory",
            "error",
            f"{path}: cannot write there: {error.strerror}",
            "set FTMON_HOME to a directory of yours",
        )
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
        return Check(
            "NVML", "ok", f"driver {driver}, {count} GPU{'' if count == 1 else 's'}: {', '.join(sorted(names))}"
        )
    except pynvml.NVMLError as error:
        return Check("NVML", "error", f"the driver answers with: {error}", "run nvidia-smi and fix what it reports")
    finally:
        pynvml.nvmlShutdown()


def own_checks() -> Iterator[Check]:
    """Run every check of the terminal side."""
    yield Check("ftmon", "ok", f"{__version__}, Python {sys.version.split()[0]}")
    yield from terminal_checks()
    yield home_check()
    yield nvml_check()
