"""A prediction: the JSON of ``ftmon predict --json``."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.analysis.estimates.memory import Figure, Piece
from ...protocol.analysis.estimates.ranking import Largest
from ...protocol.analysis.estimates.time import StepTime
from ...protocol.errors import ConfigError
from ..recipe.preflight.resolve import hub_refusal


class Phase(msgspec.Struct, frozen=True):
    """Highest memory of one phase, from PyTorch's allocator's point of view."""

    allocated_peak_bytes: int
    reserved_peak_bytes: int
    parts: dict[str, int] = {}
    """Composition of the allocated peak, by the parts of the memory screen; they add up to it. Empty for ``init``."""
    logits: dict[str, int] = {}  # Of these, bytes of tensors over the vocabulary


class Rank(msgspec.Struct, frozen=True):
    """One rank's memory."""

    rank: int
    phases: dict[str, Phase]  # ``init``, ``forward``, ``backward``, ``optimizer``
    host_bytes: int  # Host memory of its tensors: offloaded states and page-locked buffers, without the process itself
    needed_bytes: int = 0
    """Minimum of reservable memory with which, as with any more, every allocation succeeds, found by replays of the
    trace; below the reserved peak if cached memory can be freed."""
    nvml_bytes: int = 0  # Memory of the process by NVML at its peak: reserved, the CUDA context and NCCL's buffers

    @property
    def peak_phase(self) -> str:
        """The phase with the highest allocated peak."""
        return max(self.phases, key=lambda name: self.phases[name].allocated_peak_bytes)

    @property
    def allocated_peak_bytes(self) -> int:
        """Highest allocated memory of all phases."""
        return max(phase.allocated_peak_bytes for phase in self.phases.values())

    @property
    def reserved_peak_bytes(self) -> int:
        """Highest reserved memory of all phases."""
        return max(phase.reserved_peak_bytes for phase in self.phases.values())


class Point(msgspec.Struct, frozen=True):
    """Memory at one sequence length and micro-batch."""

    sequence_length: int
    micro_batch: int
    ranks: list[Rank]
    host_bytes: int  # Host memory of all ranks' tensors
    nvml_bytes: int  # Highest over the ranks
    fits: bool | None = None  # Whether every rank's allocations fit; None without a capacity
    fails_in: str = ""  # The phase whose allocation does not fit
    tight: bool = False
    """Whether it does not fit reliably: with the capacity or less every allocation happens to succeed, with more (up to
    ``needed_bytes``) one fails."""
    needed_bytes: int = 0  # Highest over the ranks
    step_seconds: float | None = None
    """Time of an optimizer step; None if the table has no rates of the GPU. Its error and basis: ``time.total``."""
    tokens_per_second: float | None = None  # Tokens per second of all ranks
    mfu: float | None = None  # Model FLOPs utilisation (``protocol.host.machine``); None if the FLOPs are not known
    price_per_million_tokens: float | None = None  # Price in the currency of the GPU hour's price; None without that
    run_seconds: float | None = None
    """Time of all optimizer steps; None if their number is not known (``training.max_steps``)."""
    run_price: float | None = None
    """Price of the run, given a price of a GPU hour; without evaluation, checkpoints and the start."""
    time: StepTime | None = None  # Parts of the step's time
    fits_on: list[str] = []  # Kinds of GPU (``FIT_TABLE``) on which all allocations fit, besides CUDA context and NCCL


class Made(msgspec.Struct, frozen=True):
    """What the sums of an estimate need to know of a model and its engine."""

    largest_layer: int  # Parameters of the module with most parameters of its own
    layers: int  # 0: not known
    hidden: int
    vocabulary: int  # 0: not known
    weight_bytes: int
    gradient_bytes: int  # Of a gradient in its partition and in a bucket
    stage: int
    offloads_states: bool
    offloads_weights: bool
    checkpointing: bool
    bucket_elements: int
    buckets: int  # Buckets that exist at a time: with ``overlap_comm`` 2 under ZeRO-1 and ZeRO-2
    estimate: "Estimate | None" = None


class Estimate(msgspec.Struct, frozen=True):
    """DeepSpeed's own estimate, which depends on no length and no batch."""

    function: str
    bytes: int
    formula: str


