"""Sums made by hand beside a prediction: DeepSpeed's own estimate, and each part of a rank's memory as a formula."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ...protocol.analysis.estimates.memory import reaches
from ...protocol.text import counted
from ..recipe import support
from ..recipe.config.schema import Config
from .result import Estimate, Made, Part, Point, Prediction, Rank

STATES = ("parameters", "gradients", "optimizer_states", "master_copies", "partitions")
"""Parts that DeepSpeed's estimator is about."""
_MASTER_BYTES, _ADAM_BYTES = 4, 8
_LAYER_BYTES, _CHECKPOINTED_BYTES = 34, 2
"""Activations of a layer in bytes per token and hidden unit, 16 bit, without the attention matrix: Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), equation 1 and section 5."""
_LOGITS_BYTES = {2: 2 + 4 + 4, 4: 4 + 4}
"""Bytes of a logit, its fp32 copy and its log-softmax in the loss of transformers, by those of a weight."""
_GPUS_OF_A_HOST = 8


def made(engine: Any, parameters: int, ranks: int) -> Made:
    """Return what estimates need to know of an engine of DeepSpeed; ``parameters``: of its model."""
    model = engine.module
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    weight_bytes = max((one.element_size() for one in model.parameters()), default=2)
    # BF16_Optimizer, which DeepSpeed uses for ZeRO 0 and 1 in bf16 with fp32 gradients, has no buckets.
    buckets = hasattr(engine.optimizer, "ipg_buckets")
    largest = max(sum(_count(one) for one in module.parameters(recurse=False)) for module in model.modules())
    stage = int(engine.zero_optimization_stage())
    found = Made(
        largest_layer=largest,
        layers=int(getattr(text, "num_hidden_layers", 0) or 0),
        hidden=int(getattr(text, "hidden_size", 0) or 0),
        vocabulary=int(getattr(text, "vocab_size", 0) or 0),
        gradient_bytes=weight_bytes if buckets and stage < 3 else engine.get_data_types()[1].itemsize,
        weight_bytes=weight_bytes,
        stage=stage,
        offloads_states=_on_host(engine.zero_offload_optimizer()),
        offloads_weights=_on_host(engine.zero_offload_param()),
        checkpointing=bool(getattr(model, "is_gradient_checkpointing", False)),
        bucket_elements=int(engine.zero_reduce_bucket_size() or 0) if buckets else 0,
        buckets=1 + (stage < 3 and bool(engine.zero_overlap_comm())),
    )
    return msgspec.structs.replace(found, estimate=_estimate(found, parameters, ranks))


