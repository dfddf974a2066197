"""The decoder layers of a model, and the training's wrapper around each forward.

The forward of a layer object is replaced, not the layer: parameter names and the hooks by which ZeRO-3 gathers
parameters do not change. Evaluation and generation run the layer's own forward.
"""

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ....protocol.errors import ConfigError
from ....protocol.text import duration
from ..config.schema import Config
from ..distributed import World
from ..monitor import activity

# Activation offload. On a GPU copies run on a separate stream, from and to page-locked memory: out while the next layer
# computes, back before the backward pass needs them. On the CPU the same code copies from host memory to host memory.

_AHEAD = 2
"""Number of tensors copied back ahead of their use, and of copies out that may be under way."""


@dataclass(eq=False)
class Saved:
    """One activation in host memory; autograd holds one reference for each time it was saved."""

    host: torch.Tensor
    storage: StorageWeakRef
    """While it exists, no other storage gets the address that identifies this one."""
    device: torch.device
    before: "ref[Saved] | None"
    """The activation saved before it, which the backward pass needs after it."""
    uses: int = 1
    """Number of times it was saved and not yet unpacked."""
    back: torch.Tensor | None = None
    returned: Any = None
    """CUDA event after the copy to the device."""


class HostOffload:
    """Moves tensors that autograd saves to host memory, within the contexts that ``hooks`` returns.

    The ``model``'s parameters, which stay on the device in any case, and tensors below ``least_bytes`` are not moved.
    """

    def __init__(self, model: torch.nn.Module, least_bytes: int) -> None:
        self._least_bytes = least_bytes
        self._parameters: dict[int, list[torch.nn.Parameter]] = {}
        for parameter in model.parameters():
            # ZeRO-3 replaces a partitioned parameter by an empty tensor.
            self._parameters.setdefault(int(getattr(parameter, "ds_numel", parameter.numel())), []).append(parameter)
        self._stream: Any = None
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._known: WeakValueDictionary[Any, Saved] = WeakValueDictionary()
        self._last: ref[Saved] | None = None

    def hooks(self, *, all_sizes: bool) -> saved_tensors_hooks:
        """Return a context in which saved tensors are moved; with ``all_sizes``, small ones too."""
        least = 0 if all_sizes else self._least_bytes
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, least), self._unpack)

    def _pack(self, tensor: torch.Tensor, least_bytes: int) -> Any:
        if tensor.nbytes < least_bytes or not _movable(tensor) or self._is_parameter(tensor):
            return tensor
        key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = self._known.get(key)
        if known is not None and not known.storage.expired():
            known.uses += 1
            return known
        place: dict[str, Any] = {"device": "cpu", "pin_memory": tensor.is_cuda}
        host = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, **place)
        saved = Saved(host, StorageWeakRef(tensor.untyped_storage()), tensor.device, self._last)
        self._copy_out(tensor, saved)
        self._known[key] = saved
        self._last = ref(saved)
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Saved):
            return saved
        self._fetch(saved)
        back = saved.back
        assert back is not None
        if saved.returned is not None:
            torch.cuda.current_stream(saved.device).wait_event(saved.returned)
        saved.uses -= 1
        if saved.uses <= 0:
            saved.back = saved.returned = None
        before: Saved | None = saved
        for _ in range(_AHEAD):
            before = before.before() if before is not None and before.before is not None else None
            if before is not None and before.uses > 0:
                self._fetch(before)
        return back

    def _is_parameter(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, torch.nn.Parameter):
            return True
        # A transposed view of a weight, as matrix products save it, has the weight's size and address. Under ZeRO-3
        # the address is that of the gathered weight, which changes.
        place = tensor.data_ptr()
        return any(parameter.data_ptr() == place for parameter in self._parameters.get(tensor.numel(), ()))

    def _side_stream(self, device: torch.device) -> Any:
        self._stream = self._stream or torch.cuda.Stream(device)
        return self._stream

    def _copy_out(self, tensor: torch.Tensor, saved: Saved) -> None:
        if not tensor.is_cuda:
            saved.host.copy_(tensor)
            return
        compute, side = torch.cuda.current_stream(tensor.device), self._side_stream(tensor.device)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            saved.host.copy_(tensor, non_blocking=True)
            copied = side.record_event()
        # The tensor's memory may be used again once the compute stream has waited for the copy.
        self._leaving.append((tensor, copied))
        while len(self._leaving) > _AHEAD:
            _, event = self._leaving.popleft()
            compute.wait_event(event)

    def _fetch(self, saved: Saved) -> None:
        """Begin the copy back to the device, unless it has begun."""
        if saved.back is not None:
            return
        if saved.device.type != "cuda":
            saved.back = saved.host.clone()
            return
        compute, side = torch.cuda.current_stream(saved.device), self._side_stream(saved.device)
        while self._leaving:
            _, event = self._leaving.popleft()
            compute.wait_event(event)
        # Allocated on the compute stream, which may still be using this memory.
        saved.back = torch.empty_like(saved.host, device=saved.device)
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            saved.back.copy_(saved.host, non_blocking=True)
            saved.returned = side.record_event()
        # If the backward pass ends early, the memory is not reused before the copy is complete.
        saved.back.record_stream(side)


