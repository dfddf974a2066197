"""Predicts memory: ``python -m ftmon.trainer.predict --model M --deepspeed DS.json --sequence-length S[,S...]``.

Or of ftmon's own trainer: ``python -m ftmon.trainer.predict CONFIG [key.sub=value ...]``; of a script:
``python -m ftmon.trainer.predict --script -- deepspeed train.py ...``.
Exit status: 0 predicted, 2 wrong usage or configuration.
"""

import argparse
import contextlib
import gc
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Self

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.ranking import Need
from ...protocol.analysis.estimates.time import epoch_cost
from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.text import duration, escape_json, sanitize, terminal_width, wrapped
from ..host.processes import end_with_parent, lower_priority
from ..recipe.config.load import load
from . import answer, deepspeed_file, explain, jobs, ranks
from .result import Prediction

_DEEPSPEED = "deepspeed: "


def main(argv: list[str] | None = None) -> int:
    """Print a prediction; return the exit status."""
    arguments = arguments_of(argv)
    if arguments.background is not None:
        end_with_parent(arguments.background)
        lower_priority(idle=False)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        with quietly(), Progress(as_json=arguments.background is not None) as tell:
            prediction = predict(arguments, tell)
    except FtmonError as error:
        print(wrapped(sanitize(f"ftmon: {_placed(str(error), arguments.deepspeed)}"), 2), file=sys.stderr)
        return error.exit_status
    if arguments.json:
        print(escape_json(msgspec.json.encode(prediction).decode()))
    else:
        text = answer.render(prediction, terminal_width(1))
        print("\n".join(wrapped(line, 1) for line in text.split("\n")), end="")
    return 0


def _placed(refusal: str, path: str | None) -> str:
    """Return DeepSpeed's refusal with the line of its file; other texts unchanged."""
    words = refusal.removeprefix(_DEEPSPEED)
    return refusal if path is None or words == refusal else f"{deepspeed_file.place(path, words)}: {words}"


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command's arguments, with defaults for omitted ones."""
    arguments = _parser().parse_args(argv)
    if arguments.script:
        arguments.command = [arguments.config, *arguments.overrides] if arguments.config else []
        arguments.config, arguments.overrides = None, []
    return arguments


def predict(arguments: argparse.Namespace, tell: Callable[[str], None]) -> Prediction:
    """Return the prediction for the command's arguments; ``tell`` is called with each activity before it begins.

    Raises ``ConfigError`` if the model or the configuration cannot be used.
    """
    allocator = allocator_settings()
    tell(_PREPARING)
    if arguments.config:
        _choose(arguments, tell)
    job = jobs.prepare(arguments, allocator)
    tell(_IMPORTING)
    further = arguments.what_if or arguments.largest or arguments.data
    ranks.warm([*jobs.modules(job.config), *([f"{__package__}.what_if"] if further else [])])
    if further:
        return _with_further(job, allocator, arguments, tell)
    ranks.warm(jobs.compiler(job.config))
    tell("the run as it is")
    found = answer.predict_both(job, None, arguments.capacity, arguments.price).found
    return _explained(found, job, arguments)


def _explained(found: Prediction, job: jobs.Prepared, arguments: argparse.Namespace) -> Prediction:
    """Return a prediction with its explanation, if that is asked for."""
    if not arguments.explain:
        return found
    return msgspec.structs.replace(found, explained=explain.parts(found, job.config, arguments.measured))


