"""Commands that start processes of the training side: runs, sweeps, predictions, data checks, chat."""

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from ...protocol.analysis.sweep.summary import aligned, pool, result_lines, table
from ...protocol.errors import FtmonError, UsageError
from ...protocol.link.sockets import JOIN_NAME, join_path
from ...protocol.run import exits, rundir
from ...protocol.run.notices import make_notify
from ...protocol.run.rundir import RunOptions
from ...protocol.run.start import CommandEnd, StartRequest, module_command
from ...protocol.run.targets import parse_targets
from ...protocol.sweep.rows import ResultsError, default_output
from ...protocol.text import sanitize
from ..model.runs import TRAINER_KINDS, RunList
from .access import SCRIPT, StartFailedError, become, require_training, start_run, words_of
from .narrate import attach_line
from .output import OutputError, draws_ascii
from .watch import opens_app, watch


def chat(arguments: Namespace) -> NoReturn:
    """Run the chat."""
    require_training()
    target = arguments.target or _newest()
    names = ("adapter", "system", "temperature", "top_p", "max_tokens", "stop", "seed", "device", "whole", "debug")
    become("ftmon.trainer.recipe.chat", [*words_of(arguments, names), "--", target])


def _newest() -> str:
    """Return the newest run of the trainer, which ``ftmon chat`` without a model means; a finished one comes first."""
    entries = [one for one in RunList().entries() if one.kind in TRAINER_KINDS]
    if not entries:
        raise UsageError("chat needs a model or a run: 'ftmon train' has no run here yet")
    found = next((one for one in entries if one.state == "finished"), entries[0])
    print(f"ftmon: chat with {found.id}", file=sys.stderr, flush=True)
    return found.id


def check(arguments: Namespace) -> int:
    """Check the data of a configuration; return 0 for clean data, 1 for findings, 2 if no training would start."""
    require_training()
    words = [*words_of(arguments, ("samples", "json", "color")), *(["--ascii"] if draws_ascii(arguments) else [])]
    become("ftmon.trainer.recipe.data_check", [*words, "--", arguments.config, *arguments.overrides], ends_at_once=True)


_OF_BOTH = ("ranks", "capacity", "gpu", "price", "data", "largest", "what_if", "explain")
_OF_A_SCRIPT = {
    "deepspeed": "deepspeed",
    "micro_batch": "training.micro_batch",
    "accumulation": "training.grad_accumulation",
    "checkpointing": "model.gradient_checkpointing",
    "lora_rank": "lora.rank",
    "optimizer": "optimizer.kind",
}
"""Options of --model, and the settings of a configuration that correspond to them."""


def predict(arguments: Namespace) -> int:
    """Predict the memory of a training step; return 0, or 2 for an unusable configuration."""
    require_training()
    become("ftmon.trainer.predict", words(arguments), ends_at_once=True)


def words(arguments: Namespace) -> list[str]:
    """Return the arguments of the process that predicts."""
    more = _of_run(arguments) if arguments.run else []
    _check(arguments)
    lengths = ",".join(map(str, arguments.sequence_length or ()))
    result = [*more, f"--sequence-length={lengths}"] if lengths else more
    result += words_of(arguments, (*_OF_BOTH, "model", *_OF_A_SCRIPT, "json"))
    if arguments.command:
        return [*result, "--script", "--", *arguments.command]
    return [*result, "--", arguments.config, *arguments.overrides] if arguments.config else result


def _of_run(arguments: Namespace) -> list[str]:
    """Take the configuration of ``--run``, as of a run on GPUs; return its measured parts as an option."""
    from .memory import measured_parts

    if arguments.config or arguments.model or arguments.command or not arguments.explain:
        raise UsageError("--run goes with --explain, and without CONFIG.yaml, --model and a command")
    found = rundir.find(arguments.run)
    if not found.config.exists():
        raise UsageError(f"{found.id}: is not a run of ftmon's trainer, so it has no configuration to predict")
    arguments.config, arguments.overrides = str(found.config), ["run.device=auto"]
    return [f"--measured={json.dumps(measured_parts(str(found.path)))}"]


