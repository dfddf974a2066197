"""Starting the trainer: check everything that can be checked without torch, then start a run.

``python -m ftmon.trainer.recipe.start`` reads a ``StartRequest`` (JSON) of kind ``train`` or ``demo`` on standard input
and prints one JSON line, ``{"run": "<run directory>"}``; a mistake is one line on stderr and exit status 2.
``... print-config`` writes a commented default configuration.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigError, FtmonError, UsageError
from ...protocol.run import exits
from ...protocol.run.rundir import Recipe, RunDir, home
from ...protocol.run.start import (
    StartRequest,
    bytecode_environment,
    module_command,
    print_started,
    read_request,
)
from ...protocol.run.targets import check_report_to
from ...protocol.text import sanitize
from ..launch import start
from . import faults, hardware, launcher
from .checkpoint import manifest as checkpoints
from .config import write
from .config.load import Loaded, is_assignment, load, of_model_and_data
from .config.schema import Config
from .hardware import free_port, usable_gpus
from .preflight.resolve import Resolved, check_hub, resolve


def launch_command(resolved: Resolved) -> list[str]:
    """Return the command for all ranks of this host."""
    port = resolved.config.run.master_port or free_port()
    return launcher.command(resolved.ranks, resolved.gpus, port, ["-m", "ftmon.trainer.recipe"])


def launch_environment(resolved: Resolved, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of the ranks to add to ``base``."""
    result = {
        "DS_ACCELERATOR": resolved.device,
        # The working directory must not shadow modules (such as a script called datasets.py).
        "PYTHONSAFEPATH": "1",
        # All ranks are on this host. Without it gloo resolves the host's own name, which often fails.
        "GLOO_SOCKET_IFNAME": base.get("GLOO_SOCKET_IFNAME", "lo"),
        "TOKENIZERS_PARALLELISM": base.get("TOKENIZERS_PARALLELISM", "false"),
        # Compiled code is used again by later runs. PyTorch's own place is in /tmp, which ends with a container.
        "TORCHINDUCTOR_CACHE_DIR": base.get("TORCHINDUCTOR_CACHE_DIR") or str(home() / "compiled"),
        **bytecode_environment(base),
    }
    threads = str(resolved.config.run.threads)
    if resolved.device == "cpu":
        result["OMP_NUM_THREADS"] = threads
        result["CUDA_VISIBLE_DEVICES"] = ""
    else:
        result["OMP_NUM_THREADS"] = base.get("OMP_NUM_THREADS", threads)
    return result


DATA = Path(__file__).parent / "data" / "instructions.jsonl"

_BOTH = """
tokenizer: {vocab_size: 2048}
data: {packing: true}
zero: {stage: 2}
"""
_CPU = """
model:
  config: {model_type: qwen2, hidden_size: 256, intermediate_size: 768, num_hidden_layers: 6, num_attention_heads: 4,
           num_key_value_heads: 2, tie_word_embeddings: true}
evaluation: {share: 0.05, every: 40, samples: 1}
optimizer: {lr: 1.5e-3, weight_decay: 0.05}
schedule: {warmup_steps: 8}
training: {max_steps: 120, micro_batch: 2, grad_accumulation: 2, sequence_length: 128}
output: {log_every: 5}
run: {name: demo, ranks: 2, device: cpu}
"""
_GPU = """
model:
  config: {model_type: qwen2, hidden_size: 1024, intermediate_size: 2816, num_hidden_layers: 16,
           num_attention_heads: 16, num_key_value_heads: 8, tie_word_embeddings: true}
evaluation: {share: 0.05, every: 100, samples: 1}
optimizer: {lr: 3.0e-4, weight_decay: 0.05}
schedule: {warmup_steps: 20}
training: {max_steps: 400, micro_batch: 4, grad_accumulation: 2, sequence_length: 128}
run: {name: demo, device: cuda}
"""


def demo_config(overrides: list[str]) -> Loaded:
    """Return the demo's configuration: all GPUs if there are any, else two CPU ranks."""
    on_cpu = "run.device=cpu" in overrides or not usable_gpus()
    return load(None, [f"data.path={DATA}", *overrides], _BOTH + (_CPU if on_cpu else _GPU))


def start_trainer(request: StartRequest, loaded: Loaded, notes: Sequence[str] = ()) -> RunDir:
    """Check a configuration and start its run, called after the request, ``run.name``, or the file.

    ``notes`` become comments of the run's configuration.
    What does not hold, or is missing, is a ``UsageError``; a run that cannot be started an ``FtmonError``.
    """
    request = _with_monitor(request, loaded)
    start.check_request(request)
    missing = hardware.missing_packages()
    if missing:
        raise UsageError(f"training needs {', '.join(missing)}, not installed here; run: pip install 'ftmon[train]'")
    check_hub(loaded)
    resolved = resolve(loaded)
    _make_output(loaded, resolved.config.output.dir)
    os.environ.update(launch_environment(resolved))
    source = request.given[0] if request.given else loaded.source
    name = request.name or resolved.config.run.name or Path(source).absolute().stem
    described = "".join(f"# {sanitize(note)}\n" for note in notes) + write.dump(resolved.config)
    return start.start_run(request, name, launch_command(resolved), described, _recipe(request, resolved.config))


def _with_monitor(request: StartRequest, loaded: Loaded) -> StartRequest:
    """Return the request with the configuration's ``monitor`` where the command line has no option for it."""
    found, options = loaded.config.monitor, request.options
    if found.metrics and not options.metrics:
        start.check_metrics(found.metrics, f"{loaded.places['monitor.metrics']}: monitor.metrics")
        options = msgspec.structs.replace(options, metrics=found.metrics)
    if found.report_to and not options.report_to:
        check_report_to(found.report_to, f"{loaded.places['monitor.report_to']}: monitor.report_to")
        options = msgspec.structs.replace(options, report_to=found.report_to)
    return msgspec.structs.replace(request, options=options)


