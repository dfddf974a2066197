"""The loss: the sum of token losses, so that a step's objective is the mean over all its label tokens.

A mean per micro-batch, averaged over micro-batches and ranks, weighs a token by how few others its micro-batch holds.
The trainer sums and divides once by the label tokens of the whole global step.
"""

from typing import Any

import torch

IGNORED = -100
"""The label of a token that no loss is counted on (``ignore_index`` of PyTorch's cross entropy)."""


def summed_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    shift_labels: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """Return the sum of the cross entropies of all labels, in fp32.

    Args:
        logits: of shape [rows, length, vocabulary].
        labels: of shape [rows, length], not shifted: position i's logits predict label i + 1.
        vocab_size: as transformers passes it; the logits' own last dimension counts.
        shift_labels: what each position's logits predict, in place of ``labels``; of the same shape.
    """
    if shift_labels is not None:
        predicted, wanted = logits.float().flatten(0, 1), shift_labels.flatten().to(logits.device)
    else:
        predicted = logits[:, :-1].float().flatten(0, 1)
        wanted = labels[:, 1:].flatten().to(predicted.device)
    return torch.nn.functional.cross_entropy(predicted, wanted, ignore_index=IGNORED, reduction="sum")


def use_summed_loss(model: Any) -> None:
    """Make a transformers model return ``summed_loss`` where it is given labels."""
    model.loss_function = summed_loss


def next_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return what each position's logits predict: the next label, and nothing at a row's end."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def label_positions(shift_labels: torch.Tensor) -> torch.Tensor:
    """Return the flat indices into [rows * length] of the positions whose outputs predict a label.

    On a GPU this waits for the device.

    Args:
        shift_labels: from ``next_labels``.
    """
    return (shift_labels != IGNORED).flatten().nonzero().squeeze(1)
