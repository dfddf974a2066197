"""Attention within the documents of a packed row, and the check that it does not cross them.

Three implementations: variable-length attention on CUDA (registered with transformers as ``ftmon_varlen``; by cuDNN on
Hopper and data-center Blackwell, else by PyTorch), FlashAttention if ``model.attention`` selects it, and otherwise a
block mask, which transformers derives from position ids that restart at 0.
"""

import inspect
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..distributed import SequenceGroup, World
from ..support import SEQUENCES, heads_refusal
from .bare import layer_configs
from .loss import IGNORED, Batch, causal_model, evaluating, next_labels
from .shape import rope_by_length

try:
    from torch.nn.attention.varlen import varlen_attn as _varlen_attn
except ImportError:  # PyTorch before 2.10
    _varlen_attn = None
# Detected here, as compiled layers cannot. Before PyTorch 2.12 grouped heads need no argument.
_ASKS_FOR_GROUPS = _varlen_attn is not None and "enable_gqa" in inspect.signature(_varlen_attn).parameters

_aten: Any = torch.ops.aten
VARLEN = "ftmon_varlen"
_MOST_ELEMENTS = 1 << 31  # places in a batch's queries are in int32
_GENERATIONS = (9, 10)
"""Compute capabilities of the GPUs on which cuDNN is used: Hopper, and Blackwell for data centers."""
_by_cudnn = False
"""Whether cuDNN computes variable-length attention in this process."""
_LENGTHS = (11, 13)  # of the check's two documents, in tokens
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
    result = dict(batch)
    # The row's length bounds that of a document; the exact one would have to be read from the device.
    result["cu_seq_lens_q"] = result["cu_seq_lens_k"] = result.pop("cu_seq_lens")
    result["max_length_q"] = result["max_length_k"] = longest
    return result


def set_up(model: Any, config: Config, world: World) -> bool:
    """Select the attention of packed rows and check it; return whether it uses ``cu_seq_lens``. All ranks call this.

    A model in which documents of one row see each other is a ``CrossingError``.
    """
    inner = causal_model(model)
    is_flash = config.model.attention == "flash_attention_2"
    if config.model.attention == "auto" and world.on_gpu and can_varlen(inner):
        problem = _try_varlen(inner, world, config.training.sequence_length)
        if not problem:
            return True
        world.note(f"variable-length attention is not used, a block mask is: {problem}")
    try:
        problem = crossing(inner, world, varlen=is_flash)
    except (ValueError, TypeError, NotImplementedError) as error:
        # Such as a model that accepts no position ids.
        problem = f"{inner.config.model_type} does not run on packed rows: {_first_line(error)}"
    if problem:
        raise CrossingError(f"data.packing: {problem}; use data.packing=false")
    return is_flash


class CrossingError(ConfigError):
    """Documents of one row are not isolated from each other."""


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


def can_varlen(inner: Any) -> bool:
    """Return whether PyTorch has variable-length attention that supports this model."""
    if _varlen_attn is None:
        return False
    settings = inner.config.get_text_config()
    half = next(inner.parameters()).dtype in (torch.float16, torch.bfloat16)
    other = getattr(settings, "attention_dropout", 0.0) or getattr(settings, "attn_logit_softcapping", None)
    return half and not other


def _try_varlen(inner: Any, world: World, length: int) -> str:
    before, windows = inner.config._attn_implementation, list[int]()
    _choose(inner, world)
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, _noting(varlen_attention, windows))
    # Without a mask function transformers makes no mask, and does not wait for the device to detect packed rows. Rows
    # that are not packed are padded on the right, where causal attention does not reach.
    problem = ""
    try:
        inner.set_attn_implementation(VARLEN)
        problem = crossing(inner, world, varlen=True) or _window_problem(inner.config, windows, length)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        problem = str(error).strip().splitlines()[0]
    ALL_ATTENTION_FUNCTIONS.register(VARLEN, varlen_attention)
    if not world.all_agree(not problem):
        inner.set_attn_implementation(before)
        return problem or "another rank cannot"
    return ""