def _recipe(request: StartRequest, config: Config) -> Recipe:
    data = config.data
    before = (RunDir(request.resume).read_run().recipe if request.resume else None) or Recipe(config=_file(request))
    options = {"run.ranks": request.ranks, "training.max_steps": request.steps, "debug.fault": request.fault}
    given = [f"{key}={value}" for key, value in options.items() if value is not None]
    return Recipe(
        config=before.config,
        # Without what MODEL and DATA stand for: those are its model and data.
        overrides=[*before.overrides, *(request.overrides if request.given else _overrides(request)), *given],
        model=config.model.name or f"{config.model.config.get('model_type', 'model')} (random weights)",
        data=[path for path in (data.path, data.name, *(file.path for file in data.files)) if path],
    )


def _file(request: StartRequest) -> str:
    """Return the configuration file as given; empty if everything is on the command line."""
    return "" if is_assignment(request.config) else request.config


def _overrides(request: StartRequest) -> list[str]:
    if request.given:
        return [*of_model_and_data(*request.given), *request.overrides]
    return request.overrides if _file(request) == request.config else [request.config, *request.overrides]


def _make_output(loaded: Loaded, folder: str) -> None:
    """Make the output folder now, while an error still reaches the terminal."""
    if folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise loaded.error("output.dir", f"{folder}: cannot be made: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m ftmon.trainer.recipe.start``; return its exit status."""
    arguments = _parser().parse_args(argv)
    if arguments.what == "print-config":
        print(write.commented_default(), end="")
        return 0
    try:
        request = read_request(sys.stdin.buffer)
        loaded = _demo(request) if request.kind == "demo" else _train(request)
        run = start_trainer(request, *(_with_choice(request, loaded) if loaded.chosen else (loaded, ())))
    except FtmonError as error:
        print(error, file=sys.stderr)
        return exits.of_error(error, exits.WRONG_USAGE)
    except OSError as error:
        # A path of the configuration, such as one with a name too long for the file system.
        refusal = UsageError(f"{error.filename or 'the configuration'}: cannot be used: {error.strerror or error}")
        print(refusal, file=sys.stderr)
        return refusal.exit_status
    print_started(run)
    return 0


def _train(request: StartRequest) -> Loaded:
    if request.resume:
        return _resumed(RunDir(request.resume), request.overrides)
    return load(_file(request) or None, _overrides(request))


class _Decision(msgspec.Struct):
    """What ``ftmon.trainer.predict.decide`` prints."""

    overrides: list[str]
    lines: list[str]


def _with_choice(request: StartRequest, loaded: Loaded) -> tuple[Loaded, list[str]]:
    """Return a configuration with what is ``auto`` chosen by a process of its own, and its reasons.

    Raises ``ConfigError`` if the process refused, or nothing fits.
    """
    if request.kind != "train" or request.resume:
        path = min(loaded.chosen)
        raise loaded.error(path, "is auto, which is for 'ftmon train' with a configuration or MODEL DATA")
    file, words = _file(request), _overrides(request)
    arguments = [*([] if request.measure else ["--no-measure"]), f"--parent={os.getpid()}"]
    arguments += [] if request.price is None else [f"--price={request.price}"]
    arguments += [] if request.progress is None else [f"--progress={request.progress}"]
    done = subprocess.run(
        module_command("ftmon.trainer.predict.decide", [*arguments, "--", *([file] if file else []), *words]),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        pass_fds=[] if request.progress is None else [request.progress],
        check=False,
    )
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().removeprefix("ftmon: ")
        raise ConfigError(text or f"the choice ended with status {done.returncode}")
    decision = msgspec.json.decode(done.stdout.splitlines()[-1], type=_Decision)
    return load(file or None, [*words, *decision.overrides]), decision.lines


def _resumed(run: RunDir, overrides: Sequence[str]) -> Loaded:
    """Return the configuration of a run, with the place of its newest complete checkpoint; without an injected fault.

    A run that ended before its first checkpoint continues from where it was itself resumed.
    """
    config = load(str(run.config)).config
    output = config.output.dir or str(run.path / "output")
    for place in (output, config.checkpoint.resume):
        if place not in ("never", "auto"):
            with contextlib.suppress(ConfigError):
                checkpoints.candidates(place, Path(place))
                return load(str(run.config), [f"checkpoint.resume={json.dumps(place)}", "debug.fault=", *overrides])
    raise UsageError(
        f"{run.id}: no complete checkpoint is in {output}/checkpoints; 'ftmon train' writes one every checkpoint.every "
        f"steps; to begin anew: ftmon train {run.config}"
    )


def _demo(request: StartRequest) -> Loaded:
    overrides = list(request.overrides)
    for option, value in (("steps", request.steps), ("ranks", request.ranks)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, not {value}")
    if request.ranks is not None:
        overrides.append(f"run.ranks={request.ranks}")
    if request.steps is not None:
        overrides.append(f"training.max_steps={request.steps}")
        warmup = min(8, request.steps // 4)
        overrides.insert(0, f"schedule.warmup_steps={warmup}")
    loaded = demo_config(overrides)
    if request.fault:
        try:
            faults.parse(request.fault, loaded.config.run.ranks or 1024)
        except UsageError as error:
            raise UsageError(f"--fault {error}") from None
        loaded = demo_config([*overrides, f"debug.fault={request.fault}"])
    return loaded


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.recipe.start", description=__doc__)
    commands = parser.add_subparsers(dest="what")
    commands.add_parser("print-config", help="write a commented default configuration")
    return parser


if __name__ == "__main__":
    sys.exit(main())
