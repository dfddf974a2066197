"""Figures of each engine or optimizer in one step, from the notes of the step's parts."""

from collections.abc import Sequence

import msgspec

from ....protocol.messages.telemetry import Update
from ..device import device_values
from ..phases.marks import Notes, PartNotes
from ..values.losses import LossNote, combine, read_losses


def read_parts(notes: Notes) -> tuple[list[Update], Update]:
    """Return the figures of each engine or optimizer, in the order of their first updates, and those of the step.

    The step's figures are those of the first updater of the run if it updated in this step. With one backward before
    two updates, the first update has the loss and the clipped norm.

    Call it once, as it reads values copied from the device; ``notes.parts`` is not empty.
    """
    losses = _share_out(notes.parts, [read_losses(part.notes) for part in notes.parts])
    notes.micro_steps = sum(part.notes.micro_steps for part in notes.parts)
    figures = [_figure(part.notes, own) for part, own in zip(notes.parts, losses, strict=True)]
    by_key: dict[int, list[tuple[PartNotes, float | None]]] = {}
    for part, loss in zip(notes.parts, figures, strict=True):
        by_key.setdefault(part.key, []).append((part, loss))
    updates: dict[int, Update] = {}
    for key, own in by_key.items():
        known = [loss for _, loss in own if loss is not None]
        updates[key] = Update(
            name=own[0][0].name,
            count=len(own),
            micro_steps=sum(part.notes.micro_steps for part, _ in own),
            loss=sum(known) / len(known) if known else None,
            lr=_last([device_values.read(part.notes.lr) for part, _ in own]),
            grad_norm=_last([device_values.read(part.notes.grad_norm) for part, _ in own]),
            loss_scale=_last([device_values.read(part.notes.loss_scale) for part, _ in own]),
            overflow=any(part.notes.overflow for part, _ in own),
        )
    found = list(updates.values())
    with_loss = next((update for update in found if update.loss is not None), found[0])
    own = updates.get(notes.first, with_loss)
    if own.loss is None:
        norm, scale = own.grad_norm, own.loss_scale
        own = msgspec.structs.replace(
            own,
            loss=with_loss.loss,
            grad_norm=with_loss.grad_norm if norm is None else norm,
            loss_scale=with_loss.loss_scale if scale is None else scale,
        )
    return found, own


def _share_out(parts: Sequence[PartNotes], losses: Sequence[list[LossNote]]) -> list[list[LossNote]]:
    """Assign each part its own losses: they may all have been backpropagated before the first update."""
    found: list[list[LossNote]] = [[] for _ in parts]
    for place, own in enumerate(losses):
        for loss in own:
            found[_owner_place(parts, place, loss)].append(loss)
    for place, own in enumerate(found):
        # Critic's and actor's backward, then critic's and actor's update: in the same order.
        following = len(own) - 1
        without = found[place + 1 : place + 1 + following]
        if following > 0 and len(without) == following and not any(without) and _are_apart(own):
            distinct = len({parts[at].key for at in range(place, place + 1 + following)}) == following + 1
            next_has = place + 1 + following < len(found) and not found[place + 1 + following]
            if distinct and not next_has:
                for offset, loss in enumerate(list(own)):
                    found[place + offset] = [loss]
    return found


def _are_apart(losses: Sequence[LossNote]) -> bool:
    """Return whether losses may be of several optimizers; losses of one line and kind are micro-batches."""
    places = [(loss.site, loss.kind) for loss in losses if loss.site is not None]
    return len(set(places)) == len(places) and not any(loss.owner for loss in losses)


def _owner_place(parts: Sequence[PartNotes], place: int, loss: LossNote) -> int:
    """Return the part that an engine's loss belongs to: its next update, or its last."""
    if loss.owner is None or parts[place].key == loss.owner:
        return place
    after = [at for at in range(place + 1, len(parts)) if parts[at].key == loss.owner]
    before = [at for at in range(place) if parts[at].key == loss.owner]
    return after[0] if after else before[-1] if before else place


def _figure(notes: Notes, losses: list[LossNote]) -> float | None:
    reported = [value for value in map(device_values.read, notes.reported) if value is not None]
    if notes.reported_loss is not None:
        return notes.reported_loss
    if reported:
        return sum(reported) / len(reported)
    return combine(losses, notes)


def _last(found: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(found) if value is not None), None)
