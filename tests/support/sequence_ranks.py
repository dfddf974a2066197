"""One rank of two that share sequences: whether models of several kinds compute the same on slices as on whole rows.

A job is a name, a kind of model and settings of its transformers configuration: ``window mistral
{"sliding_window": 5}``. Rank 0 prints the relative difference of the gradients of all parameters, or the refusal.
"""

import json
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.data.batches import Collate
from ftmon.trainer.recipe.distributed import World
from ftmon.trainer.recipe.model.attention import on_device
from ftmon.trainer.recipe.model.loss import use_summed_loss
from ftmon.trainer.recipe.step import make_collate
from small_shape import SMALL_SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {**SMALL_SHAPE, "eos_token_id": 0}
LENGTHS = [[3, 20, 14], [37]]
"""Tokens of the documents of the rows that are trained on; without packing a row is one document."""


def work(world: World, jobs: list[str]) -> None:
    world.share_sequences(2)
    for job in jobs:
        world.log(f"== {job.split()[0]}")
        kind, _, values = job.split(maxsplit=1)[1].partition(" ")
        try:
            for packing in (False, True):
                world.log(f"difference {_difference(world, kind, json.loads(values), packing):.2e}")
        except ConfigError as error:
            world.log(f"refused: {error}")


def _difference(world: World, kind: str, values: dict[str, Any], packing: bool) -> float:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind)
    known = {name: value for name, value in SIZES.items() if hasattr(settings, name)}
    made = AutoConfig.for_model(kind, **{**known, **values})
    model: Any = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    use_summed_loss(model)
    model.eval()  # without dropout
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, 300, (sum(lengths),), generator=generator).tolist() for lengths in LENGTHS]
    examples: list[dict[str, Any]] = []
    for row, lengths in zip(rows, LENGTHS, strict=True):
        starts = {sum(lengths[:number]) for number in range(len(lengths))} if packing else {0}
        labels = [-100 if place in starts else token for place, token in enumerate(row)]
        examples.append({"input_ids": row, "labels": labels} | ({"lengths": lengths} if packing else {}))
    whole = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    # One document at a time, with the model's own attention.
    for row, lengths in zip(rows, LENGTHS, strict=True):
        for part in torch.tensor([row]).split(lengths if packing else [len(row)], 1):
            model(input_ids=part, labels=part, use_cache=False).loss.backward()
    for name, one in model.named_parameters():
        whole[name] = one.grad.clone() if one.grad is not None else whole[name]
    model.zero_grad()
    base = Config()
    config = msgspec.structs.replace(
        base,
        data=msgspec.structs.replace(base.data, packing=packing),
        training=msgspec.structs.replace(base.training, sequence_length=41, sequence_parallel_size=2),
    )
    padding = Collate(0, config.training.sequence_length)
    collate: Collate = make_collate(model, config, world, padding, fused_loss=False)
    model(**on_device(collate(examples), world), use_cache=False).loss.backward()
    difference = size = 0.0
    for name, one in model.named_parameters():
        grad = one.grad if one.grad is not None else torch.zeros_like(one)
        dist.all_reduce(grad)
        difference += float((grad - whole[name]).square().sum())
        size += float(whole[name].square().sum())
    return (difference / size) ** 0.5
