"""AdamW with small states: rounding is unbiased, the update is AdamW's, and states take the bytes they should."""

import copy
from typing import Any

import pytest
import torch
from ftmon.trainer.recipe import support
from ftmon.trainer.recipe.config.schema import Config, Optimizer, Training
from ftmon.trainer.recipe.optim import adamw
from ftmon.trainer.recipe.optim.adamw import SmallStateAdamW, random_bits, salt, to_bfloat16
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim.optimizer import register_optimizer_step_post_hook

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "seed": 3}


def bits(count: int, *numbers: int) -> "torch.Tensor":
    return random_bits(torch.arange(count, dtype=torch.int32), torch.tensor(salt(*numbers), dtype=torch.int32))


def test_the_random_bits_are_those_of_the_published_hash():
    def lowbias32(value: int) -> int:
        value = ((value ^ value >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        value = ((value ^ value >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return value ^ value >> 16

    salted = salt(1, 2, 3)
    wanted = [lowbias32((place ^ salted) & 0xFFFFFFFF) for place in range(1000)]
    assert [value & 0xFFFFFFFF for value in bits(1000, 1, 2, 3).tolist()] == wanted


def test_rounding_gives_a_neighbour_and_the_mean_is_the_value():
    values = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(-20, 30, 0.1)
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = ((values.view(torch.int32) & -65536) + 65536).view(torch.float32)
    total, times = torch.zeros(500, dtype=torch.float64), 1000
    for time in range(times):
        rounded = to_bfloat16(values, bits(500, time)).float()
        assert ((rounded == down) | (rounded == up)).all()
        total += rounded.double()
    step = (up - down).double()
    error = (total / times - values.double()) / step
    assert error.abs().max() < 5 * 0.5 / times**0.5
    assert error.mean().abs() < 5 * 0.5 / (times * 500) ** 0.5


def test_numbers_that_bf16_has_stay_and_small_updates_of_its_weights_arrive_on_average():
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, float("inf"), -float("inf"), 2.0**-130])
    payload = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for time in range(50):
        assert torch.equal(to_bfloat16(exact, bits(7, time)).float(), exact)
        assert to_bfloat16(payload, bits(3, time)).isnan().all()
    weight = torch.nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    optimizer = SmallStateAdamW([weight], states="bf16", lr=1e-4, betas=(0.9, 0.99), eps=1e-8, seed=1)
    for _ in range(50):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    # To nearest, no update would: each is below half a step of bf16.
    assert float(1 - weight.detach().float().mean()) == pytest.approx(50e-4, rel=0.03)


@pytest.mark.parametrize("signed", [True, False])
def test_a_block_is_quantized_between_neighbours_and_its_mean_is_the_value(signed):
    table = adamw.code(signed, torch.device("cpu"))
    assert table.shape == (256,)
    assert (table.diff() > 0).all()
    values = torch.randn(700, generator=torch.Generator().manual_seed(2)) * 1e-5
    values = values if signed else values.abs()
    values[3] = 0.0
    values[512:] = 0.0  # a part of a block
    shares = (values[:512].view(2, 256) / values[:512].view(2, 256).abs().amax(dim=1)[:, None]).flatten().double()
    below = (torch.searchsorted(table.double(), shares, right=True) - 1).clamp(0, 254)
    low, gap = table[below].double(), table.diff()[below].double()
    total, times = torch.zeros(512, dtype=torch.float64), 300
    for time in range(times):
        codes, scales = adamw.encode(values, bits(700, time), table)
        assert codes.dtype == torch.uint8
        assert scales.shape == (3,)
        decoded = adamw.decode(codes, scales, table)
        above = codes[:512].long() - below
        assert ((above == 0) | (above == 1)).all()
        assert not decoded[512:].any()
        total += decoded[:512].double() / scales[:2].repeat_interleave(256).double()
        largest = values[:256].abs().argmax()
        assert decoded[largest] == values[largest]
    error = (total / times - shares) / gap
    assert error.abs().max() < 5 * 0.5 / times**0.5
    assert (low <= shares + 1e-7).all()


def parameters(dtype: "torch.dtype") -> "list[torch.nn.Parameter]":
    generator = torch.Generator().manual_seed(0)
    shapes = [(40, 30), (700,), (3, 5)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def give_gradients(those: "list[torch.nn.Parameter]", step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for one in those:
        one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)


@pytest.mark.parametrize(("states", "near"), [("bf16", 0.02), ("8bit", 0.15)])
def test_the_update_is_adamws(states, near):
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    groups = [{"params": ours[:1], "weight_decay": 0.1}, {"params": ours[1:]}]
    small = SmallStateAdamW(groups, states=states, **SETTINGS)
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.99))
    start = [one.detach().clone() for one in ours]
    for step in range(20):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        small.step()
        plain.step()
        for one, other in zip(ours, theirs, strict=True):  # at first no state has been rounded yet
            assert step or torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    for one, other, begun in zip(ours, theirs, start, strict=True):
        assert (one - other).norm() < near * (other - begun).norm()


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_do_not_matter_but_to_the_random_bits_and_a_loaded_state_goes_on_bitwise(states, dtype, monkeypatch):
    monkeypatch.setattr(adamw, "_PIECE", 256)
    whole = parameters(dtype)
    optimizer = SmallStateAdamW(whole, states=states, **SETTINGS)
    saved: Any = None
    kept: Any = None
    for step in range(6):
        if step == 3:
            saved, kept = copy.deepcopy(optimizer.state_dict()), [one.detach().clone() for one in whole]
        give_gradients(whole, step)
        optimizer.step()
    again = [torch.nn.Parameter(one) for one in kept]
    resumed = SmallStateAdamW(again, states=states, **SETTINGS)
    resumed.load_state_dict(saved)
    for step in range(3, 6):
        give_gradients(again, step)
        resumed.step()
    for one, other in zip(whole, again, strict=True):
        assert torch.equal(one, other)
        first, second = optimizer.state[one], resumed.state[other]
        found = [(name, state.dtype) for name, state in first.items()]
        assert found == [(name, state.dtype) for name, state in second.items()]


@pytest.mark.parametrize(("states", "dtype"), [("bf16", torch.bfloat16), ("8bit", torch.float32)])
def test_tensors_that_are_updated_together_come_out_as_each_alone(states, dtype, monkeypatch):
    # Random bits depend on the place in a bundle: here all are the same.
    monkeypatch.setattr(adamw, "random_bits", lambda positions, _: torch.full_like(positions, 0x40004000))
    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(count, 256, generator=generator).to(dtype) for count in (3, 1, 2, 7, 1)]
    results: list[list[torch.Tensor]] = []
    for piece in (1 << 20, 6 * 256, 256):  # all together, some, each alone in pieces
        monkeypatch.setattr(adamw, "_PIECE", piece)
        each = [torch.nn.Parameter(one.clone()) for one in start]
        optimizer = SmallStateAdamW(each, states=states, **SETTINGS)
        for step in range(3):
            give_gradients(each, step)
            optimizer.step()
        results.append([one.detach() for one in each])
    for one, other, alone in zip(*results, strict=True):
        assert torch.equal(one, alone)
        assert torch.equal(other, alone)


