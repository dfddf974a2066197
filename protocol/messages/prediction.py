"""The message with the predicted memory of a run of ftmon's own trainer; also ``prediction.json`` of a run.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, bytes are bytes.
"""

import msgspec

from .bounds import Rank, Time, Whole


class PredictedPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """The highest memory of one phase of a steady step, from PyTorch's allocator's point of view."""

    name: str
    """``forward``, ``backward`` or ``optimizer``."""
    allocated_peak_bytes: Whole
    reserved_peak_bytes: Whole = 0
    parts: dict[str, Whole] = {}
    """What the allocated peak consists of, by part as in ``memory.PARTS``; they add up to it."""


class PredictedPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank at one sequence length."""

    rank: Rank
    sequence_length: Whole
    """Of the rank's batches: of its slices where ranks share sequences."""
    phases: list[PredictedPhase]


class Prediction(msgspec.Struct, tag="prediction", frozen=True, omit_defaults=True):
    """Predicted memory of this run's steps, by a dry run of its configuration; or why there is none."""

    time: Time
    """When it was made."""
    points: list[PredictedPoint] = []
    """Lengths up to that of the configuration, of each rank that was run; others are like the nearest of these."""
    micro_batch: Whole = 0
    """Sequences of a micro-batch: with the length, the elements of a batch."""
    error: float = 0.0
    """Expected error of an allocated peak, as a share of it."""
    basis: str = ""
    """What that error was measured on."""
    gpu: str = ""
    """The kind of GPU of the dry run."""
    nvml_bytes: Whole = 0
    """What NVML was predicted to show at the longest length, of the highest rank."""
    step_seconds: float | None = None
    """Of a step at the longest length; None: not known of this GPU."""
    refused: str = ""
    """Why there is no prediction; empty: there is one."""
    seconds: float = 0.0
    """Wall-clock time that the dry run took."""
    cached: bool = False
    """It was made for an earlier run of the same configuration."""
    config: str = ""
    """The configuration of the run, as YAML; empty: not known."""
