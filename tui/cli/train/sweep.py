"""``ftmon sweep``: runs many configurations, one after the other, in a separate process."""

import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from ....protocol.analysis.sweep.summary import pool
from ....protocol.analysis.sweep.text import aligned, result_lines, table
from ....protocol.run import exits
from ....protocol.sweep.store import ResultsError, default_output
from ....protocol.text import sanitize
from ..access.trainer_process import StartFailedError, become
from ..output import terminal
from ..watch.attach import opens_app

SWEEP = "ftmon.trainer.sweep"


def sweep(arguments: Namespace) -> int:
    """Run a sweep; return 0 if every run has its row, 1 if the sweep ended earlier, 2 for an invalid file.

    In a terminal it opens the app, and the sweep continues after leaving it; otherwise it prints lines.

    Raises:
        StartFailedError: the sweep refused its file.
    """
    if arguments.json or arguments.plan or not opens_app(arguments):
        become(SWEEP, words(arguments))
    return _in_app(arguments)


def words(arguments: Namespace) -> list[str]:
    """Return the arguments of the process that runs the sweep."""
    result: list[str] = [arguments.sweep]
    if arguments.output:
        result.append(f"--output={arguments.output}")
    result += [f"--{name.replace('_', '-')}" for name in ("plan", "fail_fast", "json") if getattr(arguments, name)]
    return result


def _in_app(arguments: Namespace) -> int:
    from ...screens.sweep.app import run_sweep_app

    path = Path(arguments.output or default_output(arguments.sweep))
    if not _goes_on(path):
        _start(path, arguments)
    model = run_sweep_app(path, ascii_only=terminal.draws_ascii(arguments))
    model.refresh()
    if model.results is None or model.results.end is None:
        again = shlex.join(["ftmon", "sweep", arguments.sweep, *(["--output", str(path)] if arguments.output else [])])
        print(f"the sweep continues; its rows are in {path}; to see it again: {again}")
        return 0
    plan = model.results.plan
    for line in [*aligned(table(pool(model.rows), plan.columns if plan else ())), *result_lines(model.rows, plan)]:
        print(sanitize(line, 600))
    if model.results.end.reason == "interrupted":
        return exits.INTERRUPTED
    return 0 if model.results.end.reason == "finished" else 1


def _goes_on(path: Path) -> bool:
    """Return whether a session of the sweep is running."""
    from ...model.sweep import SweepModel

    model = SweepModel(path)
    try:
        model.refresh()
    except ResultsError:
        return False
    return model.alive


def _start(path: Path, arguments: Namespace) -> None:
    """Start the sweep's process, which outlives this one, and wait until it accepts its file.

    Raises:
        StartFailedError: it refused; the text is its output.
    """
    log = path.with_name(f"{path.name}.log")  # never the results file itself, with any suffix
    try:
        output = log.open("wb")
    except OSError as error:
        raise ResultsError(f"{log}: cannot be written: {error.strerror}") from None
    read_end, write_end = os.pipe()
    with output, open(read_end, "rb") as accepted:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", SWEEP, *words(arguments), f"--accepted={write_end}"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(write_end,),
            )
        finally:
            os.close(write_end)
        if accepted.read(1):
            return
    if process.wait():
        lines = log.read_text(errors="replace").strip().splitlines()
        raise StartFailedError("\n".join(lines) or "the sweep did not start", process.returncode)
