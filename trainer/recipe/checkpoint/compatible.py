"""Checks whether a run may resume from a checkpoint: the changes in between, and their consequences.

A change that is not accepted raises ``ConfigError``.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ....protocol.errors import ConfigError
from ..state import TrainState
from .manifest import Manifest

_IDENTITY = (
    *("seed", "data_key", "examples", "order", "sequence_length", "micro_batch", "grad_accumulation", "ranks"),
    "sequence_parallel_size",
)
_CONSEQUENCES = {
    "seed": "the rest of this epoch is drawn in another order, so some examples repeat and some are left out",
    "data": "the position in the epoch is kept, so some examples repeat and some are left out",
    "sequence_length": "examples are cut and packed differently, so some repeat and some are left out",
    "micro_batch": "losses differ from the uninterrupted run's in their last digits, and in dropout",
    "grad_accumulation": "losses differ from the uninterrupted run's in their last digits, and in dropout",
    "ranks": "global batches have another size, so steps and the learning rate's schedule mean something else",
}


def position(saved: TrainState, now: TrainState, allow: Sequence[str], path: Path) -> tuple[TrainState, list[str]]:
    """Return the position at which the run continues, and notes on differences from an uninterrupted run.

    ``allow`` has the changes that are accepted (``checkpoint.allow``).
    """
    changes = {name: f"{text}: {_consequence(name, saved, now)}" for name, text in _changes(saved, now).items()}
    changed = [name for name in changes if name not in allow]
    if changed:
        each = "; ".join(changes[name] for name in changed)
        raise ConfigError(
            f"checkpoint.resume: {path}: {each}. Set it back, or accept it with "
            f"checkpoint.allow=[{', '.join([*allow, *changed])}]"
        )
    notes = list(changes.values())
    if _divided(saved, now) and saved.global_batch == now.global_batch:
        notes.append(f"{_divided(saved, now)}: the global batches are the same; rounding and dropout differ")
    identity = {name: getattr(now, name) for name in _IDENTITY}
    return msgspec.structs.replace(saved, **identity, batches=_batches(saved, now)), notes


def model(manifest: Manifest, parameters: dict[str, list[int]], path: Path) -> None:
    """Refuse a checkpoint of another model."""
    here, there = parameters, manifest.parameters
    for name in [*there, *here]:
        if here.get(name) != there.get(name):
            what = (
                f"{name} is {_shape(there.get(name))} there and {_shape(here.get(name))} here"
                if name in here and name in there
                else f"{name} is {'not here' if name in there else 'not there'}"
            )
            raise ConfigError(f"checkpoint.resume: {path} is of another model: {what}")


def _changes(saved: TrainState, now: TrainState) -> dict[str, str]:
    """Return the differences by their names in ``checkpoint.allow``."""
    changes: dict[str, str] = {}
    if saved.seed != now.seed:
        changes["seed"] = f"training.seed was {saved.seed} and is {now.seed}"
    if saved.sequence_length != now.sequence_length:
        changes["sequence_length"] = (
            f"training.sequence_length was {saved.sequence_length} and is {now.sequence_length}"
        )
    elif saved.data_key != now.data_key:
        changes["data"] = f"data: the {now.examples:,} examples differ from the {saved.examples:,} before"
    if saved.order != now.order:
        text = f"data.shuffle, data.group_by_length: the examples were {saved.order} and are {now.order}"
        changes.setdefault("data", text)
    sizes = ""
    if saved.global_batch != now.global_batch:
        whole, rest = divmod(saved.global_batch, now.global_batch // now.grad_accumulation)
        fix = f" (training.grad_accumulation={whole} keeps it)" if whole and not rest else ""
        sizes = f", with {saved.global_batch} examples a step then and {now.global_batch} now{fix}"
    if divided := _divided(saved, now):
        if sizes:
            changes["ranks"] = f"{divided}{sizes}"
        return changes
    for name in ("micro_batch", "grad_accumulation"):
        if getattr(saved, name) != getattr(now, name):
            changes[name] = f"training.{name} was {getattr(saved, name)} and is {getattr(now, name)}{sizes}"
    return changes


def _consequence(name: str, saved: TrainState, now: TrainState) -> str:
    is_batch = name in ("micro_batch", "grad_accumulation") and saved.global_batch != now.global_batch
    return _CONSEQUENCES["ranks" if is_batch else name]


def _divided(saved: TrainState, now: TrainState) -> str:
    """Return changed settings that divide batches among ranks differently, in words; empty: none."""
    return " and ".join(
        f"{section}.{name} was {getattr(saved, name)} and is {getattr(now, name)}"
        for section, name in (("run", "ranks"), ("training", "sequence_parallel_size"))
        if getattr(saved, name) != getattr(now, name)
    )


def _batches(saved: TrainState, now: TrainState) -> int:
    """Return the number of global batches, of the present size, before the same place in the same epoch."""
    if saved.global_batch == now.global_batch and saved.examples == now.examples:
        return saved.batches
    per_epoch = max(1, saved.examples // max(1, saved.global_batch))
    epoch, offset = divmod(saved.batches, per_epoch)
    per_epoch_now = max(1, now.examples // now.global_batch)
    share = offset / per_epoch if saved.examples != now.examples else None
    taken = int(share * per_epoch_now) if share is not None else offset * saved.global_batch // now.global_batch
    return epoch * per_epoch_now + min(taken, per_epoch_now - 1)


def _shape(shape: list[int] | None) -> str:
    return "x".join(map(str, shape or [])) or "a scalar"
