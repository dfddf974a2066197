"""The loss: the sum of token losses, so that a step's objective is the mean over all its label tokens.

A mean per micro-batch, averaged over micro-batches and ranks, would weigh tokens of small micro-batches more. The
trainer sums, and divides once by the label tokens of the whole global step.
"""

from typing import Any

import torch

IGNORED = -100
"""Label of a token without loss (``ignore_index`` of PyTorch's cross entropy)."""


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


def label_positions(shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the flat indices into [rows * length] of the positions whose outputs predict a label.

    On a GPU this synchronizes with the device.
    """
    return (shift_labels != IGNORED).flatten().nonzero().squeeze(1)
