"""Runs a sweep: ``python -m ftmon.trainer.sweep SWEEP.yaml [--output FILE] [--plan] [--price P] [--fail-fast]``.

Exit status: 0 every run has its row (of any verdict), 1 the sweep ended before, 2 wrong usage or a sweep file that
cannot be used, 130 interrupted.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ... import __version__
from ...protocol.analysis.sweep.search import order, with_durations
from ...protocol.analysis.sweep.summary import curves, fastest, pool, value
from ...protocol.errors import FtmonError, UsageError
from ...protocol.host.process import never_fail, this_process
from ...protocol.run import exits
from ...protocol.run.rundir import RunDir
from ...protocol.sweep.rows import (
    FORMAT,
    Ended,
    Header,
    Plan,
    Planned,
    Results,
    Row,
    Settings,
    Started,
    Writer,
    default_output,
    read,
)
from ...protocol.text import wrapped
from ..recipe.hardware import torch_is_cpu_only, usable_gpus
from . import plan as spec
from .engines import ENGINES, Jobs, engine, recover
from .plan import Lines, Spec
from .run import Session, StopError, clear_lost, measure_plan
from .search import Predictor, gpus_of, search


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sweep; return the exit status."""
    arguments = _parser().parse_args(argv)
    interrupts: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: interrupts.append(received))
    try:
        wanted = spec.read(arguments.sweep)
        spec.check(wanted)
        gpus = gpus_of(wanted, spec.combinations(wanted))
        wanted = wanted._replace(budget=spec.priced(wanted.budget, gpus, arguments.price))
        if arguments.on != "local" and wanted.one_process:
            raise UsageError(f"--on {arguments.on}: one_process is for this host; remove it from {arguments.sweep}")
        return _sweep(wanted, arguments, interrupts)
    except FtmonError as error:
        print(wrapped(f"ftmon: {error}", 2), file=sys.stderr)
        return error.exit_status


def _sweep(wanted: Spec, arguments: argparse.Namespace, interrupts: list[int]) -> int:
    stream = sys.stderr if arguments.json else sys.stdout
    lines = Lines(wanted, lambda text: print(text, file=stream, flush=True))
    path = Path(arguments.output or default_output(arguments.sweep))
    predictor = Predictor(wanted, lines.note)
    if arguments.plan:
        earlier = read(path) if path.exists() and path.stat().st_size else None
        same = earlier is not None and earlier.header.fingerprint == spec.fingerprint(wanted)
        rows = list(earlier.answered().values()) if earlier is not None and same else []
        plan = _plan(wanted, predictor, arguments.fail_fast, rows)
        lines.plan(plan, rows, len(rows), earlier.seconds_used() if earlier is not None and same else 0.0)
        if arguments.json:
            _print_json(plan)
        return 0
    elsewhere = None
    if arguments.on != "local":
        elsewhere = engine(arguments.on, path, wanted.timeout, dict(arguments.slurm))
    writer = Writer(path, _header(wanted))
    earlier = read(path)
    if arguments.accepted is not None:
        os.write(arguments.accepted, b"1")
        os.close(arguments.accepted)
    lines.note(f"sweep {wanted.name}: results in {path}")
    if lost := earlier.unanswered:
        for started in lost:
            writer.append(recover(elsewhere, started) if started.job else _lost(started))
        earlier = read(path)
    session = Session(wanted, writer.append, earlier, lines, arguments.fail_fast, lambda: bool(interrupts))
    if elsewhere is not None:
        session.jobs = Jobs(
            elsewhere,
            session,
            lambda settings: _gpus(wanted, arguments.gpus, elsewhere.takes_gpus, settings),
            arguments.jobs,
        )
    plan = _plan(wanted, predictor, arguments.fail_fast, session.rows)
    writer.append(plan)
    lines.plan(plan, session.rows, _answered(plan, session), session.used_seconds)
    found: list[str] = []
    try:
        found = _run(wanted, session, predictor, plan, lines)
        ended = Ended(time.time(), "finished")
    except StopError as stop:
        searched = plan.search is not None and plan.search.goal != "fastest"
        missing = 0 if searched else len(plan.runs) * plan.repeats - _answered(plan, session)
        ended = msgspec.structs.replace(stop.reason, not_run=missing)
    writer.append(ended)
    writer.close()
    lines.end(ended, session.rows, plan, found)
    if arguments.json:
        _print_json(_answer(read(path), ended, found, session.used_seconds))
    if ended.reason == "interrupted":
        return exits.INTERRUPTED
    return 0 if ended.reason == "finished" else 1