def _choose(inner: Any, world: World) -> None:
    """Let cuDNN compute variable-length attention if it is installed, was measured on this kind of GPU, and works."""
    global _by_cudnn
    known = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in _GENERATIONS
    _by_cudnn = known and find_spec("cudnn") is not None
    if not (_by_cudnn and world.has_values):
        return
    try:
        problem = _difference_of_cudnn(inner, world.device)
    except Exception as error:  # its library has errors of its own
        problem = _first_line(error)
    _by_cudnn = not problem
    if problem:
        world.note(f"PyTorch's variable-length attention is used, cuDNN's is not: {problem}")


def _difference_of_cudnn(inner: Any, device: torch.device) -> str:
    """Return in words how cuDNN's attention or its gradients differ from PyTorch's; empty if they do not."""
    global _by_cudnn
    settings, dtype = inner.config.get_text_config(), next(inner.parameters()).dtype
    heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    generator = torch.Generator().manual_seed(0)
    counts = (heads, *[getattr(settings, "num_key_value_heads", None) or heads] * 2)
    drawn = [torch.randn(1, count, sum(_LENGTHS), width, generator=generator) for count in counts]
    inputs = query, key, value = [one.to(device, dtype).requires_grad_() for one in drawn]
    borders = torch.tensor([0, _LENGTHS[0], sum(_LENGTHS)], dtype=torch.int32, device=device)
    found: list[list[torch.Tensor]] = []
    for _by_cudnn in (False, True):
        out, _ = varlen_attention(inner, query, key, value, None, cu_seq_lens_q=borders)
        found.append([out.detach(), *torch.autograd.grad(out, inputs, out.detach())])
    for expected, one in zip(*found, strict=True):
        difference = float((one.float() - expected.float()).norm() / expected.float().norm())
        if not difference <= _TOLERANCE[dtype]:
            return f"relative difference {difference:.1e}"
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

    A batch without borders and without a mask is padded on the right or not at all. ``query`` has the shape [rows,
    heads, length, head size]; ``key`` and ``value`` have as many heads or a divisor of them. ``cu_seq_lens_q`` are the
    borders of the documents in the flattened batch (None: none), ``max_length_q`` bounds a document's length, and
    ``sliding_window`` are the tokens that a token sees, itself included.
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
    if _by_cudnn and value.shape[3] == size and size % 8 == 0 and size <= 128 and query.numel() < _MOST_ELEMENTS:
        factor = size**-0.5 if scaling is None else scaling
        out, _ = _attend(*flat, cu_seq_lens_q, longest, factor, sliding_window or 0)
        return out.view(rows, length, heads, size), None
    window = (sliding_window - 1 if sliding_window else -1, 0)
    attend: Any = _varlen_attn
    out = attend(*flat, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=window, **grouped)
    return out.view(rows, length, heads, size), None


# Operators, so that compiled layers and dry runs on fake tensors pass them.
@torch.library.custom_op("ftmon::attend", mutates_args=())
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from . import kernels

    return kernels.attend(query, key, value, borders, longest, scale, window)


@_attend.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