def _check(arguments: Namespace) -> None:
    if arguments.command and (arguments.config or arguments.model):
        raise UsageError(f"predict accepts {arguments.config or '--model'} or a command after '--', not both")
    for name in ("deepspeed", "lora_rank", "optimizer") if arguments.command else ():
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} goes with --model; a command's script sets it itself")
    if arguments.data and not arguments.config:
        raise UsageError("--data needs CONFIG.yaml, which names the data set")
    if not arguments.config and not arguments.model and not arguments.command:
        raise UsageError(
            "predict needs CONFIG.yaml ('ftmon train --print-config' writes one), --model MODEL, or '-- COMMAND' for a "
            "script of your own"
        )
    if arguments.config and arguments.model:
        raise UsageError(f"predict takes {arguments.config} or --model, not both; set model.name=NAME instead")
    for name, key in _OF_A_SCRIPT.items() if arguments.config else ():
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} goes with --model; in {arguments.config} it is {key}")


@contextmanager
def _own_statuses(usage: int) -> Generator[None]:
    try:
        yield
    except (StartFailedError, OutputError):
        raise
    except FtmonError as error:
        raise StartFailedError(str(error), exits.of_error(error, usage)) from None


@_own_statuses(exits.WRONG_USAGE)
def demo(arguments: Namespace) -> int:
    """Fine-tune a small model on this machine and watch it."""
    require_training()
    own = {name: getattr(arguments, name) for name in ("overrides", "fault", "steps", "ranks")}
    return _start_and_watch(arguments, _request("demo", arguments, **own))


@_own_statuses(exits.WRONG_USAGE)
def train(arguments: Namespace) -> int:
    """Train with the given configuration and show the run, or print a default configuration."""
    require_training()
    if arguments.print_config:
        command = module_command("ftmon.trainer.recipe.start", ["print-config"])
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    if arguments.config is None:
        raise UsageError("train needs MODEL DATA or CONFIG.yaml; 'ftmon train --print-config' prints a template")
    pair = _model_and_data(arguments)
    if arguments.init:
        _init(arguments, pair)
    if arguments.gpus:
        raise UsageError("--gpus goes with --init: a training is on this host's GPUs (run.ranks=N takes fewer)")
    push = [f"output.push={arguments.push}"] if arguments.push else []
    given = {"given": pair} if pair else {"config": arguments.config}
    overrides = [*arguments.overrides[1 if pair else 0 :], *push]
    choice = {"measure": not arguments.no_measure, "price": arguments.price}
    return _start_and_watch(arguments, _request("train", arguments, overrides=overrides, **given, **choice))


def _model_and_data(arguments: Namespace) -> list[str]:
    """Return MODEL and DATA if they are given instead of a configuration."""
    first, rest = arguments.config, arguments.overrides
    if ("=" in first and not os.path.exists(first)) or first.endswith((".yaml", ".yml")):
        return []
    if rest and ("=" not in rest[0] or os.path.exists(rest[0])):
        return [first, rest[0]]
    if os.path.isdir(first):
        raise UsageError(f"{first}: is a folder; to train the model in it, name the data too: ftmon train MODEL DATA")
    return []


def _init(arguments: Namespace, pair: list[str]) -> NoReturn:
    """Write the configuration that is chosen for a model and data."""
    if not pair:
        raise UsageError("--init needs MODEL DATA, as in: ftmon train --init Qwen/Qwen2.5-0.5B data.jsonl")
    words = [f"--init={arguments.output}", *words_of(arguments, ("gpus", "price"))]
    become("ftmon.trainer.predict.decide", [*words, "--pair", "--", *pair, *arguments.overrides[1:]], ends_at_once=True)


@_own_statuses(exits.WRONG_USAGE)
def resume(arguments: Namespace) -> int:
    """Continue a run of ftmon's trainer from its newest complete checkpoint, as a new run."""
    require_training()
    found = rundir.find(arguments.run)
    entry = RunList().entry(found)
    if entry.kind not in TRAINER_KINDS or not found.config.exists():
        again = sanitize(shlex.join(entry.command), 200)
        raise UsageError(
            f"{found.id}: is not a run of ftmon's trainer; start its script again with the script's own option for "
            f"resuming: ftmon run -- {again}"
        )
    if entry.live:
        raise UsageError(f"{found.id}: is still running; 'ftmon stop {found.id}' saves a checkpoint and ends it")
    if entry.state == "finished" and not arguments.overrides:
        raise UsageError(f"{found.id}: has finished; to train longer, give training.max_steps=N or training.epochs=N")
    request = _request("train", arguments, resume=str(found.path), overrides=arguments.overrides)
    return _start_and_watch(arguments, msgspec.structs.replace(request, name=request.name or entry.name))