def _lost(started: Started) -> Row:
    """End the run of a killed session, and return the row that counts its time."""
    run = RunDir(started.run)
    ended = started.time
    if started.run:
        clear_lost(run)
        end = run.read_exit() if run.path.exists() else None
        ended = max(ended, end.time) if end is not None else ended
    more = started.repeat, run.id if started.run else "", "the sweep was killed"
    return Row(started.settings, "unfinished", ended, ended - started.time, *more)


def _run(wanted: Spec, session: Session, predictor: Predictor, plan: Plan, lines: Lines) -> list[str]:
    if wanted.search is not None and wanted.search.goal != "fastest":
        return search(session, predictor, wanted.search, spec.combinations(wanted))

    def progress() -> None:
        lines.progress(plan, session.used_seconds, session.rows)

    if session.jobs is not None:
        runs = [(run, repeat) for repeat in range(wanted.repeats) for run in plan.runs]
        session.jobs.measure([one for one in runs if not session.has(one[0].settings, one[1])], progress)
        return []
    for repeat in range(wanted.repeats):
        if wanted.one_process:
            measure_plan(session, plan.runs, repeat, progress)
            continue
        for run in plan.runs:
            if not session.has(run.settings, repeat):
                session.measure(run.settings, repeat, run.predicted)
                progress()
    return []


def _gpus(wanted: Spec, given: int | None, here: bool, settings: Settings) -> int:
    """Return the GPUs of a configuration's job: its ranks, or none where there are none."""
    if given is not None:
        return given
    none = not usable_gpus() if here else torch_is_cpu_only()
    return 0 if none else gpus_of(wanted, [settings])


def _option(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, such as partition=gpu, not {text!r}")
    return name, value


def _plan(wanted: Spec, predictor: Predictor, fail_fast: bool, rows: Sequence[Row] = ()) -> Plan:
    grid = spec.combinations(wanted)
    searched = wanted.search is not None and wanted.search.goal != "fastest"
    runs = [Planned(settings) for settings in grid] if searched else order(predictor.plan(grid), fail_fast=fail_fast)
    notes = list(predictor.notes)
    if wanted.search is not None and wanted.search.goal == "fastest":
        fitting = [run for run in runs if run.predicted is None or run.predicted.fits is not False]
        if len(fitting) < len(runs):
            notes.append(f"{len(runs) - len(fitting)} configurations are left out: predicted not to fit")
        runs = fitting
    runs = with_durations(runs, rows, wanted.steps + wanted.warm_up, spec.LENGTH if wanted.one_process else "")
    return Plan(
        time.time(),
        this_process(),
        runs,
        repeats=1 if searched else wanted.repeats,
        budget=wanted.budget,
        search=wanted.search,
        timeout=wanted.timeout,
        capacity_bytes=predictor.capacity_bytes,
        notes=notes,
        columns=list(wanted.columns),
    )


def _answered(plan: Plan, session: Session) -> int:
    """Return the number of the plan's runs with a row; of a search without a known plan, all rows."""
    if plan.search is not None and plan.search.goal != "fastest":
        return len(session.rows)
    return sum(session.has(run.settings, repeat) for run in plan.runs for repeat in range(plan.repeats))


def _header(wanted: Spec) -> Header:
    steps, host = (wanted.steps, wanted.warm_up), socket.gethostname()
    identity = wanted.name, wanted.source, spec.fingerprint(wanted), wanted.axis_names
    return Header(FORMAT, *identity, *steps, time.time(), host, __version__)


def _answer(results: Results, ended: Ended, found: list[str], used: float) -> dict[str, Any]:
    """Return the output of ``--json`` (docs/sweep.md)."""
    rows, plan = list(results.answered().values()), results.plan
    pooled = pool(rows)
    best = fastest(pooled)
    return {
        "name": results.header.name,
        "ended": ended.reason,
        "text": ended.text,
        "not_run": ended.not_run,
        "used_seconds": round(used, 3),
        "rows": rows,
        "found": found,  # a sentence for each combination of a search's axes
        "curves": curves(pooled, plan.search.axis if plan and plan.search else ""),
        "fastest": best.settings if best is not None else None,
        "columns": [{name: value(row, name) for name in plan.columns} for row in rows] if plan else [],
    }


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftmon sweep", description="run many configurations, one after the other")
    parser.add_argument("sweep")
    parser.add_argument("--output")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--price", type=float)
    parser.add_argument("--fail-fast", action="store_true")
    parser.add_argument("--on", choices=ENGINES, default="local")
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--slurm", type=_option, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--accepted", type=int, metavar="FD", help="descriptor that gets a byte once the file is accepted"
    )
    return parser


if __name__ == "__main__":
    never_fail()
    sys.exit(main())
