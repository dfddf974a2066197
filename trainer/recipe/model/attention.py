"""Attention within the documents of a packed row, and the check that it does not cross them.

Three implementations: PyTorch's variable-length attention on CUDA (registered with transformers as ``ftmon_varlen``),
FlashAttention if ``model.attention`` selects it, and otherwise the block mask that transformers makes of restarting
position ids.
"""

import inspect
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..data.collate import Batch
from ..engine.distributed import World
from .fused import causal_model

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # PyTorch before 2.10
    _varlen_attn = None
# Detected here, as compiled layers cannot. Before PyTorch 2.12 grouped heads need no argument.
_ASKS_FOR_GROUPS = _varlen_attn is not None and "enable_gqa" in inspect.signature(_varlen_attn).parameters

VARLEN = "ftmon_varlen"
_LENGTHS = (11, 13)
"""Lengths of the check's two documents in tokens."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Relative difference of a document's logits, packed and alone, that the rounding of other kernels explains."""


def isolate(batch: Batch, varlen: bool) -> Batch:
    """Return a collated batch without ``sequence_ids``.

    With ``varlen`` they become ``cu_seq_lens``, the borders of all documents in the flattened batch; padding is one.
    """
    result = {name: tensor for name, tensor in batch.items() if name != "sequence_ids"}
    if varlen and "sequence_ids" in batch:
        result["cu_seq_lens"] = borders(batch["sequence_ids"])
    return result


def borders(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return the beginnings of documents in a flattened batch, and its end, in int32.

    ``sequence_ids``, of shape [rows, length], are equal for consecutive tokens of a document.
    """
    begins = torch.ones_like(sequence_ids, dtype=torch.bool)
    begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
    places = begins.flatten().nonzero().squeeze(1)
    return torch.cat([places, torch.tensor([sequence_ids.numel()])]).to(torch.int32)


def attention_arguments(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with ``cu_seq_lens`` under the names by which transformers passes it to attention."""
    return with_borders(batch, batch["input_ids"].shape[1]) if "cu_seq_lens" in batch else batch


def with_borders(batch: dict[str, Any], longest: int) -> dict[str, Any]:
    """Return a batch with ``cu_seq_lens`` under transformers' names; ``longest`` bounds the tokens of a document."""
    result = {name: value for name, value in batch.items() if name != "cu_seq_lens"}
    # The row's length bounds that of a document; the exact one would have to be read from the device.
    cumulated = batch["cu_seq_lens"]
    return {
        **result,
        "cu_seq_lens_q": cumulated,
        "cu_seq_lens_k": cumulated,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def set_up(model: Any, config: Config, world: World) -> bool:
    """Select the attention of packed rows and check it; return whether it uses ``cu_seq_lens``. All ranks call this.

    Raises:
        ConfigError: documents of one row see each other in this model.
    """
    inner = causal_model(model)
    if config.model.attention == "flash_attention_2":
        problem = crossing(inner, world, varlen=True)
    elif config.model.attention == "auto" and world.on_gpu and can_varlen(inner):
        problem = _try_varlen(inner, world)
        if not problem:
            return True
        world.log(f"note: variable-length attention is not used, a block mask is: {problem}")
        problem = crossing(inner, world, varlen=False)
    else:
        problem = crossing(inner, world, varlen=False)
    if problem:
        raise ConfigError(f"data.packing: {problem}; use data.packing=false")
    return config.model.attention == "flash_attention_2"


def can_varlen(inner: Any) -> bool:
    """Return whether PyTorch has variable-length attention that supports this model."""
    if _varlen_attn is None:
        return False
    settings = inner.config.get_text_config()
    half = next(inner.parameters()).dtype in (torch.float16, torch.bfloat16)
    other = getattr(settings, "attention_dropout", 0.0) or getattr(settings, "attn_logit_softcapping", None)
    return half and not other


def _try_varlen(inner: Any, world: World) -> str:
    before = inner.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
    # Without a mask function transformers makes no mask, and does not wait for the device to detect packed rows. Rows
    # that are not packed are padded on the right, where causal attention does not reach.
    problem = ""
    try:
        inner.set_attn_implementation(VARLEN)
        problem = crossing(inner, world, varlen=True)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        problem = str(error).strip().splitlines()[0]
    if not world.all_agree(not problem):
        inner.set_attn_implementation(before)
        return problem or "another rank cannot"
    return ""


def varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within documents (transformers' interface of attention functions); without borders, as ``sdpa``.

    A batch without borders and without a mask is padded on the right or not at all.

    ``query`` has the shape [rows, heads, length, head size]; ``key`` and ``value`` have as many heads or a divisor of
    them. ``cu_seq_lens_q`` are the borders of the documents in the flattened batch (None: none), ``max_length_q``
    bounds a document's length, and ``sliding_window`` are the tokens that a token sees, itself included.
    """
    if cu_seq_lens_q is None:
        if attention_mask is None and sliding_window and key.shape[2] > sliding_window:
            attention_mask = window_mask(query, key, sliding_window)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
    if dropout or others.get("softcap") or others.get("s_aux") is not None:
        raise NotImplementedError("variable-length attention has no dropout, soft cap or sinks")
    rows, heads, length, size = query.shape
    grouped = {"enable_gqa": key.shape[1] != heads} if _ASKS_FOR_GROUPS else {}
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    longest = max_length_q or length
    window = (sliding_window - 1 if sliding_window else -1, 0)
    attend: Any = _varlen_attn
    out = attend(*flat, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=window, **grouped)
    return out.view(rows, length, heads, size), None


def window_mask(query: torch.Tensor, key: torch.Tensor, window: int) -> torch.Tensor:
    """Return a mask of the latest ``window`` keys of each query; the last query belongs to the last key."""
    keys = torch.arange(key.shape[2], device=key.device)
    queries = keys[-query.shape[2] :, None]
    return ((keys <= queries) & (keys > queries - window))[None, None]


def crossing(inner: Any, world: World, *, varlen: bool) -> str:
    """Return in words how the second document of a packed row depends on the first; empty if it does not.

    A change of the first must not change a bit of the second's logits, and these must be near those of the second
    document alone.
    """
    if not world.has_values:
        return ""
    generator = torch.Generator().manual_seed(0)
    vocabulary = inner.config.get_text_config().vocab_size
    first, second = (torch.randint(0, vocabulary, (1, length), generator=generator) for length in _LENGTHS)
    other = (first + 1) % vocabulary

    def logits(documents: list[torch.Tensor]) -> torch.Tensor:
        batch = attention_arguments(isolate(_packed(documents), varlen))
        moved = {
            name: value.to(world.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()
        }
        return inner(**moved, use_cache=False).logits[0, -second.shape[1] :]

    training = inner.training
    inner.eval()
    try:
        with torch.no_grad():
            one, changed, alone = logits([first, second]), logits([other, second]), logits([second])
    finally:
        inner.train(training)
    kind = inner.config.model_type
    if not world.all_agree(torch.equal(one, changed)):
        return f"documents of one row see each other in {kind}"
    difference = float((one.float() - alone.float()).norm()) / max(1e-9, float(alone.float().norm()))
    if not world.all_agree(difference <= _TOLERANCE[one.dtype]):
        return (
            f"a document gives other logits in a packed row than alone in {kind} (relative difference {difference:.1e})"
        )
    return ""


def _packed(documents: list[torch.Tensor]) -> Batch:
    numbers = [torch.full_like(document, number) for number, document in enumerate(documents, 1)]
    return {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(document.shape[1])[None] for document in documents], 1),
        "sequence_ids": torch.cat(numbers, 1),
    }