def _with_further(
    job: jobs.Prepared, allocator: Settings, arguments: argparse.Namespace, tell: Callable[[str], None]
) -> Prediction:
    """Return the prediction with what further dry runs show: changes, the largest lengths, the steps of the data."""
    # Not at the top: they import torch, and a configuration with an error is refused before that.
    from . import what_if
    from .script import NOT_CHANGED

    tell("the run as it is")
    capacity = arguments.capacity
    if arguments.what_if or arguments.data:
        capacity = capacity or answer.capacity_of(job)
    other = what_if.expandable(allocator) if arguments.what_if else None
    # Not with the data's rows, which are read below.
    further = what_if.Further({}, {}, {})
    if arguments.what_if and not arguments.data:
        further = what_if.further(arguments, allocator, job, capacity or 0)
    with contextlib.ExitStack() as context:
        beside = [context.enter_context(ranks.Beside(further.uncompiled)).results]
        ranks.warm(jobs.compiler(job.config))
        beside.append(context.enter_context(ranks.Beside(further.beside)).results)
        if arguments.data:
            job, both = _with_data(job, capacity or 0, arguments, other, tell)
        else:
            both = answer.predict_both(job, other, capacity, arguments.price, further.after)
        found = _explained(both.found, job, arguments)
        if arguments.largest:
            found = what_if.add(found, job, arguments, allocator, tell)
        if not arguments.what_if:
            return found
        rows = what_if.table(arguments, allocator, both, capacity or 0, tell, beside)
    notes = [*found.notes, NOT_CHANGED] if arguments.command else found.notes
    return msgspec.structs.replace(found, what_if=rows, notes=notes)


def _choose(arguments: argparse.Namespace, tell: Callable[[str], None]) -> None:
    """Add the choice of what is ``auto`` in a configuration, made by a forked process, and what it read of the data.

    Raises ``ConfigError`` if the configuration cannot be used, or nothing fits.
    """
    loaded = load(arguments.config, arguments.overrides)
    if not loaded.chosen:
        return
    tell("choosing what is auto")
    ranks.warm([f"{__package__}.decide"])
    count = arguments.ranks or loaded.config.run.ranks or 1
    words = [f"--gpus={count}x{arguments.gpu}", "--", arguments.config, *arguments.overrides]
    # Imported by its name: it imports this module.
    decide = sys.modules[f"{__package__}.decide"]
    known = ranks.once(partial(decide.known, words, tell), decide.Known)
    arguments.overrides = [*arguments.overrides, *known.overrides]
    arguments.label_share = known.label_share
    if known.pairs_a_token is not None:
        from .recipe import of_sample

        arguments.documents = of_sample(known.pairs_a_token)


def _with_data(
    job: jobs.Prepared,
    capacity: int,
    arguments: argparse.Namespace,
    other: Settings | None,
    tell: Callable[[str], None],
) -> tuple[jobs.Prepared, answer.Both]:
    """Return a run after reading its data set, and its prediction with its steps and those that do not fit.

    Other runs prepared from the arguments have rows packed as in the data set, too.
    """
    from . import recipe, what_if

    config = job.config
    if config is None:
        raise UsageError("--data needs CONFIG.yaml, which names the data")
    tell("reading the data set")
    records, examples = what_if.read(config)
    epochs = config.training.epochs
    steps = job.steps or math.ceil(epochs * what_if.steps_an_epoch(config, examples))
    arguments.rows = len(examples.rows)
    arguments.label_share = float(examples.label_tokens.sum() / examples.tokens.sum())
    if config.data.packing:
        arguments.documents = recipe.of_rows(examples.rows.document_lengths())
    job = jobs.prepare(arguments, allocator_settings())
    both = answer.predict_both(job._replace(steps=steps), other, capacity, arguments.price)

    def run(lengths: list[int]) -> list[Need]:
        tell(f"{len(lengths)} of the data set's lengths, up to {lengths[-1]:,} tokens")
        points = answer.predict(job._replace(lengths=lengths), capacity).points
        return [Need(point.needed_bytes, [bool(point.fits)]) for point in points]

    risk = what_if.find(config, records, examples, capacity, run)
    point = max(both.found.points, key=lambda one: one.sequence_length)
    if point.step_seconds:
        epoch = epoch_cost(point.step_seconds, risk.steps, 1, job.ranks, arguments.price or 0.0)
        paid = None if arguments.price is None else epoch.price
        risk = msgspec.structs.replace(risk, epoch_seconds=epoch.seconds, epoch_price=paid)
    return job, both._replace(found=msgspec.structs.replace(both.found, data=risk))