def _count(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _on_host(offload: Any) -> bool:
    device = getattr(offload, "device", None)
    return getattr(device, "value", device) in ("cpu", "nvme")


def _estimate(of: Made, parameters: int, ranks: int) -> Estimate | None:
    """Return DeepSpeed's estimate for one GPU by its own function; None for ZeRO 0, for which it has none.

    The formulas are those of DeepSpeed 0.19.8 (``runtime/zero/stage_1_and_2.py`` and ``stage3.py``).
    """
    if not of.stage:
        return None
    hosts = ranks // _GPUS_OF_A_HOST if ranks % _GPUS_OF_A_HOST == 0 else 1
    machines: dict[str, Any] = {"num_gpus_per_node": ranks // hosts, "num_nodes": hosts}
    share = f" / {ranks} ranks" if ranks > 1 else ""
    if of.stage < 3:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

        _, size = zero2(parameters, cpu_offload=of.offloads_states, **machines)
        states = "" if of.offloads_states else f" + {amount(parameters)} x 18 bytes{share}"
        return Estimate(zero2.__name__, int(size), f"{amount(parameters)} x 2 bytes{states}")
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3

    offloads: dict[str, Any] = {"cpu_offload": of.offloads_states, "cpu_offload_params": of.offloads_weights}
    _, size, _ = zero3(parameters, of.largest_layer, **offloads, **machines)
    each = 18 if not of.offloads_states else 0 if of.offloads_weights else 2
    states = f" + {amount(parameters)} x {each} bytes{share}" if each else ""
    return Estimate(zero3.__name__, int(size), f"{amount(of.largest_layer)} of the largest layer x 4 bytes{states}")


def amount(count: int) -> str:
    """Return a number in three digits: ``8.03 B``, ``494 M``, ``12.3 K``, ``512``."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size * 0.9995:
            return f"{count / size:#.3g}".rstrip(".") + f" {unit}"
    return str(count)


def highest(point: Point) -> tuple[Rank, str]:
    """Return the rank with the highest peak whose composition is known, and the phase; empty: of none it is."""
    rank = max(point.ranks, key=lambda one: one.allocated_peak_bytes)
    peaks = {name: one.allocated_peak_bytes for name, one in rank.phases.items() if one.parts}
    return rank, max(peaks, key=lambda name: peaks[name], default="")


def left_out(point: Point, found: Prediction) -> dict[str, int] | None:
    """Return a point's highest peak by what DeepSpeed's estimator has and leaves out, bytes; None: not composed.

    The sum is the reserved peak. Parameters that ZeRO-3 gathers are those beyond the rank's own share.
    """
    rank, phase = highest(point)
    of = found.made
    if not phase or of is None:
        return None
    parts, logits = rank.phases[phase].parts, rank.phases[phase].logits
    own = found.parameters * of.weight_bytes // found.ranks
    gathered = max(0, parts.get("parameters", 0) - own) if of.stage == 3 else 0
    result = {
        "states": sum(parts.get(part, 0) for part in STATES) - gathered,
        "activations": parts.get("activations", 0) - logits.get("activations", 0),
        "logits": sum(logits.values()),
        "buckets": parts.get("buckets", 0) - logits.get("buckets", 0),
        "gathered": gathered,
    }
    peak = sum(parts.values())
    return {**result, "temporaries": peak - sum(result.values()), "fragmentation": rank.reserved_peak_bytes - peak}


def meets(found: Prediction) -> str:
    """Return where the peak over lengths meets DeepSpeed's estimate, as text; empty with fewer than two lengths."""
    if found.made is None or found.made.estimate is None or not found.pieces:
        return ""
    size, low, high = found.made.estimate.bytes, found.pieces[0], found.pieces[-1]
    at = reaches(found.pieces, size)
    if at is None:
        return f"the peak over lengths stays below the estimate up to {high.end:,.0f} tokens"
    if at <= low.start:
        return f"the peak over lengths is above the estimate at every length from {low.start:,.0f} tokens on"
    return f"the peak over lengths meets the estimate at {at:,.0f} tokens"


def parts(found: Prediction, config: Config | None, measured: Mapping[str, int]) -> list[Part]:
    """Return each part of the rank with the highest peak as a sum made by hand, at the longest length.

    ``config``: of ftmon's own trainer; ``measured``: bytes by part of a run; empty: none is compared.
    """
    of = found.made
    if of is None:
        return []
    point = max(found.points, key=lambda one: one.sequence_length)
    rank, _ = highest(point)
    tokens = point.micro_batch * point.sequence_length // found.sequence_parallel_size
    result: list[Part] = []
    for name, (factors, ranks) in _sums(config, found, of, tokens).items():
        size = 1
        for factor, _ in factors:
            size *= factor
        words = " x ".join(text for _, text in factors) + (f" / {ranks} ranks" if ranks > 1 else "")
        predicted = max(_size(one.parts, one.logits, name) for one in rank.phases.values())
        on_host = _is_on_host(name, of)
        own = measured.get(name) if measured else None
        result.append(Part(name, "on the host" if on_host else words, 0 if on_host else size // ranks, predicted, own))
    return result


_Factors = list[tuple[int, str]]


def _sums(config: Config | None, found: Prediction, of: Made, tokens: int) -> dict[str, tuple[_Factors, int]]:
    """Return the factors of each part and the ranks that share the product."""
    weight, trained, all_ranks = of.weight_bytes, found.trainable, found.ranks
    master = 0 if config is not None and config.optimizer.master_weights != "fp32" else _MASTER_BYTES
    master = 0 if weight == _MASTER_BYTES and not of.stage else master

    averages = _ADAM_BYTES if config is None else support.state_bytes(config) - master

    def count(number: int) -> tuple[int, str]:
        return number, amount(number)

    def each(size: float) -> tuple[int, str]:
        return round(size), f"{size:g} bytes"

    layer = (_CHECKPOINTED_BYTES if of.checkpointing else _LAYER_BYTES) * weight // 2
    shares = {"parameters": 3, "gradients": 2, "master_copies": 1, "optimizer_states": 1}
    sums: dict[str, _Factors] = {
        "parameters": [count(found.parameters), each(weight)],
        "gradients": [count(trained), each(of.gradient_bytes)],
        "master_copies": [count(trained), each(master)],
        "optimizer_states": [count(trained), each(averages)],
        "buckets": [count(of.bucket_elements), each(of.gradient_bytes), (of.buckets, counted(of.buckets, "bucket"))],
        "activations": [
            (of.layers, f"{of.layers} layers"),
            (tokens, f"{tokens:,} tokens"),
            (of.hidden, f"{of.hidden:,} units"),
            each(layer),
        ],
        "logits": [
            (tokens, f"{tokens:,} tokens"),
            (of.vocabulary, f"{of.vocabulary:,} logits"),
            each(_LOGITS_BYTES.get(weight, 0)),
        ],
    }
    return {
        name: (factors, all_ranks if of.stage >= shares.get(name, 4) else 1)
        for name, factors in sums.items()
        if all(factor for factor, _ in factors)
    }


def _size(sizes: Mapping[str, int], logits: Mapping[str, int], name: str) -> int:
    if name == "logits":
        return sum(logits.values())
    return sizes.get(name, 0) - logits.get(name, 0)


def _is_on_host(name: str, of: Made) -> bool:
    states = ("master_copies", "optimizer_states", "gradients")
    return (of.offloads_states and name in states) or (of.offloads_weights and name == "parameters")