@_own_statuses(exits.RUN_USAGE)
def run(arguments: Namespace) -> int:
    """Watch an unchanged script; return its exit status, or one of ``protocol.run.exits.OWN``."""
    if not arguments.command:
        raise UsageError("run needs a command after '--', as in: ftmon run -- deepspeed train.py")
    if arguments.join:
        join(arguments.join, arguments.command)
    return _start_and_watch(arguments, _request("run", arguments, command=arguments.command), stdin=True)


def join(target: str, command: list[str]) -> NoReturn:
    """Replace this process by a command that is a part of another host's run."""
    path = Path(target)
    if not os.path.isfile(path):
        path = path / JOIN_NAME if os.path.isdir(path) else rundir.find(target).path / JOIN_NAME
    become(SCRIPT, ["join", str(path), "--", *command])


def _request(kind: Literal["run", "train", "demo"], arguments: Namespace, **more: Any) -> StartRequest:
    """Return the request of a command's arguments; an omitted option keeps its default."""
    names = ("listen", "metrics", "probe_budget", "hold_timeout", "hang_grace", "stop_grace", "exit_timeout")
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    options = RunOptions(
        read_only=arguments.read_only,
        logs=not getattr(arguments, "no_logs", False),
        allocator_events=not arguments.no_allocator_events,
        predict=not getattr(arguments, "no_predict", False),
        report_to=parse_targets(arguments.report_to or ""),
        on_oom=arguments.on_oom,
        allow_console=arguments.allow_console,
        on_hang=arguments.on_hang,
        **{name: value for name, value in given.items() if value is not None},
    )
    notify = make_notify(arguments.notify, arguments.notify_on or "")
    return StartRequest(kind, arguments.name or "", options, notify, **more)


def _start_and_watch(arguments: Namespace, request: StartRequest, *, stdin: bool = False) -> int:
    line = None if arguments.detach else CommandEnd()
    stdin = stdin and line is not None and _may_read_stdin() and not opens_app(arguments)
    started = start_run(request, line, stdin=stdin)
    if stdin:
        _let_go_of_stdin()
    hosts = started.read_run().options.multihost
    if hosts is not None and hosts.by_hand:
        print(f"on each other host: ftmon run --join {shlex.quote(str(join_path(started)))} -- COMMAND", flush=True)
    if arguments.listen:
        from .remote import listen_line

        print(listen_line(started, arguments.listen), flush=True)
    if line is None:
        print(attach_line(started.id))
        return 0
    return watch(started, arguments, line)


def _may_read_stdin() -> bool:
    """Return whether the job may read standard input: not a shell's terminal while in the background."""
    try:
        os.fstat(0)
        return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _let_go_of_stdin() -> None:
    """Close this command's end of a pipe, so that its writer sees it closed when the job closes it."""
    if not os.isatty(0):
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)


SWEEP = "ftmon.trainer.sweep"


def sweep(arguments: Namespace) -> int:
    """Run a sweep; return 0 if every run has its row, 1 if the sweep ended earlier, 2 for an invalid file.

    In a terminal it opens the app, and the sweep continues after leaving it; otherwise it prints lines.
    """
    if arguments.json or arguments.plan or not opens_app(arguments):
        become(SWEEP, sweep_words(arguments))
    return _in_app(arguments)


def sweep_words(arguments: Namespace) -> list[str]:
    """Return the arguments of the process that runs the sweep."""
    return [
        arguments.sweep,
        *words_of(arguments, ("output", "plan", "price", "fail_fast", "on", "jobs", "gpus", "slurm", "json")),
    ]


def _in_app(arguments: Namespace) -> int:
    from ..screens.sweep import run_sweep_app

    path = Path(arguments.output or default_output(arguments.sweep))
    if not _goes_on(path):
        _start(path, arguments)
    model = run_sweep_app(path, ascii_only=draws_ascii(arguments))
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
    from ..model.sweep import SweepModel

    model = SweepModel(path)
    with suppress(ResultsError):
        model.refresh()
        return model.alive
    return False


def _start(path: Path, arguments: Namespace) -> None:
    """Start the sweep's process, which outlives this one, and wait until it accepts its file."""
    log = path.with_name(f"{path.name}.log")  # never the results file itself, with any suffix
    try:
        output = log.open("wb")
    except OSError as error:
        raise ResultsError(f"{log}: cannot be written: {error.strerror}") from None
    read_end, write_end = os.pipe()
    with output, open(read_end, "rb") as accepted:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", SWEEP, *sweep_words(arguments), f"--accepted={write_end}"],
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
        text = log.read_text(errors="replace").strip().removeprefix("ftmon: ")
        raise StartFailedError(text or "the sweep did not start", process.returncode)
