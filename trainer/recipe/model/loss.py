"""The loss: the sum of token losses, so that a step's objective is the mean over all its label tokens.

A mean per micro-batch, averaged over micro-batches and ranks, would weigh tokens of small micro-batches more. The
trainer sums, and divides once by the label tokens of the whole global step.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from ....protocol.errors import ConfigError
from ..config.schema import Config
from ..distributed import World
from .activations import ChosenRows, decoder_layers
from .bare import FAILURES, first_line
from .cross_entropy import LogitTransform, linear_cross_entropy

IGNORED = -100
"""Label of a token without loss (``ignore_index`` of PyTorch's cross entropy)."""
Batch = dict[str, torch.Tensor]
"""A collated micro-batch, its tensors by name."""


def summed_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the sum of the cross entropies of all labels, in fp32.

    ``logits`` have the shape [rows, length, vocabulary]; position i predicts ``labels`` i + 1, or ``shift_labels`` i.
    """
    if shift_labels is not None:
        predicted, wanted = logits.float().flatten(0, 1), shift_labels.flatten().to(logits.device)
    else:
        predicted = logits[:, :-1].float().flatten(0, 1)
        wanted = labels[:, 1:].flatten().to(predicted.device)
    return torch.nn.functional.cross_entropy(predicted, wanted, ignore_index=IGNORED, reduction="sum")


def use_summed_loss(model: Any) -> None:
    """Make a transformers model return ``summed_loss`` when it is called with labels."""
    model.loss_function = summed_loss


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return the label that each position's logits predict: the next one, and none at a row's end."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


@contextmanager
def evaluating(module: torch.nn.Module) -> Generator[None]:
    """Switch a module to evaluation, without gradients, within a ``with`` block."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(training)


def label_positions(shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the flat indices into [rows * length] of positions that predict a label; waits for the device."""
    return (shift_labels != IGNORED).flatten().nonzero().squeeze(1)


def label_rows(shift_labels: torch.Tensor) -> torch.Tensor:
    """Return ``label_positions`` and a few others, in order: their number is a multiple of a 32nd of all positions."""
    labelled = (shift_labels != IGNORED).flatten()
    step = max(1, len(labelled) // 32)
    count = max(step, -(-int(labelled.sum()) // step) * step)
    # A stable sort: labelled positions first, each kind in its order.
    return labelled.byte().sort(descending=True, stable=True).indices[:count].sort().values


# The last linear layer is still called as a module, with the hidden states and the labels, so that ZeRO-3's hooks
# gather its weight. The computation between that layer and the loss is read from the model's configuration, and then
# checked against the model's own forward; a model with another one keeps its own loss.

_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Relative difference of the two losses that rounding explains."""
_SAMPLE_TOKENS = 24
_SAMPLE_WEIGHT = 1e4  # of what a model adds, so that it is not lost in rounding


def set_up(model: Any, config: Config, world: World) -> bool:
    """Switch a model to the fused loss; return whether it is in use. All ranks call this, after the engine is made.

    A model that fails in its own forward is a ``ConfigError``; if ``model.fused_loss`` is on, so is one whose loss is
    not of that form.
    """
    inner = causal_model(model)
    try:
        inner.adds_to_loss = _adds(inner, world)
    except Exception as error:
        if type(error) not in FAILURES:
            raise
        kind, key = inner.config.model_type, f"model.{'name' if config.model.name else 'config'}"
        text = f"{key}: {kind} of these sizes fails in transformers' forward, before any training: {first_line(error)}"
        raise ConfigError(f"{text}; its settings do not fit each other") from error
    if config.model.fused_loss != "off":
        problem = _problem(inner)
        if not problem:
            undo = _patch(inner, transform_of(inner.config))
            problem = _difference(inner, world)
            if problem:
                undo()
        if not problem:
            return True
        if config.model.fused_loss == "on":
            raise ConfigError(f"model.fused_loss is on, but {problem}; use model.fused_loss=auto")
        world.note(f"logits are computed at full size (model.fused_loss): {problem}")
    if inner.adds_to_loss:
        apart = _apart(inner, inner.forward, summed_loss)
        inner.forward = MethodType(lambda _, *inputs, **named: apart(*inputs, **named), inner)
    return False


# Mixtures add a router's loss, which is a mean, to what their loss function returns, which here is a sum. Both are kept
# apart, so that a step's objective is the mean over its label tokens plus the mean over its micro-batches of what the
# model adds.


def addition_weight(model: Any, label_tokens: int, micro_batches: int) -> dict[str, float]:
    """Return the argument by which a model's additions count in its summed loss; empty for a model without any.

    A step's summed losses, divided by its ``label_tokens``, then contain their mean over the ``micro_batches`` of all
    ranks.
    """
    adds = getattr(causal_model(model), "adds_to_loss", False)
    return {"addition_weight": label_tokens / micro_batches} if adds else {}


def _adds(inner: Any, world: World) -> bool:
    """Return whether a model adds to what its loss function returns. All ranks call this."""
    if not world.has_values:
        return bool(getattr(inner.config.get_text_config(), "output_router_logits", False))
    returned: list[torch.Tensor] = []

    def nothing(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        returned.append(torch.zeros((), device=logits.device))
        return returned[-1]

    ids = torch.zeros(1, 2, dtype=torch.long, device=world.device)
    # Of a padded row: without a mask attention may take heads that do not fit.
    mask = torch.tensor([[1, 0]], device=world.device)
    inner.loss_function = nothing
    try:
        with evaluating(inner):
            loss: Any = inner(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
    finally:
        inner.loss_function = summed_loss
    # By value: under ZeRO-3 hooks of modules return other tensors than those they are given.
    return len(returned) > 1 or (len(returned) == 1 and float(loss) != 0.0)


def _apart(inner: Any, forward: Callable[..., Any], loss_function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a model's ``forward`` with ``loss_function``, whose loss has ``addition_weight`` times its additions."""
    sums: list[torch.Tensor] = []

    def keep(*inputs: Any, **named: Any) -> torch.Tensor:
        sums.append(loss_function(*inputs, **named))
        return torch.zeros_like(sums[-1])

    def call(*inputs: Any, labels: torch.Tensor | None = None, addition_weight: float = 0.0, **others: Any) -> Any:
        output = forward(*inputs, labels=labels, **others)
        if labels is not None:
            output.loss = sums.pop() + addition_weight * output.loss
        return output

    inner.loss_function = keep
    return call


def causal_model(model: Any) -> Any:
    """Return transformers' model inside peft's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _body(inner: Any) -> Any:
    """Return the model below the last layer, or the model itself if it is not known."""
    # Llama 4's text model has its name, but the prefix of the one with images.
    return inner.base_model if inner.base_model is not inner else getattr(inner, "model", inner)


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
    if _body(inner) is inner:
        return f"{kind} has no body apart from its last layer"
    if inner.adds_to_loss and transform_of(inner.config).cap:
        return f"{kind} caps its logits, and adds to its loss"
    return ""


def _patch(inner: Any, transform: LogitTransform) -> Callable[[], None]:
    """Install the fused loss in a model; return a function that removes it.

    A model that adds to its loss runs its own forward, in which the last layer returns the loss in place of logits.
    """
    head: Any = inner.get_output_embeddings()
    plain_head, plain = head.forward, inner.forward
    # Libraries (accelerate, quantizers) may have set their own forward on the instance.
    before = [(module, vars(module).get("forward")) for module in (head, inner)]
    asked: list[tuple[torch.Tensor, Any, float | None]] = []

    def own_loss(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return logits.float().reshape(()) / transform.scale

    apart = _apart(inner, plain, own_loss) if inner.adds_to_loss else None

    def head_forward(
        module: Any,
        hidden: torch.Tensor,
        shift_labels: torch.Tensor | None = None,
        positions: Any = None,
        factor: float | None = None,
    ) -> torch.Tensor:
        if shift_labels is None and not asked:
            return plain_head(hidden)
        if shift_labels is None:
            return head_forward(module, hidden, *asked[-1]).reshape(1, 1, 1)
        where = label_positions(shift_labels) if positions is None else positions
        targets = shift_labels.flatten()[where]
        # Mamba's body returns fp32 in bf16 training; transformers converts it too.
        chosen = hidden.flatten(0, 1)[where].to(module.weight.dtype)
        return linear_cross_entropy(chosen, module.weight, module.bias, targets, transform, factor=factor)

    def forward(
        module: Any,
        *inputs: Any,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        label_positions: Any = None,
        label_rows: Any = None,
        loss_factor: float | None = None,
        **others: Any,
    ) -> Any:
        if inner.chosen_rows is not None:
            inner.chosen_rows.chosen = label_rows
        if labels is None:
            return plain(*inputs, **others)
        targets = next_labels(labels) if shift_labels is None else shift_labels
        if apart is not None:
            asked.append((targets, label_positions, loss_factor))
            try:
                return CausalLMOutputWithPast(loss=apart(*inputs, labels=labels, **others).loss)
            finally:
                asked.clear()
        hidden: torch.Tensor = _body(module)(*inputs, **others)[0]
        loss = head(hidden, shift_labels=targets, positions=label_positions, factor=loss_factor)
        return CausalLMOutputWithPast(loss=loss)

    head.forward = MethodType(head_forward, head)
    inner.forward = MethodType(forward, inner)
    inner.plain_forward = plain
    inner.chosen_rows = None

    def undo() -> None:
        for module, own in before:
            del module.forward
            if own is not None:
                module.forward = own
        del inner.plain_forward, inner.chosen_rows
        inner.loss_function = summed_loss

    return undo


def _difference(inner: Any, world: World) -> str:
    """Return in words how the model's own loss differs from the fused one, or empty. All ranks call this."""
    if not world.has_values:
        return ""
    with evaluating(inner):
        return _other_transform(inner, world) or _other_loss(inner, world)


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
    fused_head, own_loss = head.forward, inner.loss_function
    head.forward = lambda hidden, **_: made
    inner.loss_function = record
    try:
        inner.plain_forward(input_ids=ids, labels=ids, use_cache=False)
    finally:
        head.forward = fused_head
        inner.loss_function = own_loss
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
    given: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    own_loss, room = inner.loss_function, _TOLERANCE[next(inner.parameters()).dtype]
    hidden: list[torch.Tensor] = []
    hook = inner.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].float()))
    try:
        for weight in ({}, {"addition_weight": _SAMPLE_WEIGHT}) if inner.adds_to_loss else ({},):
            hidden.clear()
            fused = float(inner(**given, **weight).loss)
            own = float(_apart(inner, inner.plain_forward, summed_loss)(**given, **weight).loss)
            inner.loss_function = own_loss
            # One result for all ranks: they must run the same code.
            if not world.all_agree(abs(own - fused) <= room * abs(own)):
                return f"{inner.config.model_type} gives a loss of {own:.6f}, and {fused:.6f} without full logits"
    finally:
        hook.remove()
    # Random weights give about the same loss whatever the last layer is given.
    mine, true = hidden[:2]
    if not world.all_agree(mine.shape == true.shape and float((mine - true).norm()) <= room * float(true.norm())):
        return f"{inner.config.model_type} changes its body's output in a way of its own before its last layer"
    return ""


# Behind the last layer's attention a position's values reach the loss only if the position has a label: the block of
# linear layers there, a large part of a layer, need not compute the others.


def choose_rows(model: Any, world: World) -> bool:
    """Let the last layer's feed-forward block compute only positions in ``label_rows``, if the loss stays the same.

    The fused loss is in use. Return whether batches are to have ``label_rows``. All ranks call this.
    """
    inner = causal_model(model)
    block: Any = getattr((decoder_layers(inner) or [None])[-1], "mlp", None)
    if block is None or inner.adds_to_loss or _has_experts(block):
        return False
    rows = ChosenRows(block)
    block.forward, inner.chosen_rows = rows, rows
    keeps = _keeps_loss(inner, world)
    rows.chosen = None
    if not keeps:
        block.forward, inner.chosen_rows = rows.plain, None
    return keeps


def _has_experts(block: Any) -> bool:
    """Return whether it may be a mixture's: that counts what its router chooses, also for positions without labels."""
    lists = any(isinstance(one, torch.nn.ModuleList) for one in block.modules())
    return lists or any(len(getattr(one, "ds_shape", one.shape)) > 2 for one in block.parameters())


def _keeps_loss(inner: Any, world: World) -> bool:
    """Return whether the last layer gets the same values for positions with labels as without a choice of rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, inner.config.get_text_config().vocab_size, (1, _SAMPLE_TOKENS), generator=generator)
    labels = ids.clone()
    labels[:, ::3] = labels[:, 5:9] = IGNORED
    shifted = next_labels(labels)
    rows, positions = label_rows(shifted).to(world.device), label_positions(shifted).to(world.device)
    given: dict[str, Any] = {"input_ids": ids.to(world.device), "labels": labels.to(world.device), "use_cache": False}
    hidden: list[torch.Tensor] = []
    head = inner.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].flatten(0, 1)[positions].float()))
    try:
        with evaluating(inner):
            inner(**given)
            inner(**given, label_rows=rows)
    finally:
        hook.remove()
    true, mine = hidden
    room = _TOLERANCE[next(inner.parameters()).dtype]
    return world.all_agree(float((mine - true).norm()) <= room * float(true.norm()))