def _movable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain, of floating point, and fills its memory without gaps or overlaps."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_floating_point():
        return False
    if tensor.layout != torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=lambda place: -tensor.stride(place))
    return tensor.permute(order).is_contiguous()


# Gradient checkpointing: ``layers`` keeps a layer's inputs. ``selective`` also keeps the outputs of matrix products and
# attention, which take most of the time to compute, and recomputes norms, activations, rotations and residuals.

_SDPA = (
    *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
_KEPT = frozenset(
    [f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")]
    + [f"aten::_scaled_dot_product_{name}" for name in _SDPA]
    + ["ftmon::attend", "torch_attn::_varlen_attn"]
    + ["flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"]
)
"""Operators whose outputs the selective mode keeps."""

Recompute = Callable[..., Any]
"""Calls a function with arguments, and recomputes it in the backward pass."""
_Outputs = dict[Any, deque[Any]]


class _Keep(TorchDispatchMode):
    """Keeps the outputs of chosen operators in ``outputs``, in the order of their calls."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for written in _written(func, args, kwargs or {}):
            self._copy(written)
        out = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}):
            self._outputs[func].append(tree_map(_with_version, out))
        return out

    def _copy(self, written: torch.Tensor) -> None:
        """Keep a copy of an output that is about to be changed in place: ZeRO-3's linear layers add their bias so."""
        storage = written.untyped_storage().data_ptr()

        def copied(value: Any) -> Any:
            if not isinstance(value, _Versioned) or value.tensor.untyped_storage().data_ptr() != storage:
                return value
            return _with_version(value.tensor.clone())

        for outputs in self._outputs.values():
            for place, kept in enumerate(outputs):
                outputs[place] = tree_map(copied, kept, is_leaf=lambda one: isinstance(one, _Versioned))


class _Reuse(TorchDispatchMode):
    """Returns the kept outputs in place of calling the operators.

    PyTorch's own pair of modes (``create_selective_checkpoint_contexts``) refuses a recomputation in which any other
    operator runs more or less often than in the forward; ZeRO-3 gathers differently in the two.
    """

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_kept(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if not self._outputs[func]:
            raise RuntimeError(f"{func} runs more often in the backward pass than in the forward pass")
        return tree_map(_checked, self._outputs[func].popleft(), is_leaf=lambda one: isinstance(one, _Versioned))


def _written(operator: Any, arguments: Any, named: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator changes in place."""
    schema: Any = getattr(operator, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = [
        arguments[place] if place < len(arguments) else named.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.is_write
    ]
    return [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]


class _Versioned(NamedTuple):
    tensor: torch.Tensor
    version: int


def _with_version(value: Any) -> Any:
    return _Versioned(value.detach(), value._version) if isinstance(value, torch.Tensor) else value


def _checked(value: Any) -> Any:
    if not isinstance(value, _Versioned):
        return value
    if value.tensor._version != value.version:
        raise RuntimeError(
            "an output kept for the backward pass was changed in place; use gradient_checkpointing=layers"
        )
    return value.tensor


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    outputs: _Outputs = defaultdict(deque)
    return _Keep(outputs), _Reuse(outputs)


def _is_kept(operator: Any, arguments: Any, named: Any) -> bool:
    dropout_at = _dropout_argument(operator)
    if dropout_at is None:
        return False
    # An operator that is not run again draws no random numbers: every later dropout would differ.
    return not named.get("dropout_p", arguments[dropout_at] if 0 <= dropout_at < len(arguments) else 0.0)


@cache
def _dropout_argument(operator: Any) -> int | None:
    """Return the index of a kept operator's dropout probability, -1 if it has none; None for other operators."""
    schema: Any = getattr(operator, "_schema", None)
    if schema is None or schema.name not in _KEPT:
        return None
    names: list[str] = [argument.name for argument in schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else -1


MODES: dict[str, Recompute] = {
    "layers": partial(checkpoint, use_reentrant=False),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=_contexts),
}
"""Values of ``model.gradient_checkpointing``, besides ``none``: both keep a function's tensor inputs."""


# torch.compile: each kind of layer is compiled once, with the layer as an argument of the compiled function. Nothing is
# wrapped, so names in checkpoints and exports do not change. Only training with gradients runs compiled code: its
# batches have one shape.


def compile_layers(layers: list[Any], partitioned: bool, budget: float) -> None:
    """Set layers whose ``forward`` is a ``LayerForward`` to compiled code in training; nothing is compiled yet.

    If ZeRO-3 has ``partitioned`` their parameters, those of a layer are gathered together, as compiled code cannot wait
    for each module inside it. ``budget`` is the share of its activations that a layer keeps.
    """
    import torch._dynamo.config as settings
    import torch._functorch.config as partitioner
    from deepspeed.utils import set_z3_leaf_module

    # A layer that reads its own number is compiled once per layer; beyond the limit layers would silently run eagerly.
    limit = 8 + 2 * len(layers)
    partitioner.activation_memory_budget = budget
    # Else the code of the last layer, which has ``_Take``, is found again but traced and partitioned anew.
    partitioner.autograd_cache_allow_custom_autograd_functions = True
    settings.recompile_limit = max(settings.recompile_limit, limit)
    compiled: dict[Any, Any] = {}
    for layer in layers:
        plain = layer.forward.in_training
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, dynamic=False)
        layer.forward.in_training = compiled[plain]
        if partitioned:
            set_z3_leaf_module(layer, True)


def mark_varying(batch: dict[str, Any]) -> None:
    """Mark sizes of a batch as dynamic: code compiled for it accepts other numbers of documents and label tokens."""
    for name in ("cu_seq_lens_q", "label_rows"):
        if name in batch:
            torch._dynamo.maybe_mark_dynamic(batch[name], 0)


def run_uncompiled(model: Any) -> None:
    """Undo ``compile_layers``."""
    for layer in decoder_layers(model):
        if isinstance(layer.forward, LayerForward):
            layer.forward.run_uncompiled()


def compile_ahead(model: Any, batch: dict[str, Any], world: World, *, required: bool) -> None:
    """Compile forward and backward of each layer with its inputs in one micro-batch. All ranks call this.

    If the layers cannot be compiled, or give other results than uncompiled, raise ``ConfigError`` if that is
    ``required``; else nothing of the training is compiled from here on, with a note.
    """
    began = time.perf_counter()
    layers, kind = decoder_layers(model), model.config.model_type
    if not layers:
        world.note(f"decoder layers are not compiled: {kind} has none that transformers marks")
        return
    world.log("compiling decoder layers (model.compile=off turns it off)")
    problem = ""
    different: dict[Any, str] = {}
    # These hooks run after DeepSpeed's, so with ZeRO-3 the layer's parameters are whole.
    hook = partial(_compile, different)
    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    with activity("compilation", "decoder layers"):
        try:
            model(**batch, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler and its backends raise many types
            compiler = ("torch._dynamo", "torch._inductor", "torch._functorch")
            if required and not type(error).__module__.startswith(compiler):
                raise  # not of the compiler; without compilation the rehearsal finds it
            cause = getattr(error, "inner_exception", error)  # the backend's own
            text = (str(cause).strip() or repr(cause)).splitlines()[0]
            problem = f"layers of {kind} cannot be compiled: {text}"
        finally:
            for one in hooks:
                one.remove()
    # Not raised in the hook: ranks that share parameters must all run the whole pass.
    problem = problem or next((f"layers of {kind} {found}" for found in different.values() if found), "")
    if not world.all_agree(not problem):
        problem = problem or f"layers of {kind} cannot be compiled in another rank"
        if required:
            raise ConfigError(f"model.compile: {problem}; use off")
        world.note(f"model.compile: {problem}; nothing is compiled")
        run_uncompiled(model)
        torch.compiler.set_stance("force_eager")  # the loss too
        return
    world.log(f"compiled decoder layers: {duration(time.perf_counter() - began)}")


def _compile(different: dict[Any, str], layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Run forward and backward of a layer with its inputs, without side effects.

    For the first layer of each compiled code, ``different`` gets in words how its gradients differ from uncompiled ones
    ("": they do not).
    """
    hidden = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
    wanted = [one for one in (hidden, *layer.parameters()) if one.requires_grad]
    code = getattr(layer.forward, "in_training", layer.forward)
    # The last layer's own code is compiled apart.
    code = (code, any(isinstance(module.forward, ChosenRows) for module in layer.children()))
    checked = isinstance(layer.forward, LayerForward) and code not in different and not _is_random(layer)
    results: list[Any] = []
    # Not through the layer's __call__, and into no parameter's .grad: DeepSpeed's hooks do not run.
    for forward in (layer.forward, layer.forward.plain) if checked else (layer.forward,):
        found = forward(hidden, *inputs[1:], **named)
        out: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
        if wanted:
            generator = torch.Generator(out.device).manual_seed(0)
            slope = torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)
            results.append(torch.autograd.grad(out, wanted if checked else wanted[:1], slope, allow_unused=True))
        del found, out
    if checked:
        names = ["the input", *(name for name, one in layer.named_parameters() if one.requires_grad)][-len(wanted) :]
        different[code] = _difference(names, *results) if wanted else ""


_OTHER = 0.5
"""Relative difference of a matrix's gradient that no rounding explains; a gradient that is missing differs by 1."""


def _difference(names: list[str], compiled: Any, plain: Any) -> str:
    for name, mine, true in zip(names, compiled, plain, strict=True):
        if true is None or true.dim() < 2:  # a key's bias has a gradient of rounding alone
            continue
        size = float(true.float().norm())
        if not math.isfinite(size):  # the weights are to blame
            continue
        distance = size if mine is None else float((mine.float() - true.float()).norm())
        if not distance <= _OTHER * size:
            return f"have other gradients compiled ({name}: relative difference {distance / (size or 1.0):.1e})"
    return ""


def _is_random(layer: Any) -> bool:
    """Return whether a layer has dropout, for which compiled code draws other numbers."""
    values = [value for module in layer.modules() for name, value in vars(module).items() if "drop" in name]
    values += [module.p for module in layer.modules() if isinstance(module, torch.nn.Dropout)]
    return any(isinstance(value, float) and value > 0 for value in values)


class LayerForward:
    """Forward of one decoder layer: in training with gradients it recomputes and offloads, else it is the plain one."""

    def __init__(self, layer: torch.nn.Module, recompute: Recompute | None, offload: HostOffload | None) -> None:
        self._layer = layer
        self._recompute = recompute
        self._offload = offload
        own: Any = type(layer).forward
        # transformers 5.23 wraps it with its own gradient checkpointing.
        self._plain: Callable[..., Any] = getattr(own, "__wrapped__", own)
        self.in_training = self._plain
        """Called by training with the layer and its arguments: the plain forward, or its compiled form."""

    def run_uncompiled(self) -> None:
        """Train with the plain forward from now on."""
        self.in_training = self._plain

    def plain(self, *inputs: Any, **named: Any) -> Any:
        """Return what the layer's own forward returns, with nothing of this class."""
        return self._plain(self._layer, *inputs, **named)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the layer's own forward returns."""
        layer = self._layer
        if not (layer.training and torch.is_grad_enabled()):
            return self._plain(layer, *inputs, **named)
        offloading: AbstractContextManager[Any] = nullcontext()
        if self._offload is not None:
            # A recomputed layer saves only its inputs here.
            offloading = self._offload.hooks(all_sizes=self._recompute is not None)
        with offloading:
            if self._recompute is None:
                return self.in_training(layer, *inputs, **named)
            return self._recompute(lambda *tensors: self.in_training(layer, *tensors, **named), *inputs)


class ChosenRows:
    """Forward of a module that computes each position by itself: of the ``chosen`` ones, and zeros at the others."""

    def __init__(self, module: Any) -> None:
        self.plain: Callable[..., Any] = module.forward
        self.chosen: torch.Tensor | None = None
        """Indices into the flattened positions, each once, in order; None: all. It stays until the backward pass."""

    def __call__(self, hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return the module's output for ``hidden`` [rows, length, features]; BLOOM's adds ``others``, for all."""
        if self.chosen is None or others:
            return self.plain(hidden, *others)
        flat = hidden.flatten(0, -2)
        # Not by an index alone, whose gradient is a sum that sorts the indices.
        out: torch.Tensor = self.plain(_Take.apply(flat, self.chosen)[None])[0]
        return _Put.apply(out, self.chosen, flat.shape[0]).view(*hidden.shape[:-1], out.shape[-1])


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.count = values.shape[0]
        return values.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        (grad,) = grad_outputs
        return grad.new_zeros(ctx.count, grad.shape[1]).index_copy(0, ctx.saved_tensors[0], grad), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(places)
        return values.new_zeros(count, values.shape[1]).index_copy(0, places, values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return grad_outputs[0].index_select(0, ctx.saved_tensors[0]), None, None


def set_up(inner: Any, config: Config) -> None:
    """Set up the configured gradient checkpointing, activation offload and compilation of the decoder layers."""
    model = config.model
    settings = ("gradient_checkpointing", "activation_offload", "compile")
    asked = [name for name in settings if getattr(model, name) not in ("none", "off")]
    layers = decoder_layers(inner) if asked else []
    if not layers and asked in ([], ["compile"]) and model.compile != "layers":
        return
    if not layers:
        raise ConfigError(f"model.{asked[0]}: {inner.config.model_type} has no decoder layers that transformers marks")
    offload = HostOffload(inner, model.offload_bytes) if model.activation_offload != "none" else None
    inputs_alone = model.activation_offload == "inputs"
    for number, layer in enumerate(layers):
        recompute = MODES.get(model.gradient_checkpointing) if number % model.checkpoint_every == 0 else None
        own = None if inputs_alone and recompute is None else offload
        layer.forward = LayerForward(layer, recompute, own)
    if model.compile != "off":
        compile_layers(layers, config.zero.stage == 3, model.activation_memory_budget)
        if config.lora.rank:
            # The first layer, whose input has no gradient as embeddings are frozen, would be compiled for itself; and
            # with ZeRO-3 DeepSpeed reduces a layer's gradients once its input's gradient is known.
            inner.enable_input_require_grads()
    if model.gradient_checkpointing != "none" and hasattr(inner.base_model, "gradient_checkpointing"):
        # transformers and the memory report read this flag.
        inner.base_model.gradient_checkpointing = True


def decoder_layers(inner: Any) -> list[Any]:
    """Return the repeated layers of a transformers model, in order; empty if none are found."""
    return [
        layer
        for block in inner.modules()
        if isinstance(block, torch.nn.ModuleList)
        for layer in block
        if isinstance(layer, GradientCheckpointingLayer)
    ]