class Progress:
    """Prints on standard error what a prediction does, once it has taken 2 s; used as a context.

    A call names the next activity; a long one is printed again with its duration so far. Lines are written by a
    thread, without Python's streams, whose locks a forked process would inherit. ``as_json``: print each dry run at
    once as a JSON object, for the process that waits for a background prediction.
    """

    def __init__(self, *, as_json: bool = False, activity: str = "predicting", descriptor: int = 2) -> None:
        self._as_json = as_json
        self._activity = activity
        self._descriptor = descriptor
        self._began = self._changed = time.monotonic()
        self._what = _PREPARING
        self._printed = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        if not self._as_json:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if not self._as_json:
            self._thread.join()  # its last line comes before the answer or the refusal

    def __call__(self, what: str) -> None:
        """Begin another activity."""
        self._what, self._changed = what, time.monotonic()
        if self._as_json:
            if what not in _BEFORE_DRY_RUNS:
                _write(2, json.dumps({"predicting": what}))
        elif what != self._printed and self._changed - self._began >= _SILENT_SECONDS:
            self._print(what)

    def _watch(self) -> None:
        self._over.wait(_SILENT_SECONDS)
        while not self._over.is_set():
            what, taken = self._what, time.monotonic() - self._changed
            if what != self._printed:
                self._print(what)
            elif taken >= _REPEAT_SECONDS:
                self._print(what, f", {duration(round(taken))} so far")
            self._over.wait(_REPEAT_SECONDS)

    def _print(self, what: str, more: str = "") -> None:
        self._printed = what
        _write(self._descriptor, f"{self._activity}: {sanitize(what)}{more}")


_PREPARING = "reading the configuration of the model and the run"
_IMPORTING = "importing torch, transformers and DeepSpeed"
_BEFORE_DRY_RUNS = (_PREPARING, _IMPORTING)
_SILENT_SECONDS = 2.0
_REPEAT_SECONDS = 10.0


def _write(descriptor: int, line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{wrapped(line, descriptor)}\n".encode())


def allocator_settings() -> Settings:
    """Return the settings of PyTorch's allocator in this environment; a wrong or unsupported one is refused."""
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    try:
        settings = Settings.parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if settings.per_process_memory_fraction < 1:
        raise ConfigError(
            "PYTORCH_CUDA_ALLOC_CONF: per_process_memory_fraction is not predicted; leave it out, and give "
            "what PyTorch may reserve with --capacity"
        )
    return settings


@contextlib.contextmanager
def quietly() -> Generator[None]:
    """Discard standard output and error in the body, to keep libraries' output out of the answer.

    Garbage is not collected before ``ranks.warm`` has imported the libraries: it would take a quarter of that time.
    """
    gc.disable()
    logging.disable(logging.CRITICAL)
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
            os.dup2(nothing.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        gc.enable()


def _lengths(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers of 1 or more, separated by commas, not {text!r}")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftmon predict", description="predict the memory of a training step")
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*", default=[])
    parser.add_argument("--model")
    parser.add_argument("--deepspeed")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--accumulation", type=int)
    parser.add_argument("--sequence-length", type=_lengths)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora-rank", type=int)
    parser.add_argument("--optimizer", choices=sorted(deepspeed_file.OPTIMIZERS))
    parser.add_argument("--capacity", type=int)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--price", type=float)
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--what-if", action="store_true")
    parser.add_argument("--explain", action="store_true")
    parser.add_argument("--measured", type=json.loads, default={}, help="bytes by part of a run, as a JSON object")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--script", action="store_true", help="what follows -- is a command that starts a script")
    parser.set_defaults(command=[])
    parser.add_argument("--background", type=int, metavar="PID", help="at low priority, until that parent ends")
    return parser


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # a closed pipe (``| head``)
        status = 1
    sys.stderr.flush()
    # At once: on unloading, PyTorch's libraries would call the device that a dry run has installed.
    os._exit(status)