@torch.library.custom_op("ftmon::attend_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from . import kernels

    return kernels.attend_backward(grad, query, key, value, out, sums, borders, longest, scale, window)


@_attend_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, borders, longest, scale, window = inputs
    ctx.save_for_backward(*tensors, *output, borders)
    ctx.settings = longest, scale, window


def _gradients(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_attend.register_autograd(_gradients, setup_context=_save)


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
    first, second = (torch.randint(0, _vocabulary(inner), (1, length), generator=generator) for length in _LENGTHS)
    other = (first + 1) % _vocabulary(inner)

    def logits(documents: list[torch.Tensor]) -> torch.Tensor:
        batch = attention_arguments(isolate(_packed(documents), varlen))
        moved = {name: one.to(world.device) if isinstance(one, torch.Tensor) else one for name, one in batch.items()}
        return inner(**moved, use_cache=False).logits[0, -second.shape[1] :]

    kind = inner.config.model_type
    with evaluating(inner), without_experts(inner):
        one, changed, alone = logits([first, second]), logits([other, second]), logits([second])
        isolated = world.all_agree(torch.equal(one, changed))
        if not isolated:
            with _RowsApart():
                isolated = world.all_agree(torch.equal(logits([first, second]), logits([other, second])))
    if not isolated:
        return f"documents of one row see each other in {kind}"
    difference = float((one.float() - alone.float()).norm()) / max(1e-9, float(alone.float().norm()))
    # Not by the logits' data type: some models return fp32 from bf16 weights.
    if not world.all_agree(difference <= _TOLERANCE[next(inner.parameters()).dtype]):
        return (
            f"a document gives other logits in a packed row than alone in {kind} (relative difference {difference:.1e})"
        )
    return ""


class _RowsApart(TorchDispatchMode):
    """Computes each row of a product of two matrices alone: the number of rows does not change its rounding.

    Experts inside attention (JetMoE), which cannot be left out, get other numbers of tokens when a document changes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        *added, left, right = args if func in (_aten.mm.default, _aten.addmm.default) else (None, None)
        if left is None or len(left) < 2 or any(one.ndim > 1 for one in added):
            return func(*args, **(kwargs or {}))
        return torch.cat([func(*added, row, right, **(kwargs or {})) for row in left.split(1)])


@contextmanager
def without_experts(inner: Any) -> Generator[None]:
    """Within a ``with`` block a mixture's experts return zeros.

    They see each token alone, but the number of tokens that an expert gets changes how its products are rounded, and
    with it a bit of the other documents' logits.
    """
    found = [module for name, module in inner.named_modules() if name.rpartition(".")[2] == "experts"]
    experts = [each for module in found for each in (module if isinstance(module, torch.nn.ModuleList) else (module,))]
    before = [(each, vars(each).get("forward")) for each in experts]

    def zeros(*inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(next(iter((*inputs, *named.values()))))

    for each in experts:
        each.forward = zeros
    try:
        yield
    finally:
        for each, own in before:
            del each.forward
            if own is not None:
                each.forward = own


def _packed(documents: list[torch.Tensor]) -> Batch:
    numbers = [torch.full_like(document, number) for number, document in enumerate(documents, 1)]
    return {
        "input_ids": torch.cat(documents, 1),
        "position_ids": torch.cat([torch.arange(document.shape[1])[None] for document in documents], 1),
        "sequence_ids": torch.cat(numbers, 1),
    }


# Ranks that share sequences (Ulysses): between layers a rank holds a slice of every row. In an attention layer the
# ranks exchange their slices of all heads for all slices of some heads, compute attention as without slices, and
# exchange back.
#
# DeepSpeed has the same exchange for transformers (``runtime/sequence_parallel/ulysses_sp.py``). It is not used, as it
# discards masks, so that the documents of a packed row see each other under SDPA; replaces ``sdpa`` for the whole
# process, where evaluation generates with whole sequences; and supports one batch size only.

NAME = "ftmon_sequence_parallel"
ROWS_KEY = "rows_key"
"""Name of a checksum of the whole rows and the slice's number: equal slices elsewhere do not give equal losses."""
_TOKENS = 12  # of each rank's slice of the check's row
_LOSS_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def cut(batch: Batch, size: int, rank: int) -> Batch:
    """Return slice ``rank`` of ``size`` of a batch of whole rows, which are padded to a multiple of ``size``.

    It has ``input_ids``, ``labels``, ``position_ids`` within the whole row, and ``shift_labels``: for each position the
    label that follows it in the whole row, possibly in the next slice. ``sequence_ids`` stay whole. There is no
    ``attention_mask``: padding is on the right, where causal attention does not reach.
    """
    ids, labels = batch["input_ids"], batch["labels"]
    length = ids.shape[1]
    missing = -length % size
    width = (length + missing) // size
    positions = batch["position_ids"] if "position_ids" in batch else torch.arange(length).expand_as(ids)

    def part(tensor: torch.Tensor, filler: int) -> torch.Tensor:
        return pad(tensor, (0, missing), value=filler)[:, rank * width : (rank + 1) * width].contiguous()

    result = {
        "input_ids": part(ids, 0),
        "labels": part(labels, IGNORED),
        "shift_labels": part(next_labels(labels), IGNORED),
        # The model may have no positions beyond the longest row.
        "position_ids": part(positions, 0),
        ROWS_KEY: torch.tensor(zlib.crc32(labels.numpy().tobytes(), zlib.crc32(ids.numpy().tobytes(), rank))),
    }
    if "sequence_ids" in batch:
        result["sequence_ids"] = pad(batch["sequence_ids"], (0, missing), value=0)
    return result


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

    Shapes are those of ``varlen_attention``, of a slice; ``document_mask`` is that of the keys of each query of a whole
    row, of shape [rows, 1, length, length]. An argument of the layer that has no support is a ``NotImplementedError``.
    """
    if sequence_group is None:
        return varlen_attention(module, query, key, value, attention_mask, **others)
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
        out, _ = varlen_attention(heads, query, key, value, None, **others)
    else:
        window = others.pop("sliding_window", None)
        if window and key.shape[2] > window:
            document_mask = document_mask & window_mask(query, key, window)
        out, _ = sdpa_attention_forward(heads, query, key, value, document_mask, **others)
    return sequence_group.exchange(out, 1, 2), None


def arguments(batch: dict[str, Any], group: SequenceGroup) -> dict[str, Any]:
    """Return the model's arguments of a slice on the device: with its group and the borders of packed documents.

    ``sequence_ids`` of packed rows become a mask, whose size is the square of the rows' length.
    """
    result: dict[str, Any] = {**batch, "sequence_group": group}
    if "cu_seq_lens" in batch:
        return with_borders(result, batch["input_ids"].shape[1] * group.size)
    if "sequence_ids" in batch:
        documents = result.pop("sequence_ids")
        same = documents[:, :, None] == documents[:, None, :]
        result["document_mask"] = same.tril()[:, None]
    return result


def set_up_sequence_parallel(model: Any, config: Config, world: World) -> bool:
    """Switch a model to sliced rows and check it; return whether packed rows use ``cu_seq_lens``.

    All ranks call this, after the engine and the fused loss are made. Other results on slices are a ``ConfigError``.
    """
    inner, length = causal_model(model), config.training.sequence_length
    if problem := refusal(inner.config, length, world.sequence.size):
        raise ConfigError(f"{SEQUENCES} {problem}")
    whole = _Reference(inner, world, bool(config.data.packing)) if world.has_values else None
    windows: list[int] = []
    varlen = config.data.packing and world.on_gpu and can_varlen(inner)
    if varlen:
        _choose(inner, world)
    try:
        _use(inner, windows)
        if whole is not None:
            problem = whole.difference(varlen)
            if problem and varlen:
                world.note(f"variable-length attention is not used, a mask is: {problem}")
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
    ALL_ATTENTION_FUNCTIONS.register(NAME, _noting(attend, windows))
    # Without a mask function transformers makes no mask: it would be one of slices.
    inner.set_attn_implementation(NAME)


def _noting(function: Callable[..., Any], windows: list[int]) -> Callable[..., Any]:
    """Return an attention function that records the sliding windows that it is given."""

    def noting(*inputs: Any, **others: Any) -> Any:
        if others.get("sliding_window"):
            windows.append(others["sliding_window"])
        return function(*inputs, **others)

    return noting


def _window_problem(settings: Any, noted: list[int], length: int) -> str:
    """Return the reason why windows or chunks of attention would be lost, which a short row cannot show."""
    settings = settings.get_text_config()
    if chunk := _chunk(settings, length):
        return f"its attention is in chunks of {chunk} tokens"
    windows = [getattr(layer, "sliding_window", None) for layer in layer_configs(settings)]
    window = min(filter(None, windows), default=length)
    if window >= length or getattr(settings, "use_sliding_window", True) is False:
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
    for layer in layer_configs(settings):
        heads = getattr(layer, "num_attention_heads", None)
        groups = getattr(layer, "num_key_value_heads", None) or heads
        if isinstance(heads, int) and isinstance(groups, int) and (text := heads_refusal(heads, groups, size)):
            return text
    if scaled := rope_by_length(settings):
        kind = f"rotary embeddings of type {scaled[0]}"
        return f"cannot be used with {kind}, which depend on the whole row's length; use 1"
    if chunk := _chunk(settings, length):
        return f"cannot be used with attention in chunks of {chunk} tokens; use 1"
    return ""


def _chunk(settings: Any, length: int) -> int:
    """Return the tokens of a chunk of attention that is shorter than ``length``, else 0."""
    chunk = getattr(settings, "attention_chunk_size", None) or length
    return chunk if chunk < length else 0


class _Reference:
    """A model's logits and loss for one row on each rank alone, by its own attention, for comparison with slices."""

    def __init__(self, inner: Any, world: World, packed: bool) -> None:
        self._inner = inner
        self._world = world
        length = world.sequence.size * _TOKENS
        generator = torch.Generator().manual_seed(0)
        row = torch.randint(0, _vocabulary(inner), (1, length), generator=generator)
        # The border is within a slice, and a document spans slices.
        self._documents = list(row.split([_TOKENS + 5, length - _TOKENS - 5], 1)) if packed else [row]
        with evaluating(inner):
            moved = [one.to(world.device) for one in self._documents]
            self._logits = torch.cat([inner(input_ids=one, use_cache=False).logits for one in moved], 1)
            losses = [inner(input_ids=one, labels=one, use_cache=False).loss for one in moved]
        self._loss = float(sum(losses))

    def difference(self, varlen: bool) -> str:
        """Return in words how the slices' results differ; empty if they do not. All ranks call this."""
        world, group = self._world, self._world.sequence
        problem = ""
        logits = loss = torch.zeros(())
        try:
            with evaluating(self._inner):
                logits = self._forward(self._documents, varlen).logits
                loss = self._forward(self._documents, varlen, labels=True).loss.double()
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
        dtype = next(self._inner.parameters()).dtype
        if not apart <= _TOLERANCE[dtype]:
            return f"slices of a row give other logits than the whole row (relative difference {apart:.1e})"
        if len(self._documents) > 1 and not self._is_isolated(varlen):
            return "documents of one row see each other"
        dist.all_reduce(loss)
        total = float(loss) / world.data_ranks
        if not abs(total - self._loss) <= _LOSS_TOLERANCE[dtype] * abs(self._loss):
            return f"slices of a row give a loss of {total:.6f}, and the whole row {self._loss:.6f}"
        return ""

    def _is_isolated(self, varlen: bool) -> bool:
        """Return whether a change of the first document leaves every bit of the second's logits."""
        first, second = self._documents
        changed = [(first + 1) % _vocabulary(self._inner), second]
        beyond = max(0, first.shape[1] - self._world.sequence.rank * _TOKENS)

        def alike() -> bool:
            one, other = (self._forward(each, varlen).logits[:, beyond:] for each in (self._documents, changed))
            return self._world.all_agree(torch.equal(one, other))

        with evaluating(self._inner), without_experts(self._inner):
            if alike():
                return True
            with _RowsApart():
                return alike()

    def _forward(self, documents: list[torch.Tensor], varlen: bool, labels: bool = False) -> Any:
        batch = _packed(documents)
        batch["labels"] = batch["input_ids"].clone()
        if len(documents) > 1:
            batch["labels"][:, documents[0].shape[1]] = IGNORED
        else:
            del batch["position_ids"], batch["sequence_ids"]
        group = self._world.sequence
        batch = cut(batch, group.size, group.rank)
        left_out = {ROWS_KEY} if labels else {ROWS_KEY, "labels", "shift_labels"}
        batch = isolate(batch, varlen) if varlen else batch
        moved = {name: tensor.to(self._world.device) for name, tensor in batch.items() if name not in left_out}
        return self._inner(**arguments(moved, group), use_cache=False)


def _vocabulary(inner: Any) -> int:
    return int(inner.config.get_text_config().vocab_size)


def on_device(batch: Batch, world: World) -> dict[str, Any]:
    """Return a collated batch on the device, with the arguments of attention."""
    moved = {name: tensor.to(world.device, non_blocking=True) for name, tensor in batch.items() if name != ROWS_KEY}
    if world.sequence.size > 1:
        return arguments(moved, world.sequence)
    return attention_arguments(moved)