class Part(msgspec.Struct, frozen=True):
    """One part of a rank's memory, as a sum made by hand."""

    name: str
    formula: str
    bytes: int  # Result of the formula
    predicted_bytes: int  # Highest of all phases at the longest length
    measured_bytes: int | None = None  # Of the given run; None: not measured


class WhatIf(msgspec.Struct, frozen=True):
    """A change of the run, predicted by a separate dry run or ``fitted``."""

    name: str
    change: str
    fits: bool
    needed_bytes: int  # Minimum of memory that PyTorch must be able to reserve
    saved_bytes: int  # Reduction relative to the unchanged run
    host_bytes: int  # Host memory of the rank with the most, as in the table of the phases
    step_seconds: float
    slower: float  # GPU time per sample relative to the unchanged run
    price_per_million_tokens: float | None = None
    refused: str = ""  # Reason of a missing prediction, with which the figures are invalid
    fitted: bool = False  # Whether the figures follow from the unchanged run's parts; the memory is then up to 6 % off


class Holds(msgspec.Struct, frozen=True):
    """Largest sequence length and micro-batch."""

    gpu: str  # The kind of GPU; empty: the given capacity
    capacity_bytes: int  # Limit of PyTorch's reserved memory on it
    sequence_length: Largest  # Largest length at the requested micro-batch, within 0.8 %
    micro_batch: Largest  # Largest micro-batch at the longest requested length


class RiskyStep(msgspec.Struct, frozen=True):
    """An optimizer step of the first epoch, by its longest micro-batch."""

    step: int  # Number of the step, from 1
    rank: int  # The first of the ranks that share the rows
    rows: list[int]  # Numbers of the examples, as in the rehearsal
    places: list[str]  # Place of each row's records: ``train.jsonl:12``
    length: int  # Padded length of its rows, in tokens


class DataRisk(msgspec.Struct, frozen=True):
    """Whether every step of the first epoch fits."""

    steps: int  # Steps of the epoch
    longest: RiskyStep
    largest_length: int | None  # The largest occurring length that fits, or None
    failing_steps: int  # Number of steps that do not fit
    failing: list[RiskyStep]  # The first steps that do not fit
    epoch_seconds: float | None = None
    """Time of an epoch's optimizer steps at ``training.sequence_length``, without evaluation, checkpoints and start."""
    epoch_price: float | None = None  # With a price of a GPU hour, in its currency


class Prediction(msgspec.Struct, frozen=True):
    """The answer of ``ftmon predict``."""

    model: str
    parameters: int
    ranks: int
    points: list[Point]
    pieces: list[Piece] = []  # With several lengths: the highest phase's peak over the length as straight pieces
    beside_pytorch: Figure | None = None  # Bytes on the GPU besides PyTorch's reserved memory, and their expected error
    notes: list[str] = []  # Assumptions
    capacity_bytes: int | None = None
    gpu: str = ""  # The kind of GPU of the dry run and the time
    trainable: int = 0  # Number of trained parameters
    checkpoint_bytes: int = 0  # Disk space of one checkpoint for a resume, of all ranks
    price_per_gpu_hour: float | None = None
    expected_errors: dict[str, Figure] = {}  # By figure: its expected error as a share, and the basis; ``value`` is 0
    data: DataRisk | None = None  # With ``--data``: the steps of the first epoch that do not fit
    positions: int = 0  # The model's maximum sequence length in tokens; 0: not known
    largest: list[Holds] = []  # With ``--largest``: by kind of GPU, or for the capacity
    batch_pieces: list[Piece] = []
    """With ``--largest``: the highest phase's peak over the micro-batch, at the longest length."""
    what_if: list[WhatIf] = []  # Changes at the longest length: fitting ones by GPU time per sample, others by lack
    sequence_parallel_size: int = 1  # Ranks that share each sequence
    made: Made | None = None  # The model and the engine; their ``estimate`` is DeepSpeed's
    explained: list[Part] = []
    """With ``--explain``: the parts of the rank with the highest peak, at the longest length."""
    versions: dict[str, str] = {}


