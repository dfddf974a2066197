"""Objects that a rank trains, and a model inside its wrappers: its name, its size and its data type."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..guard import frame_locals, nothing
from .context import WHOLE

_MOST_WRAPPERS = 8
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel", "AveragedModel")


def describe_model(module: Any, tensor_parallel: int = 1) -> dict[str, Any]:
    """Return a model's name and its parameter counts (partitioned and sharded parameters at their full size).

    The name is that of the model's checkpoint if it has one, else the class of the model inside its wrappers.
    ``tensor_parallel`` is the number of ranks over which its tensor-parallel parameters are split.
    """
    sizes = list(parameter_sizes(module, tensor_parallel))
    own = own_model(module)
    config = getattr(own, "config", None)
    name = str(getattr(config, "_name_or_path", "") or "") or own_class(own).__name__
    trainable = sum(size for size, is_trainable in sizes if is_trainable)
    return {"model": name, "parameters": sum(size for size, _ in sizes), "trainable_parameters": trainable}


def describe_models(modules: Sequence[Any]) -> dict[str, Any]:
    """Return the names of several models in one line, and their parameter counts summed up."""
    found = [describe_model(module) for module in modules]
    counts = {name: sum(each[name] for each in found) for name in ("parameters", "trainable_parameters")}
    return {"model": " + ".join(each["model"] for each in found), **counts}


def dtype_name(dtype: Any) -> str:
    """Return ``bf16``, ``fp16`` or ``fp32`` for that dtype; empty for any other."""
    return {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}.get(str(dtype), "")


def dtype_of(module: Any) -> str:
    """Return the dtype with the most parameter elements, as ``dtype_name`` returns it."""
    sizes = Counter[str]()
    for parameter in module.parameters():
        sizes[dtype_name(parameter.dtype)] += number_of_elements(parameter)
    return max(sizes, key=lambda name: sizes[name], default="")


def own_model(module: Any) -> Any:
    """Return the model inside DDP, FSDP, ``torch.compile``, DeepSpeed and PEFT wrappers."""
    for _ in range(_MOST_WRAPPERS):
        inner = _inside(module)
        if inner is None:
            break
        module = inner
    return module


def _inside(module: Any) -> Any:
    kind = type(module)
    home = kind.__module__.split(".")[0]
    if kind.__name__ == "OptimizedModule":
        return getattr(module, "_orig_mod", None)
    if kind.__name__ in _WRAPPERS or home == "deepspeed":
        return getattr(module, "module", None)
    if home == "peft" and callable(getattr(module, "get_base_model", None)):
        return module.get_base_model()
    return None


def own_class(module: Any) -> type:
    """Return a model's original class: FSDP2 and parametrizations replace it by a derived one."""
    kind = type(module)
    for base in kind.__mro__:
        if base.__module__.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
            continue
        if base is kind and any(parent.__name__ == "FSDPModule" for parent in kind.__bases__):
            continue
        if base.__module__ == "torch.nn.utils.parametrize":
            continue
        return base
    return kind


def shifts_labels(module: Any) -> bool:
    """Return whether a model in its wrappers predicts the next token from unshifted labels, as transformers' do."""
    return own_class(own_model(module)).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def parameters_of(optimizer: Any) -> list[Any]:
    """List the parameters that an optimizer updates; none without an optimizer, or of an engine without groups."""
    groups = getattr(optimizer, "param_groups", None) or []
    return [parameter for group in groups for parameter in group["params"]]


def parameters_of_engine(engine: Any) -> list[Any]:
    """List the model's parameters that a DeepSpeed engine's optimizer updates, of which it may have flat copies."""
    optimizer = getattr(engine, "optimizer", None)
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):  # ZeRO 1 and 2; BF16_Optimizer; ZeRO-3 and fp16
        if groups := getattr(optimizer, name, None):
            return [each for group in groups for each in group]
    return parameters_of(optimizer)


def parameters_under(losses: Sequence[Any]) -> list[Any]:
    """List the parameters whose gradients a backward from these tensors computes."""
    variables = [getattr(node, "variable", None) for node in nodes_under(losses)]
    return list({id(each): each for each in variables if isinstance(each, torch.nn.Parameter)}.values())


