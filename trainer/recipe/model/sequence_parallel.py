"""Attention of ranks that share sequences (Ulysses): each rank computes some heads over the whole sequence.

Between layers a rank holds a slice of every row. In an attention layer the ranks of a group exchange their slices of
all heads for all slices of some heads, compute attention as without slices, and exchange back.

DeepSpeed has the same exchange for transformers (``runtime/sequence_parallel/ulysses_sp.py``). It is not used for three
reasons. It discards masks, so that the documents of a packed row see each other under SDPA. It replaces ``sdpa`` for
the whole process, where evaluation generates with whole sequences. It supports one batch size only.
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data.collate import Batch
from ..data.slices import ROWS_KEY, cut
from ..engine.distributed import World
from ..engine.division import SEQUENCES, heads_refusal
from ..engine.sequence_group import SequenceGroup
from . import attention
from .fused import causal_model
from .loss import IGNORED

NAME = "ftmon_sequence_parallel"
_TOKENS = 12
"""Tokens of each rank's slice of the check's row."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-1}
"""Relative difference of logits, of slices and of the whole row, that the rounding of other kernels explains."""
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_group: SequenceGroup | None = None,
    document_mask: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally over whole rows, of which each rank of the group holds a slice (transformers' interface).

    Shapes are those of ``attention.varlen_attention``, of a slice; ``document_mask`` is that of the keys of each query
    of a whole row, of shape [rows, 1, length, length].

    Raises:
        NotImplementedError: the layer passes an argument that is not supported here.
    """
    if sequence_group is None:
        return attention.varlen_attention(module, query, key, value, attention_mask, **others)
    size = sequence_group.size
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if attention_mask is not None or unknown:
        raise NotImplementedError(f"its attention has {unknown[0] if unknown else 'a mask of its own'}")
    if text := heads_refusal(query.shape[1], key.shape[1], size):
        raise NotImplementedError(text)
    if key.shape[1] % size:
        key, value = (part.repeat_interleave(size // part.shape[1], dim=1) for part in (key, value))
    # From slices of all heads to whole rows of this rank's heads.
    query, key, value = (sequence_group.exchange(part, 1, 2) for part in (query, key, value))
    heads: Any = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1], is_causal=getattr(module, "is_causal", True)
    )
    if document_mask is None:
        out, _ = attention.varlen_attention(heads, query, key, value, None, **others)
    else:
        window = others.pop("sliding_window", None)
        if window and key.shape[2] > window:
            document_mask = document_mask & attention.window_mask(query, key, window)
        out, _ = sdpa_attention_forward(heads, query, key, value, document_mask, **others)
    return sequence_group.exchange(out, 1, 2), None


def arguments(batch: dict[str, Any], group: SequenceGroup) -> dict[str, Any]:
    """Return the model's arguments of a slice on the device: with its group and the borders of packed documents.

    ``sequence_ids`` of packed rows become a mask, whose size is the square of the rows' length.
    """
    result: dict[str, Any] = {**batch, "sequence_group": group}
    if "cu_seq_lens" in batch:
        return attention.with_borders(result, batch["input_ids"].shape[1] * group.size)
    if "sequence_ids" in batch:
        documents = result.pop("sequence_ids")
        same = documents[:, :, None] == documents[:, None, :]
        result["document_mask"] = same.tril()[:, None]
    return result


def set_up(model: Any, config: Config, world: World) -> bool:
    """Switch a model to sliced rows and check it; return whether packed rows use ``cu_seq_lens``.

    All ranks call this, after the engine and the fused loss are made.

    Raises:
        ConfigError: the model computes other results on slices.
    """
    inner, length = causal_model(model), config.training.sequence_length
    if problem := refusal(inner.config, length, world.sequence.size):
        raise ConfigError(f"{SEQUENCES} {problem}")
    whole = _Reference(inner, world, config.data.packing) if world.has_values else None
    windows: list[int] = []
    varlen = config.data.packing and world.on_gpu and attention.can_varlen(inner)
    try:
        _use(inner, windows)
        if whole is not None:
            problem = whole.difference(varlen)
            if problem and varlen:
                world.log(f"note: variable-length attention is not used, a mask is: {problem}")
                windows.clear()
                varlen, problem = False, whole.difference(varlen=False)
            problem = problem or _window_problem(inner.config, windows, length)
    except ValueError as error:  # transformers refuses the attention
        problem = str(error).strip().splitlines()[0]
    if problem:
        raise ConfigError(f"{SEQUENCES} cannot be used with {inner.config.model_type}: {problem}; use 1")
    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    return varlen


def _use(inner: Any, windows: list[int]) -> None:
    """Switch a model's attention, and record the sliding windows that its layers pass in a forward."""

    def noting(*inputs: Any, **others: Any) -> Any:
        if others.get("sliding_window"):
            windows.append(others["sliding_window"])
        return attend(*inputs, **others)

    ALL_ATTENTION_FUNCTIONS.register(NAME, noting)
    # Without a mask function transformers makes no mask: it would be one of slices.
    inner.set_attn_implementation(NAME)


def _window_problem(settings: Any, noted: list[int], length: int) -> str:
    """Return the reason why a model's sliding windows would be lost; a short row fits any window, so cannot show it."""
    settings = settings.get_text_config()
    window = getattr(settings, "sliding_window", None)
    if not window or window >= length or getattr(settings, "use_sliding_window", True) is False:
        return ""
    kinds = getattr(settings, "layer_types", None)
    expected = kinds.count("sliding_attention") if kinds else settings.num_hidden_layers
    if not expected or (noted and len(noted) % expected == 0):
        return ""
    return f"its layers do not pass their sliding window of {window} tokens to attention"


def refusal(settings: Any, length: int, size: int) -> str:
    """Return the reason, from its configuration, why a model cannot use sliced rows; empty: to be checked by running.

    These are differences that a short row does not show.
    """
    settings = settings.get_text_config()
    heads = getattr(settings, "num_attention_heads", None)
    groups = getattr(settings, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(groups, int) and (text := heads_refusal(heads, groups, size)):
        return text
    scaled = next((kind for kind in _rope_types(settings) if "dynamic" in kind or kind == "longrope"), "")
    if scaled:
        # modeling_rope_utils.py, dynamic_rope_update: frequencies follow the largest position that a rank sees.
        return f"cannot be used with rotary embeddings of type {scaled}, which depend on the whole row's length; use 1"
    chunk = getattr(settings, "attention_chunk_size", None)
    if chunk and chunk < length:
        return f"cannot be used with attention in chunks of {chunk} tokens; use 1"
    return ""


def _rope_types(settings: Any) -> list[str]:
    found: list[str] = []
    waiting: list[Any] = [getattr(settings, name, None) for name in ("rope_parameters", "rope_scaling")]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            found += [str(one[name]) for name in ("rope_type", "type") if isinstance(one.get(name), str)]
            waiting += one.values()
    return found


class _Reference:
    """A model's results for one row on each rank alone, for comparison with those of the ranks together."""

    def __init__(self, inner: Any, world: World, packed: bool) -> None:
        """Compute logits and loss with the model's own attention."""
        self._inner = inner
        self._world = world
        length = world.sequence.size * _TOKENS
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(0, _vocabulary(inner), (1, length), generator=generator)
        # The border is within a slice, and a document spans slices.
        self._documents = list(row.split([_TOKENS + 5, length - _TOKENS - 5], 1)) if packed else [row]
        with torch.no_grad(), _evaluating(inner):
            moved = [one.to(world.device) for one in self._documents]
            self._logits = torch.cat([inner(input_ids=one, use_cache=False).logits for one in moved], 1)
            losses = [inner(input_ids=one, labels=one, use_cache=False).loss for one in moved]
        self._loss = float(sum(losses))

    def difference(self, varlen: bool) -> str:
        """Return in words how the slices' results differ; empty if they do not. All ranks call this."""
        world, group = self._world, self._world.sequence
        problem = ""
        logits = other = loss = torch.zeros(())
        try:
            with torch.no_grad(), _evaluating(self._inner):
                logits = self._forward(self._documents, varlen).logits
                loss = self._forward(self._documents, varlen, labels=True).loss.double()
                if len(self._documents) > 1:
                    changed = [(self._documents[0] + 1) % _vocabulary(self._inner), self._documents[1]]
                    other = self._forward(changed, varlen).logits
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            problem = str(error).strip().splitlines()[0]
        if not world.all_agree(not problem):
            return problem or "another rank cannot"
        start = group.rank * _TOKENS
        expected = self._logits[:, start : start + _TOKENS].float()
        # The first slice has no earlier tokens: the largest difference of all ranks counts.
        largest = ((logits.float() - expected).norm() / expected.norm().clamp(min=1e-9)).double()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        apart = float(largest)
        if not apart <= _TOLERANCE[logits.dtype]:
            return f"slices of a row give other logits than the whole row (relative difference {apart:.1e})"
        second = max(0, self._documents[0].shape[1] - start)
        alike = len(self._documents) == 1 or torch.equal(logits[:, second:], other[:, second:])
        if not world.all_agree(alike):
            return "documents of one row see each other"
        dist.all_reduce(loss)
        total = float(loss) / world.data_ranks
        if not abs(total - self._loss) <= _LOSS_TOLERANCE[logits.dtype] * abs(self._loss):
            return f"slices of a row give a loss of {total:.6f}, and the whole row {self._loss:.6f}"
        return ""

    def _forward(self, documents: list[torch.Tensor], varlen: bool, labels: bool = False) -> Any:
        ids = torch.cat(documents, 1)
        batch: Batch = {"input_ids": ids, "labels": ids.clone()}
        if len(documents) > 1:
            batch["labels"][:, documents[0].shape[1]] = IGNORED
            batch["position_ids"] = torch.cat([torch.arange(one.shape[1])[None] for one in documents], 1)
            batch["sequence_ids"] = torch.cat([torch.full_like(one, number) for number, one in enumerate(documents)], 1)
        group = self._world.sequence
        batch = cut(batch, group.size, group.rank)
        left_out = {ROWS_KEY} if labels else {ROWS_KEY, "labels", "shift_labels"}
        batch = attention.isolate(batch, varlen) if varlen else batch
        moved = {name: tensor.to(self._world.device) for name, tensor in batch.items() if name not in left_out}
        return self._inner(**arguments(moved, group), use_cache=False)


def _vocabulary(inner: Any) -> int:
    return int(inner.config.get_text_config().vocab_size)


@contextmanager
def _evaluating(inner: Any) -> Generator[None]:
    training = inner.training
    inner.eval()
    try:
        yield
    finally:
        inner.train(training)
