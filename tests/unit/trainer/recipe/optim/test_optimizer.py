"""The learning rate over time."""

from types import SimpleNamespace

import pytest
import torch
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.config.schema import Schedule
from ftmon.trainer.recipe.optim.optimizer import factor, make, own_step_counts
from ftmon.trainer.recipe.preflight.resolve import resolve
from ftmon.trainer.recipe.start import DATA
from hypothesis import given
from hypothesis import strategies as st
from small_shape import OneRank

KINDS = ["constant", "linear", "cosine"]


@given(st.sampled_from(KINDS), st.integers(0, 50), st.integers(1, 200), st.floats(0, 1))
def test_it_stays_within_its_bounds_and_ends_where_it_should(kind, warmup, total, final):
    schedule = Schedule(kind=kind, warmup_steps=warmup, final_ratio=final)  # type: ignore[arg-type]
    factors = [factor(schedule, step, total) for step in range(total)]
    assert all(0 <= value <= 1 for value in factors)
    after = factors[warmup:]
    assert after == sorted(after, reverse=True)
    if kind != "constant" and total > warmup + 1:
        assert factors[-1] == pytest.approx(final)


def test_warm_up_rises_to_the_peak_cosine_falls_and_adapters_have_ten_times_the_rate():
    schedule = Schedule(kind="constant", warmup_steps=4)
    assert [factor(schedule, step, 10) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factor(Schedule(kind="cosine", warmup_steps=0, final_ratio=0.0), 50, 101) == pytest.approx(0.5)
    words = ["model.config={model_type: llama}", f"data.path={DATA}", "run={device: cpu, ranks: 1}"]
    given = (["lora.rank=4"], []), (["lora.rank=4"], ["optimizer.lr=3e-5"]), ([], [])
    rates = [resolve(load(None, [*words, *lora, *more])).config.optimizer.lr for lora, more in given]
    assert rates == [2e-4, 3e-5, 2e-5]
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    model = SimpleNamespace(parameters=lambda: [weight])
    made = make(model, load(None, [*words, "lora.rank=4"]).config, OneRank())  # type: ignore[arg-type]
    assert made.param_groups[0]["lr"] == 2e-4


@pytest.mark.parametrize("total", [1, 33, 34, 200, 1000])
def test_without_a_number_of_steps_the_warm_up_is_a_share_of_all_rounded_down(total):
    steps = 3 * total // 100
    wanted = [factor(Schedule(warmup_steps=steps), step, total) for step in range(total)]
    assert [factor(Schedule(), step, total) for step in range(total)] == wanted
    assert wanted.index(1.0) == max(0, steps - 1)
    assert factor(Schedule(warmup_ratio=0.0), 0, total) == 1.0


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_step_counts_are_separate_and_beside_the_weights_of_fused_optimizers_alone(fused, device, stage):
    weights = [torch.nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    optimizer = torch.optim.AdamW(weights, fused=None)
    optimizer.param_groups[0]["fused"] = fused
    shared = torch.tensor(6.0)
    for weight in weights:
        optimizer.state[weight]["step"] = shared
    if stage == 3:  # its groups are empty between steps
        optimizer.param_groups[0]["params"] = []
    own_step_counts(optimizer)
    counts = [optimizer.state[weight]["step"] for weight in weights]
    assert [count.device.type for count in counts] == [device] * 2
    assert len({id(count) for count in (shared, *counts)}) == 3
