"""Counts of batches that several ranks train on: their sums over ranks are those of the whole job."""

from types import SimpleNamespace

import pytest
import torch
from ftmon.protocol.host.machine import ModelFlops
from ftmon.trainer.probe.device.memory import Reading
from ftmon.trainer.probe.hooks.deepspeed import share_of_engine
from ftmon.trainer.probe.link.publisher import step_message
from ftmon.trainer.probe.phases.tracker import BatchCounts, Mark, Notes, StepRaw
from ftmon.trainer.probe.rank.context import COUNTED_ELSEWHERE, WHOLE, BatchShare, of_optimizer
from ftmon.trainer.probe.rank.model import describe_model
from torch.distributed import device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def counted(share, notes):
    reading = Reading(0, 0, 0, 0)
    marks = [Mark("forward", 0, reading, None, 0, 0), Mark("idle", 1_000_000, reading, None, 0, 0)]
    raw = StepRaw(1, marks, 1.0, notes, 0, 0)
    step = step_message(raw, 0, lambda sample: sample, 0, ModelFlops(token=6.0), share)
    return step.samples, step.tokens, step.padded_tokens, step.flops


def batch_of(samples, tokens, padded):
    notes = Notes()
    notes.samples, notes.tokens, notes.padded_tokens = samples, [tokens], padded
    return notes


def test_parts_of_tensor_parallel_ranks_add_up_to_the_batch_and_a_later_pipeline_stage_counts_none():
    parts = [counted(BatchShare(place, 4), batch_of(1, 63, 65)) for place in range(4)]
    assert [sum(column) for column in zip(*parts, strict=True)] == [1, 63, 65, 6.0 * 63]
    assert all(tokens in (15, 16) and flops == 6.0 * 63 / 4 for _, tokens, _, flops in parts)
    assert counted(COUNTED_ELSEWHERE, batch_of(2, 30, 32)) == (0, 0, 0, 0.0)
    notes = batch_of(0, 0, 0)
    notes.counts = [BatchCounts(tokens=10, label_tokens=8, pairs=0, longest=0, samples=2)]
    assert counted(BatchShare(1, 2), notes)[:2] == (2, 10)


@pytest.mark.parametrize(
    ("mpu", "share"),
    [
        (None, WHOLE),
        ({"sequence": (1, 4)}, WHOLE),
        ({"model": (1, 2)}, BatchShare(1, 2)),
        ({"model": (3, 4), "slice": (1, 2)}, BatchShare(1, 2)),  # two stages of two ranks each
        ({"model": (3, 4), "slice": (0, 1), "tensor_model": (0, 1)}, WHOLE),
    ],
)
def test_an_engine_s_tensor_parallel_ranks_are_those_of_its_mpu(mpu, share):
    made = None
    if mpu is not None:
        ranks = {f"get_{kind}_parallel_rank": lambda place=place: place for kind, (place, _) in mpu.items()}
        sizes = {f"get_{kind}_parallel_world_size": lambda size=size: size for kind, (_, size) in mpu.items()}
        made = SimpleNamespace(**ranks, **sizes)
    assert share_of_engine(SimpleNamespace(mpu=made)) == share


def test_parameters_on_a_mesh_with_a_dimension_called_tp_are_tensor_parallel():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp_shard", "tp"))
        shares = []
        for part in (mesh["dp_shard"], mesh["tp"], mesh):
            parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(8, 8), part))
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2)), parameter], lr=0.1)
            shares.append(of_optimizer(optimizer))
        assert shares == [WHOLE, BatchShare(1, 4), BatchShare(1, 4)]
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_s_size_is_that_of_all_tensor_parallel_parts():
    model = torch.nn.Linear(4, 8)
    model.weight.tensor_model_parallel = True
    assert describe_model(model, 2)["parameters"] == 2 * 32 + 8