_CONFIG = "config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # ``organisation/model`` or ``model``
_NOT_FOUND = {
    "is not a valid model identifier": "no such folder or file, and no such model on the Hugging Face hub",
    "is not a local folder": "no such folder or file, and no such model on the Hugging Face hub",
    "gated repo": "the model is gated: accept its licence on the Hugging Face hub, then 'hf auth login'",
    "connect to": "not in the local cache, and the Hugging Face hub cannot be reached; give a folder or a file",
    "connection error": "not in the local cache, and the Hugging Face hub cannot be reached; give a folder or a file",
    "does not appear to have a file": f"has no {_CONFIG} on the Hugging Face hub",
}
"""Reasons by texts in transformers' errors (``transformers/utils/hub.py``, ``cached_files``)."""
_CUSTOM_CODE = "contains custom code"
_UNKNOWN = "Unrecognized model identifier"  # Beginning of transformers' errors about a model, before all known ones
_LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def read_config(where: str) -> Any:
    """Return transformers' configuration of a model: a folder, a JSON file, or a name on the Hugging Face hub.

    For a name, only ``config.json`` is downloaded, unless it is in the local cache. Raises ``ConfigError`` if it does
    not exist, the hub is unreachable, transformers refuses it, or its model is not supported.
    """
    path = Path(where).expanduser()
    is_folder = path.is_dir()
    file = path / _CONFIG if is_folder else path
    try:
        if is_folder and not file.is_file():
            raise ConfigError(f"{where}: has no {_CONFIG}")
        if file.is_file():
            where = str(file)
            fields = _read_fields(file)
            config: Any = _load(str(path)) if is_folder else _make_config(file, fields)
        elif not _HUB_NAME.fullmatch(where):
            raise ConfigError(f"{where}: no such folder or file")
        else:
            if refusal := hub_refusal(where):
                raise ConfigError(refusal)
            config = _load(where)
    except ConfigError:
        raise
    except OSError as error:
        why = next((reason for mark, reason in _NOT_FOUND.items() if mark in str(error)), _first_line(error))
        raise ConfigError(f"{where}: {error.strerror or why}") from None
    except Exception as error:  # transformers and huggingface_hub raise various classes for a wrong value
        raise ConfigError(f"{where}: {_first_line(error.__cause__ or error)}") from None
    _check_kind(config, where)
    config.use_cache = False
    config.name_or_path = where
    return config


def _load(where: str) -> Any:
    from transformers import AutoConfig  # after the check of the hub, which may set HF_HUB_OFFLINE

    return AutoConfig.from_pretrained(where)


def _check_kind(config: Any, where: str) -> None:
    """Refuse a model that is no causal language model, or whose weights are quantized."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(f"{where}: model type {kind} is no causal language model: only those are predicted")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{where}: quantization_config: quantized weights cannot be predicted with --model; for QLoRA use "
            "CONFIG.yaml with model.quantization=nf4"
        )


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        fields: Any = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: must be a JSON object, not {type(fields).__name__}")
    return fields


def _make_config(path: Path, fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kind = fields.pop("model_type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"{path}: no model_type; write the type of the model, such as llama")
    for name in ("architectures", "transformers_version"):
        fields.pop(name, None)
    return AutoConfig.for_model(kind, **fields)


def make(config: Any, dtype: Any, checkpointing: bool, lora_rank: int | None, attention: str) -> Any:
    """Return the model in training mode; under fake tensors it uses no memory.

    Raises ``ConfigError`` if transformers refuses the configuration.
    """
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    except RuntimeError:  # includes fake tensors' errors, which DryRun explains
        raise
    except Exception as error:
        raise ConfigError(f"{config.name_or_path}: {_first_line(error.__cause__ or error)}") from None
    model.train()
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
        targets: Any = [name for name in _LORA_TARGETS if name in names] or "all-linear"
        model = get_peft_model(model, LoraConfig(r=lora_rank, target_modules=targets, task_type="CAUSAL_LM"))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora_rank:
            model.enable_input_require_grads()
    return model


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    if _CUSTOM_CODE in text:
        return "the model is custom code, which a dry run does not execute; only models of transformers are predicted"
    if text.startswith(_UNKNOWN):
        return text.partition(". Should contain")[0].replace(_UNKNOWN, "transformers knows no model type")
    return text.splitlines()[0] if text else type(error).__name__