def nodes_under(losses: Sequence[Any]) -> Iterator[Any]:
    """Yield the nodes of the graph that a backward from these tensors goes through."""
    waiting = [loss.grad_fn for loss in losses if getattr(loss, "grad_fn", None) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        further = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= further
        waiting += further


def steps_done(optimizer: Any) -> int:
    """Return how many updates an optimizer's state counts on the host, as after it was loaded; 0: none, or unknown.

    Parameters without a gradient in some steps have fewer.
    """
    states: list[Any] = list(getattr(optimizer, "state", {}).values())
    counts = [state.get("step") for state in states if isinstance(state, dict)]
    here = [one for one in counts if isinstance(one, int | float) or (type(one) is torch.Tensor and one.is_cpu)]
    return max((int(one) for one in here if not isinstance(one, torch.Tensor) or one.numel() == 1), default=0)


def learning_rate(rates: Sequence[Any]) -> Any:
    """Return the first of the groups' rates that is not 0, else the first; a tensor is not read, and counts as one."""
    rate = rates[0] if rates else None
    if isinstance(rate, int | float) and not rate:  # a group that stands still, beside others
        return next((other for other in rates if isinstance(other, torch.Tensor) or other), rate)
    return rate


def number_of_elements(parameter: Any) -> int:
    """Return a parameter's number of elements, in all shards of ZeRO-3; 0 for a lazy one that has no size yet."""
    return 0 if is_lazy(parameter) else int(getattr(parameter, "ds_numel", parameter.numel()))


def full_size(parameter: Any, tensor_parallel: int = 1) -> int:
    """Return a parameter's number of elements in all its shards: of ZeRO-3, and of tensor parallelism over ranks."""
    size = number_of_elements(parameter)
    return size * tensor_parallel if getattr(parameter, "tensor_model_parallel", False) else size


def parameter_sizes(module: Any, tensor_parallel: int = 1) -> Iterator[tuple[int, bool]]:
    """Return each parameter's full number of elements, and whether it is trained."""
    # FSDP1 keeps flat shards: their handles have the full size.
    flat: dict[int, Any] = {}
    for each in module.modules() if "torch.distributed.fsdp" in sys.modules else ():
        handle = getattr(each, "_handle", None)
        whole = getattr(getattr(handle, "flat_param", None), "_unpadded_unsharded_size", None)
        if handle is not None and whole is not None:
            flat[id(handle)] = handle
    inside: set[int] = set()
    for handle in flat.values():
        parameter = handle.flat_param
        inside.add(id(parameter))
        views = [view for view in getattr(parameter, "_params", None) or () if view is not None]
        inside.update(map(id, views))
        sizes, trained = getattr(parameter, "_numels", ()), [bool(view.requires_grad) for view in views]
        if views and len(sizes) == len(trained):
            yield from zip(map(int, sizes), trained, strict=True)
        else:
            yield int(parameter._unpadded_unsharded_size.numel()), bool(parameter.requires_grad)
    for parameter in module.parameters():
        if id(parameter) not in inside:
            yield full_size(parameter, tensor_parallel), bool(parameter.requires_grad)


_MOST_FRAMES = 24
_MOST_ATTRIBUTES = 200


class Optimized:
    """The models and parameters of the bare optimizers of one training, if no wrapper, engine or Trainer names them."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Any]] = []
        self._sizes: dict[int, tuple[int, bool]] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    def forget(self) -> None:
        """Forget all optimizers, because another training has begun."""
        self.__init__()

    def add(self, optimizer: Any, frame: FrameType | None) -> dict[str, Any]:
        """Register an optimizer; return the trained models as fields of ``Hello``."""
        return self.add_parameters(parameters_of(optimizer), frame)

    def add_parameters(self, parameters: Sequence[Any], frame: FrameType | None) -> dict[str, Any]:
        """Register trained parameters; return their models as fields of ``Hello``."""
        own = {id(parameter): parameter for parameter in parameters}
        models = _holding(own.keys(), frame) if own else []
        known = [found for reference in self._models if (found := reference()) is not None]
        known += [model for model in models if all(model is not each for each in known)]
        self._models = [weakref.ref(each) for each in known]
        for key, each in {**own, **{key: each for model in models for key, each in _by_id(model)}}.items():
            self._sizes[key] = number_of_elements(each), bool(each.requires_grad)
            self._alive[key] = weakref.ref(each, partial(self._forget, key))
        sizes = list(self._sizes.values())  # a parameter may be freed meanwhile
        return {
            "model": " + ".join(describe_model(each)["model"] for each in known),
            "parameters": sum(size for size, _ in sizes),
            "trainable_parameters": sum(size for size, is_trained in sizes if is_trained),
        }

    def sole(self) -> Callable[[], Any]:
        """Return a weak reference to the model if there is one alone."""
        return self._models[0] if len(self._models) == 1 else nothing

    def _forget(self, key: int, reference: weakref.ref[Any]) -> None:
        """Forget a parameter that was freed: another one may get its id."""
        if self._alive.get(key) is reference:
            del self._alive[key]
            self._sizes.pop(key, None)


def _by_id(model: Any) -> Iterator[tuple[int, Any]]:
    return ((id(parameter), parameter) for parameter in model.parameters())


def _holding(wanted: Set[int], frame: FrameType | None) -> list[Any]:
    """Return the smallest model with all the parameters in a variable near ``frame``; else several that have them."""
    module_class: Any = sys.modules["torch.nn"].Module
    frames: list[FrameType] = []
    while frame is not None and len(frames) < _MOST_FRAMES:
        frames.append(frame)
        frame = frame.f_back
    for find in (_whole, _parts):
        for each in frames:
            models = {id(model): model for model in _variables(each, module_class)}.values()
            if found := find(wanted, list(models)):
                return [own_model(model) for model in found]
    return []


def _whole(wanted: Set[int], models: Sequence[Any]) -> list[Any]:
    held = [(model, {key for key, _ in _by_id(model)}) for model in models]
    return [model for model, own in sorted(held, key=lambda each: len(each[1])) if wanted <= own][:1]


def _parts(wanted: Set[int], models: Sequence[Any]) -> list[Any]:
    """Return the largest models that train nothing but such parameters, if together they have all of them."""
    trained = [(model, {key for key, each in _by_id(model) if each.requires_grad}) for model in models]
    found: list[Any] = []
    missing = set(wanted)
    for model, own in sorted(trained, key=lambda each: -len(each[1])):
        if own and own <= missing:
            found.append(model)
            missing -= own
    return [model for model in models if any(model is each for each in found)] if not missing else []


def _variables(frame: FrameType, module_class: Any) -> Iterator[Any]:
    """Yield the modules among a frame's variables and among the attributes of its ``self``."""
    variables = frame_locals(frame)
    receiver = frame.f_code.co_varnames[0] if frame.f_code.co_argcount else ""
    attributes = getattr(variables.get(receiver), "__dict__", None)
    held = list(attributes.values())[:_MOST_ATTRIBUTES] if isinstance(attributes, dict) else []
    yield from (value for value in (*variables.values(), *held) if isinstance(value, module_class))


class Trained:
    """Objects that this rank trains. Hooks set them on the training thread; any thread may read them."""

    __slots__ = ("engine", "found", "model", "partitions", "primary", "shifts_labels", "tensor_parallel")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was trained."""
        self.engine: Callable[[], Any] = nothing
        """Returns the DeepSpeed engine; None before there is one, and after it was freed."""
        self.model: Callable[[], Any] = nothing  # Returns the model; None while unknown, and after it was freed
        self.found: Callable[[], Any] = nothing
        """Returns the model that a bare optimizer updates, as found among the script's variables."""
        self.primary: Callable[[], Any] = nothing
        """Returns the optimizer whose updates are the steps, if there is no engine; None once it was freed."""
        self.partitions = 1  # Number of ranks over which ZeRO partitions the optimizer's state
        self.tensor_parallel = WHOLE  # This rank's part of the batches that its tensor-parallel group trains together
        self.shifts_labels = False  # The model predicts the next token from labels that are passed unshifted

    def find(self, model: Callable[[], Any]) -> None:
        """Set ``found``, if nothing names the model."""
        self.found = model
        self.shifts_labels = shifts_labels(model())

    def any_model(self) -> Any:
        """Return the model, or the one that was found for a bare optimizer; None: unknown."""
        model = self.model()
        return self.found() if model is None else model
