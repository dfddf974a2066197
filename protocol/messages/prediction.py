"""The message with the predicted memory of a run of ftmon's own trainer; also ``prediction.json`` of a run.

The same rules as in ``telemetry``: msgspec structs as msgpack maps, sizes in bytes.
"""

import msgspec

from .bounds import Rank, Time, Whole


class PredictedPhase(msgspec.Struct, frozen=True, omit_defaults=True):
    """Peak memory of one phase of a steady step, in PyTorch's allocator."""

    name: str
    """``forward``, ``backward`` or ``optimizer``."""
    allocated_peak_bytes: Whole
    reserved_peak_bytes: Whole = 0
    parts: dict[str, Whole] = {}
    """Composition of the allocated peak by part (``memory.PARTS``); the parts add up to it."""


class PredictedPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank at one sequence length."""

    rank: Rank
    sequence_length: Whole
    """Length of the rank's batches; if ranks share sequences, of its slices."""
    phases: list[PredictedPhase]


class Prediction(msgspec.Struct, tag="prediction", frozen=True, omit_defaults=True):
    """Predicted memory of this run's steps, from a dry run of its configuration; or why there is no prediction."""

    time: Time
    """When the prediction was made."""
    points: list[PredictedPoint] = []
    """Points up to the configuration's length, for each rank of the dry run; other ranks are like the nearest one."""
    micro_batch: Whole = 0
    """Sequences of a micro-batch; times the length, the elements of a batch."""
    error: float = 0.0
    """Expected error of an allocated peak, as a share of it."""
    basis: str = ""
    """The measurements that the error is derived from."""
    gpu: str = ""
    """The kind of GPU of the dry run."""
    nvml_bytes: Whole = 0
    """Predicted NVML memory at the longest length, for the rank with the most."""
    step_seconds: float | None = None
    """Duration of a step at the longest length; None: unknown for this GPU."""
    refused: str = ""
    """Why there is no prediction; empty: there is one."""
    seconds: float = 0.0
    """Wall-clock time that the dry run took."""
    cached: bool = False
    """It was made for an earlier run of the same configuration."""
    config: str = ""
    """The configuration of the run, as YAML; empty: unknown."""
