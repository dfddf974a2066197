"""The prediction of a run that is going on: ``python -m ftmon.trainer.predict.live RUNDIR --gpu NAME``.

Started by the run's hub. Writes ``prediction.json`` into the run directory, from the cache where the same configuration
was predicted before. It uses only what the run leaves: idle priority, no GPU, first to be killed when memory ends.
Exit status: 0 written, also where the answer is a refusal.
"""

import argparse
import contextlib
import hashlib
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ... import __version__
from ...protocol.errors import FtmonError
from ...protocol.host import process
from ...protocol.host.machine import available_memory
from ...protocol.messages.memory import PredictedPhase, PredictedPoint, Prediction
from ...protocol.run import rundir
from ...protocol.run.rundir import RunDir
from ..host.processes import end_with_parent, lower_priority

_SHORTEST = 8
_LENGTHS = 5
_NEEDED_BYTES = 4 << 30  # Free host memory required: a dry run uses up to 0.5 GB per rank, two at a time, and libraries
_KEPT = 64
_OTHER = ("checkpoint", "output", "schedule", "monitor", "debug")
_VOLATILE = {"run": ("name", "master_port")} | dict.fromkeys(_OTHER)
"""Keys without an effect on a step's memory; None: the whole section."""
_PHASES = ("forward", "backward", "optimizer")


def main(argv: list[str] | None = None) -> int:
    """Write the prediction; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ftmon.trainer.predict.live", description=__doc__)
    parser.add_argument("run", metavar="RUNDIR")
    parser.add_argument("--gpu", required=True, help="as PyTorch names it")
    parser.add_argument("--parent", type=int, help="pid of the process with which this one ends")
    arguments = parser.parse_args(argv)
    if arguments.parent is not None:
        end_with_parent(arguments.parent)
    run = RunDir(arguments.run)
    config = run.config.read_text()
    kept = cache_file(config, arguments.gpu)
    found = _cached(kept)
    if found is None:
        lower_priority()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["OMP_NUM_THREADS"] = "1"
        found = made(run, config, arguments.gpu)
        if not found.refused:
            _keep(kept, found)
    else:
        found = msgspec.structs.replace(found, cached=True)
    process.write_private(run.prediction, msgspec.json.encode(msgspec.structs.replace(found, config=config)))
    return 0


def lengths(longest: int) -> list[int]:
    """Return the sequence lengths to predict: the longest, and its halves."""
    return sorted({max(_SHORTEST, longest >> halvings) for halvings in range(_LENGTHS)} - {0})


def made(run: RunDir, config: str, gpu: str) -> Prediction:
    """Return the prediction of a run's configuration by dry runs, or the reason of a refusal."""
    started = time.monotonic()
    free = available_memory()
    if free < _NEEDED_BYTES:
        return Prediction(time.time(), refused=f"the host has only {free / 2**30:.1f} GiB of memory left for it")
    with contextlib.suppress(OSError):
        os.chdir(run.read_run().cwd)
    from .__main__ import arguments_of, predict, quietly

    try:
        longest = int(yaml.safe_load(config)["training"]["sequence_length"])
        words = [f"--gpu={gpu}", f"--sequence-length={','.join(map(str, lengths(longest)))}", "--", str(run.config)]
        with quietly():
            found = predict(arguments_of(words), lambda what: None)
    except FtmonError as error:
        return Prediction(time.time(), refused=str(error))
    return _message(found, time.monotonic() - started)


def _message(found: Any, seconds: float) -> Prediction:
    from . import answer
    from .ranks import differing

    error = answer.EXPECTED_ERRORS["allocated_peak_bytes"]
    points: list[PredictedPoint] = []
    for point in found.points:
        # Stages 1 and 2 differ by rank, and so does their list; of ranks that are alike one is enough.
        alike = all(rank.phases == point.ranks[0].phases for rank in point.ranks)
        different = [0] if alike else differing(1, found.ranks)
        for number in different:
            phases = [
                PredictedPhase(name, phase.allocated_peak_bytes, phase.reserved_peak_bytes, phase.parts)
                for name, phase in point.ranks[number].phases.items()
                if name in _PHASES
            ]
            # A rank's batches are slices of this length.
            length = -(-point.sequence_length // found.sequence_parallel_size)
            points.append(PredictedPoint(number, length, phases))
    last = max(found.points, key=lambda point: point.sequence_length)
    return Prediction(
        time=time.time(),
        points=points,
        micro_batch=last.micro_batch,
        error=error.error,
        basis=error.basis,
        gpu=found.gpu,
        nvml_bytes=last.nvml_bytes,
        step_seconds=last.step_seconds,
        seconds=seconds,
    )


def cache_file(config: str, gpu: str) -> Path:
    """Return the cache file of a configuration's prediction, which may not exist."""
    settings: Any = yaml.safe_load(config)
    for section, names in _VOLATILE.items():
        if names is None:
            settings.pop(section, None)
        for name in names or ():
            settings.get(section, {}).pop(name, None)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    versions = [version(name) for name in ("torch", "deepspeed", "transformers")]
    text = msgspec.json.encode([settings, gpu, allocator, versions, __version__], order="sorted")
    return rundir.home() / "predictions" / f"{hashlib.sha256(text).hexdigest()[:32]}.json"


def _cached(path: Path) -> Prediction | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode(path.read_bytes(), type=Prediction)
        os.utime(path)
        return found
    return None


def _keep(path: Path, found: Prediction) -> None:
    """Cache a prediction for later runs, with the last used ones of the others; a full disk is ignored."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        process.write_private(path, msgspec.json.encode(found))
        by_age = sorted(path.parent.glob("*.json"), key=lambda one: -one.stat().st_mtime)
        for old in by_age[_KEPT:]:
            old.unlink(missing_ok=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # see predict.__main__