def test_a_transposed_weight_is_updated_and_one_without_a_gradient_left_alone():
    plain = torch.nn.Parameter(torch.randn(8, 4))
    turned = torch.nn.Parameter(plain.detach().t().contiguous().t())
    alone = torch.nn.Parameter(torch.ones(3))
    assert not turned.is_contiguous()
    for one in (plain, turned):
        one.grad = torch.arange(32.0).view(8, 4) - 16
        SmallStateAdamW([one, alone], states="bf16", **SETTINGS).step()
    assert torch.equal(plain, turned)
    assert torch.equal(alone, torch.ones(3))


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_a_dry_run_sees_the_states_and_no_temporaries_of_the_models_size(states):
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(1 << 27, dtype=torch.bfloat16))
        weight.grad = torch.empty_like(weight)
        optimizer = SmallStateAdamW([weight], states=states, **SETTINGS)
        tracker = MemTracker()
        with tracker:
            optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        own = 2 * 2 * weight.numel()  # what was there before, seen through views
        held = sum(value.nbytes for value in optimizer.state[weight].values())
        assert held == pytest.approx(weight.numel() * (4 if states == "bf16" else 2 + 8 / 256))
        assert own + held < peak < own + held + 18 * 4 * adamw._PIECE


def test_the_trial_whether_it_compiles_is_no_step(monkeypatch):
    with monkeypatch.context() as switched:
        switched.setenv("TORCHDYNAMO_DISABLE", "1")
        assert not adamw.compiles(torch.device("cpu"), "bf16")
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda *words: function(*words))
    steps: list[object] = []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: steps.append(optimizer))
    try:
        assert adamw.compiles(torch.device("cpu"), "bf16")
    finally:
        hook.remove()
    assert steps == []


@pytest.mark.parametrize("kind", ["torch", "adamw_bf16", "adamw_8bit"])
def test_the_bytes_predicted_of_states_in_a_checkpoint_are_those_that_the_optimizer_keeps(kind):
    parameter = torch.nn.Parameter(torch.zeros(512 * 256))
    parameter.grad = torch.ones_like(parameter)
    made: torch.optim.Optimizer = torch.optim.AdamW([parameter])
    if kind != "torch":
        made = SmallStateAdamW([parameter], states="8bit" if kind == "adamw_8bit" else "bf16", **SETTINGS)
    made.step()
    kept = sum(state.nbytes for state in made.state[parameter].values() if isinstance(state, torch.Tensor))
    for masters, held in (("fp32", 4), ("none", 0)):
        optimizer: Any = Optimizer(kind=kind, master_weights=masters)  # type: ignore[arg-type]
        predicted = support.state_bytes(Config(optimizer=optimizer, training=Training(precision="bf16")))
        assert predicted == pytest.approx(held + kept / parameter.numel(), rel=1e-3)
