"""torch.compile of the decoder layers, before the first step.

Each kind of layer is compiled once and used for all layers of the model: the function that is compiled takes the layer
as an argument. Nothing is wrapped, so names in checkpoints and exports stay. Only training with gradients runs compiled
code: its batches have one shape.
"""

import time
from typing import Any

import torch

from ....protocol.errors import ConfigError
from ....protocol.text import duration
from ..engine.distributed import World
from ..monitor import Monitor


def compile_layers(layers: list[Any]) -> None:
    """Make training call compiled code in layers whose ``forward`` is a ``LayerForward``; nothing is compiled yet."""
    import torch._dynamo.config as settings

    # A layer that reads its own number is compiled for each; beyond the limit layers would silently run as they are.
    limit = 8 + 2 * len(layers)
    settings.recompile_limit = max(settings.recompile_limit, limit)
    compiled: dict[Any, Any] = {}
    for layer in layers:
        plain = layer.forward.in_training
        if plain not in compiled:
            compiled[plain] = torch.compile(plain, dynamic=False)
        layer.forward.in_training = compiled[plain]


def mark_varying(batch: dict[str, Any]) -> None:
    """Let code that is compiled for one batch take others with another number of documents."""
    borders = batch.get("cu_seq_lens_q")
    if borders is not None:
        torch._dynamo.maybe_mark_dynamic(borders, 0)


def compile_ahead(model: Any, batch: dict[str, Any], world: World, monitor: Monitor) -> None:
    """Compile forward and backward on one micro-batch. All ranks call this.

    Args:
        model: the model inside the engine.
        batch: the micro-batch, as the model takes it.
        world: the ranks.
        monitor: shows that it is compiling.

    Raises:
        ConfigError: the layers of this model cannot be compiled.
    """
    began = time.perf_counter()
    world.say("compiling decoder layers (model.compile)")
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad][:1]
    with monitor.activity("compilation", "decoder layers"):
        try:
            # Without DeepSpeed's engine, and into no parameter's .grad: its hooks do not run.
            loss: torch.Tensor = model(**batch, use_cache=False).loss
            torch.autograd.grad(loss, wanted, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler and its backends raise
            if not _is_of_compiler(error):
                raise
            kind = model.config.model_type
            text = (str(error).strip() or repr(error)).splitlines()[0]
            raise ConfigError(f"model.compile: layers of {kind} cannot be compiled: {text}; use off") from None
    world.say(f"compiled decoder layers: {duration(time.perf_counter() - began)}")


def _is_of_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch"))
