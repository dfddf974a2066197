"""Predictions of a sweep's configurations, and its searches: earlier runs and predictions determine what is run."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import pynvml

from ...protocol.analysis.estimates.memory import Piece, beside_pytorch
from ...protocol.analysis.sweep.search import Tried, UndecidedError, largest, phase_curve
from ...protocol.analysis.sweep.summary import describe_pieces, settings_text, value_text
from ...protocol.errors import FtmonError
from ...protocol.host.machine import find_gpu
from ...protocol.sweep.rows import Planned, Predicted, Row, Search, Settings, group_of
from ...protocol.text import counted, sanitize
from ..host.hardware.gpus import Nvml
from ..predict.commands import parse
from ..predict.result import Point, Prediction
from ..recipe.config.load import load
from ..recipe.hardware import usable_gpus
from .plan import LENGTH, Spec, job, overrides
from .run import Session

_SECONDS = 900.0
_GPUS_OF_A_HOST = 8


class Predictor:
    """Predicts configurations of one sweep, one process for all lengths; ``say`` prints a line of progress."""

    def __init__(self, spec: Spec, say: Callable[[str], None]) -> None:
        self._spec = spec
        self._say = say
        self.notes: list[str] = []  # why predictions are missing
        smallest = smallest_gpu()
        self.capacity_bytes = spec.capacity_bytes or (smallest.memory_bytes if smallest else None)
        self._gpu = smallest.name if smallest and find_gpu(smallest.name) else ""
        """NVML's name of this host's GPUs; empty: not in the table, and ``ftmon predict`` takes its default."""
        self._gpus = len(usable_gpus())
        self.on = spec.predict and bool(spec.config) and self.capacity_bytes is not None
        """Whether configurations are predicted: only for ftmon's trainer, and with a known capacity."""

    def plan(self, runs: Sequence[Settings]) -> list[Planned]:
        """Return configurations with their predictions, in order."""
        if not self.on:
            return [Planned(settings) for settings in runs]
        groups: dict[str, list[Settings]] = {}
        for settings in runs:
            groups.setdefault(group_of(settings, LENGTH), []).append(settings)
        found: dict[int, Predicted] = {}
        for number, group in enumerate(groups.values(), 1):
            lengths = list(filter(None, map(_length, group)))
            of = f", {counted(len(lengths), 'sequence length')}" if len(lengths) > 1 else ""
            self._say(f"predicting {number} of {len(groups)}{of}")
            prediction = self.predict(group[0], lengths)
            points = prediction.points if prediction is not None else []
            by_length = {point.sequence_length: point for point in points}
            for settings in group:
                point = by_length.get(_length(settings)) or (points[0] if points and not _length(settings) else None)
                if point is not None:
                    found[id(settings)] = predicted(point)
        return [Planned(settings, found.get(id(settings))) for settings in runs]

    def predict(self, settings: Settings, lengths: Sequence[int]) -> Prediction | None:
        """Return a configuration's prediction at lengths (empty: its own); None, after adding a note, without one."""
        varied = {name: value for name, value in settings.items() if name != LENGTH}
        try:
            words = self.words(varied, lengths)
        except FtmonError as error:
            return self._none(str(error))
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "ftmon.trainer.predict", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=job(self._spec, varied, "predict").environment,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return self._none(f"not within {_SECONDS:.0f} s")
        try:
            return msgspec.json.decode(done.stdout, type=Prediction)
        except msgspec.MsgspecError:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            return self._none(lines[-1].removeprefix("ftmon: ") if lines else "it ended without an answer")

    def _none(self, reason: str) -> None:
        note = f"no prediction: {sanitize(reason, 300)}"
        if note not in self.notes:
            self.notes.append(note)

    def words(self, settings: Settings, lengths: Sequence[int]) -> list[str]:
        """Return the arguments of ``ftmon predict`` for a configuration.

        Raises ``FtmonError`` if the configuration cannot be used.
        """
        assignments = overrides(self._spec, settings)
        config = load(self._spec.config, assignments).config
        ranks = config.run.ranks or self._gpus or 1
        words = [f"--ranks={ranks}", "--json"]
        if lengths:
            words.append(f"--sequence-length={','.join(map(str, sorted(set(lengths))))}")
        if self._gpu:
            words.append(f"--gpu={self._gpu}")
        if self.capacity_bytes is not None:
            hosts = -(-ranks // _GPUS_OF_A_HOST)
            beside = beside_pytorch(min(ranks, _GPUS_OF_A_HOST), hosts, config.zero.offload_optimizer)
            words.append(f"--capacity={max(1, self.capacity_bytes - round(beside.value))}")
        return [*words, "--", self._spec.config, *assignments]


def _length(settings: Settings) -> int:
    value = settings.get(LENGTH)
    return value if isinstance(value, int) else 0


def predicted(point: Point) -> Predicted:
    """Return the highest rank's figures of a predicted point. ``init`` is no phase of a step."""
    phases = {
        name: max(rank.phases[name].allocated_peak_bytes for rank in point.ranks)
        for name in point.ranks[0].phases
        if name != "init"
    }
    highest = max(phases, key=lambda name: phases[name])
    reserved = max(rank.reserved_peak_bytes for rank in point.ranks)
    seconds = point.step_seconds or 0.0
    return Predicted(phases[highest], highest, reserved, point.nvml_bytes, point.fits, phases, seconds)


def gpus_of(spec: Spec, grid: Sequence[Settings]) -> int:
    """Return the ranks of the largest configuration; without a number in it, this host's GPUs, or 1."""
    assumed = len(usable_gpus()) or 1
    if spec.command:
        return max((_started(spec, settings) or assumed for settings in grid), default=assumed)
    varied: list[Settings] = [{"run.ranks": value} for value in spec.axes.get("run.ranks", [])] or [{}]
    return max(load(spec.config, overrides(spec, one)).config.run.ranks or assumed for one in varied)


def _started(spec: Spec, settings: Settings) -> int | None:
    """Return the number of ranks that a command starts; None: it does not say, as a script may start its own."""
    searched = {spec.search.axis: spec.search.low} if spec.search is not None else {}
    command = job(spec, {**settings, **searched}, "plan").request.command
    try:
        ranks = parse(command).ranks
    except FtmonError:
        return None
    return None if ranks == 1 and "python" in command[0] else ranks


class HostGpu(NamedTuple):
    """A GPU of this host, by NVML's name."""

    name: str
    memory_bytes: int


def smallest_gpu() -> HostGpu | None:
    """Return the GPU of this host with the least memory; None where PyTorch can use none."""
    if not usable_gpus():
        return None
    try:
        nvml = Nvml()
    except pynvml.NVMLError:
        return None
    samples = nvml.samples("", 0.0, {})
    nvml.close()
    gpus = [
        HostGpu(sample.name, gpu.memory_bytes if (gpu := find_gpu(sample.name)) else sample.total_bytes)
        for sample in samples
    ]
    return min(gpus, key=lambda gpu: gpu.memory_bytes, default=None)


_PREDICTED_POINTS = 9  # number of lengths at which a searched axis is predicted


def search(session: Session, predictor: Predictor, wanted: Search, grid: Sequence[Settings]) -> list[str]:
    """Search along an axis for each combination of the others; return the results, a line each.

    Raises ``StopError`` from the session.
    """
    lines: list[str] = []
    for others in grid:
        where = f"{settings_text(others)}: " if others else ""
        try:
            lines.append(where + _one(session, predictor, wanted, others))
        except UndecidedError as error:
            lines.append(f"{where}cannot tell: {error}")
    return lines


def _one(session: Session, predictor: Predictor, wanted: Search, others: Settings) -> str:
    axis = wanted.axis
    known, pieces = _predictions(predictor, wanted, others)

    def row_of(value: int) -> Row:
        """Return the row of a run that was done, or is out of memory."""
        row = session.measure({**others, axis: value}, 0, known.get(value))
        if row.verdict not in ("done", "out-of-memory"):
            raise UndecidedError(f"{axis}={value_text(value)} {row.verdict}: {row.text}")
        return row

    def tried(value: int) -> Tried:
        row = row_of(value)
        return Tried(row.verdict == "done", float(row.reserved_bytes or row.peak_bytes or 0))

    def peaks(value: int) -> Mapping[str, float] | None:
        row = row_of(value)
        if row.verdict == "done" and not row.phase_peaks:
            raise UndecidedError(f"{axis}={value_text(value)} has no measured step")
        return row.phase_peaks if row.verdict == "done" else None

    if wanted.goal == "largest":
        guess = max((value for value, one in known.items() if one.fits), default=None)
        found = largest(tried, wanted.low, wanted.high, wanted.step, guess)
        name = axis.rpartition(".")[2]
        if found.value is None:
            return f"not even {name} {value_text(wanted.low)} fits"
        more = "; larger ones may, too" if found.at_the_end else ""
        return f"the largest {name} that fits is {value_text(found.value)}{more}"
    _, curve = phase_curve(peaks, wanted.low, wanted.high, pieces)
    return describe_pieces(curve, axis) if curve else f"not even {value_text(wanted.low)} fits"


def _predictions(predictor: Predictor, wanted: Search, others: Settings) -> tuple[dict[int, Predicted], list[Piece]]:
    """Predict some values of the searched length, then those around the largest that fits; empty for other axes."""
    if not predictor.on or wanted.axis != LENGTH:
        return {}, []
    last = (wanted.high - wanted.low) // wanted.step
    numbers = sorted({round(last * part / (_PREDICTED_POINTS - 1)) for part in range(_PREDICTED_POINTS)})
    found = predictor.predict(others, [wanted.low + number * wanted.step for number in numbers])
    if found is None:
        return {}, []
    known = {point.sequence_length: predicted(point) for point in found.points}
    if wanted.goal == "largest":
        guess = _crossing(known, wanted, predictor.capacity_bytes)
        near = predictor.predict(others, [guess]) if guess is not None and guess not in known else None
        known |= {point.sequence_length: predicted(point) for point in near.points} if near is not None else {}
    return known, found.pieces


def _crossing(known: Mapping[int, Predicted], wanted: Search, capacity: int | None) -> int | None:
    """Return the value at which a line from the last fitting to the first failing value reaches the capacity."""
    fits = max((value for value, one in known.items() if one.fits), default=None)
    over = min((value for value, one in known.items() if one.fits is False), default=None)
    if fits is None or over is None or capacity is None:
        return None
    low, high = known[fits].nvml_bytes, known[over].nvml_bytes
    share = (capacity - low) / (high - low) if high > low else 0.0
    value = fits + min(max(share, 0.0), 1.0) * (over - fits)
    return wanted.low + int((value - wanted.low) // wanted.step) * wanted.step
