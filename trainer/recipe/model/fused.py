"""Makes a transformers model compute its loss without logits at full size, if that gives the same loss.

The last linear layer is still called as a module, with the hidden states and the labels, so that ZeRO-3's hooks gather
its weight. The computation between that layer and the loss is read from the model's configuration, and then checked
against the model's own forward; a model with another one keeps its own loss.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..engine.distributed import World
from .linear_cross_entropy import LogitTransform, linear_cross_entropy
from .loss import label_positions, next_labels, summed_loss

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Relative difference of the two losses that rounding explains."""
_SAMPLE_TOKENS = 24


def set_up(model: Any, config: Config, world: World) -> bool:
    """Switch a model to the fused loss; return whether it is in use. All ranks call this, after the engine is made.

    Raises:
        ConfigError: ``model.fused_loss`` is on and the model's loss is not of that form.
    """
    if config.model.fused_loss == "off":
        return False
    inner = causal_model(model)
    problem = _problem(inner)
    if not problem:
        undo = _patch(inner, transform_of(inner.config), compiled=config.model.compile != "off")
        problem = _difference(inner, world)
        if problem:
            undo()
    if not problem:
        return True
    if config.model.fused_loss == "on":
        raise ConfigError(f"model.fused_loss is on, but {problem}; use model.fused_loss=auto")
    world.log(f"note: logits are computed at full size (model.fused_loss): {problem}")
    return False


def causal_model(model: Any) -> Any:
    """Return transformers' model inside peft's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def transform_of(settings: Any) -> LogitTransform:
    """Return the logit transform of a transformers configuration: Granite divides, Cohere multiplies, Gemma 2 caps."""
    settings = settings.get_text_config()
    scale = float(getattr(settings, "logit_scale", None) or 1.0)
    scale /= float(getattr(settings, "logits_scaling", None) or 1.0)
    return LogitTransform(scale, float(getattr(settings, "final_logit_softcapping", None) or 0.0))


def _problem(inner: Any) -> str:
    """Return the reason, by its parts, why a model cannot use the fused loss; empty if it can."""
    head = inner.get_output_embeddings()
    kind = inner.config.model_type
    if next(inner.parameters()).dtype == torch.float16:
        # Computed in the forward pass, before the loss scale is known: sums over tokens overflow fp16.
        return "its gradients would overflow in fp16"
    if type(head) is not torch.nn.Linear:
        return f"the last layer of {kind} is {type(head).__name__}, not a plain linear layer"
    if inner.base_model is inner:
        return f"{kind} has no body apart from its last layer"
    return ""


def _patch(inner: Any, transform: LogitTransform, compiled: bool) -> Callable[[], None]:
    """Install the fused loss in a model; return a function that removes it."""
    head: Any = inner.get_output_embeddings()
    plain_head, plain = head.forward, inner.forward
    # Libraries (accelerate, quantizers) may have set their own forward on the instance.
    before = [(module, vars(module).get("forward")) for module in (head, inner)]

    def head_forward(
        module: Any, hidden: torch.Tensor, shift_labels: torch.Tensor | None = None, positions: Any = None
    ) -> torch.Tensor:
        if shift_labels is None:
            return plain_head(hidden)
        where = label_positions(shift_labels) if positions is None else positions
        targets = shift_labels.flatten()[where]
        inputs = hidden.flatten(0, 1)[where]
        # An evaluation, or a check of the model before it trains, is not worth a compilation.
        compile_chunks = compiled and inputs.requires_grad
        return linear_cross_entropy(inputs, module.weight, module.bias, targets, transform, compiled=compile_chunks)

    def forward(
        module: Any,
        *inputs: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        label_positions: Any = None,
        **others: Any,
    ) -> Any:
        if labels is None:
            return plain(*inputs, **others)
        hidden: torch.Tensor = module.base_model(*inputs, **others)[0]
        targets = next_labels(labels) if shift_labels is None else shift_labels
        return CausalLMOutputWithPast(loss=head(hidden, shift_labels=targets, positions=label_positions))

    head.forward = MethodType(head_forward, head)
    inner.forward = MethodType(forward, inner)
    inner.plain_forward = plain

    def undo() -> None:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own
        del inner.plain_forward

    return undo


def _difference(inner: Any, world: World) -> str:
    """Return in words how the model's own loss differs from the fused one, or empty. All ranks call this."""
    if not world.has_values:
        return ""
    training = inner.training
    inner.eval()
    try:
        with torch.no_grad():
            problem = _other_transform(inner, world) or _other_loss(inner, world)
    finally:
        inner.train(training)
    return problem


def _other_transform(inner: Any, world: World) -> str:
    """Compare the model's transform of logits with ours, on large values in place of its last layer's outputs."""
    head: Any = inner.get_output_embeddings()
    seen: list[torch.Tensor] = []
    # A separate generator: random numbers of the training must not depend on this check.
    generator = torch.Generator().manual_seed(0)
    dtype = next(inner.parameters()).dtype
    made = torch.randn(1, 2, inner.config.get_text_config().vocab_size, generator=generator) * 40.0
    made = made.to(world.device, dtype)

    def record(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        seen.append(logits)
        return logits.sum()

    ids = torch.zeros(1, 2, dtype=torch.long, device=world.device)
    fused_head = head.forward
    head.forward = lambda hidden, **_: made
    inner.loss_function = record
    try:
        inner.plain_forward(input_ids=ids, labels=ids, use_cache=False)
    finally:
        head.forward = fused_head
        inner.loss_function = summed_loss
    if not seen:
        return f"{inner.config.model_type} computes its loss in a way of its own"
    expected = transform_of(inner.config).apply(made.float())
    if not torch.allclose(seen[0].float(), expected, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-4):
        return f"{inner.config.model_type} changes its logits in a way of its own before the loss"
    return ""


def _other_loss(inner: Any, world: World) -> str:
    generator = torch.Generator().manual_seed(0)
    vocabulary = inner.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, _SAMPLE_TOKENS), generator=generator).to(world.device)
    own = inner.plain_forward(input_ids=ids, labels=ids, use_cache=False).loss
    fused = inner(input_ids=ids, labels=ids, use_cache=False).loss
    close = abs(float(own) - float(fused)) <= _TOLERANCE[next(inner.parameters()).dtype] * abs(float(own))
    # One result for all ranks: they must run the same code.
    if world.all_agree(close):
        return ""
    return f"{inner.config.model_type} gives a loss of {float(own):.6f}, and {float(fused):.6f} without full logits"
