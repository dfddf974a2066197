"""torch.compile of the decoder layers, before the first step.

Each kind of layer is compiled once and used for all layers of the model: the layer is an argument of the compiled
function. Nothing is wrapped, so names in checkpoints and exports do not change. Only training with gradients runs
compiled code: its batches have one shape.
"""

import time
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_module

from ....protocol.errors import ConfigError
from ....protocol.text import duration
from ..engine.distributed import World
from ..monitor import activity


def compile_layers(layers: list[Any], partitioned: bool, budget: float) -> None:
    """Set layers whose ``forward`` is a ``LayerForward`` to compiled code in training; nothing is compiled yet.

    If ZeRO-3 has ``partitioned`` their parameters, those of a layer are gathered together, as compiled code cannot wait
    for each module inside it. ``budget`` is the share of its activations that a layer keeps.
    """
    import torch._dynamo.config as settings
    import torch._functorch.config as partitioner

    # A layer that reads its own number is compiled once per layer; beyond the limit layers would silently run eagerly.
    limit = 8 + 2 * len(layers)
    partitioner.activation_memory_budget = budget
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
    """Mark sizes of a batch as dynamic, so that code compiled for it accepts other numbers of documents."""
    borders = batch.get("cu_seq_lens_q")
    if borders is not None:
        torch._dynamo.maybe_mark_dynamic(borders, 0)


def compile_ahead(model: Any, layers: list[Any], batch: dict[str, Any], world: World) -> None:
    """Compile forward and backward of each layer with its inputs in one micro-batch. All ranks call this.

    Raises:
        ConfigError: the layers of this model cannot be compiled.
    """
    began = time.perf_counter()
    world.log("compiling decoder layers (model.compile)")
    # These hooks run after DeepSpeed's, so with ZeRO-3 the layer's parameters are whole.
    hooks = [layer.register_forward_pre_hook(_compile, with_kwargs=True) for layer in layers]
    with activity("compilation", "decoder layers"):
        try:
            model(**batch, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler and its backends raise many types
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch")):
                raise
            kind = model.config.model_type
            text = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigError(f"model.compile: layers of {kind} cannot be compiled: {text}; use off") from None
        finally:
            for hook in hooks:
                hook.remove()
    world.log(f"compiled decoder layers: {duration(time.perf_counter() - began)}")


def _compile(layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Run forward and backward of a layer with its inputs, without side effects."""
    hidden = inputs[0].detach().requires_grad_(inputs[0].requires_grad)
    wanted = [one for one in (hidden, *layer.parameters()) if one.requires_grad][:1]
    # Not through the layer's __call__, and into no parameter's .grad: DeepSpeed's hooks do not run.
    found = layer.forward(hidden, *inputs[1:], **named)
    if wanted:
        out: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
        torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
