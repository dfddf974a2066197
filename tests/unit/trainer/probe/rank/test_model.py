"""Which model a bare optimizer trains, found where the optimizer is made; and that nothing is kept alive by looking."""

import sys
import weakref
from typing import Any

import torch
from ftmon.trainer.probe.guard import frame_locals
from ftmon.trainer.probe.rank.model import (
    Optimized,
    Trained,
    describe_model,
    dtype_of,
    learning_rate,
    parameters_under,
    steps_done,
)
from ftmon.trainer.probe.values.batch import model_sizes
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD


class Generator(nn.Linear):
    """A model of the script's own."""


class Critic(nn.Linear):
    pass


def added(optimized: Optimized, model: nn.Module) -> dict[str, Any]:
    return optimized.add(SGD(model.parameters(), lr=0.1), sys._getframe(1))


def facts(model: str, parameters: int, trainable: int | None = None) -> dict[str, Any]:
    trainable = parameters if trainable is None else trainable
    return {"model": model, "parameters": parameters, "trainable_parameters": trainable}


def test_a_compiled_a_parallel_and_a_parametrized_model_are_called_what_the_script_calls_them(compiling):
    compiled = torch.compile(torch.nn.DataParallel(model := Generator(4, 4)), backend="eager")
    assert describe_model(compiled) == facts("Generator", 20)
    assert describe_model(parametrizations.weight_norm(Generator(4, 4)))["model"] == "Generator"
    assert added(Optimized(), compiled)["model"] == "Generator"
    model.bias.requires_grad_(False)
    assert describe_model(compiled) == facts("Generator", 20, 16)


class Script:
    """A trainer class, whose methods call their object as they like."""

    def __init__(self) -> None:
        self.model = nn.Sequential(Critic(2, 2), nn.Linear(2, 3))

    def optimizer(this, optimized: Optimized) -> dict[str, Any]:  # noqa: N805
        return optimized.add(SGD([{"params": list(this.model[0].parameters())}], lr=0.1), sys._getframe())


def test_it_is_the_smallest_model_near_the_optimizer_that_holds_all_its_parameters():
    def make() -> dict[str, Any]:
        return Optimized().add(SGD([p for p in generator.parameters() if p.requires_grad], lr=0.1), sys._getframe())

    generator, _both = (made := Generator(2, 2)), nn.ModuleList([made, Critic(2, 2)])
    generator.bias.requires_grad_(False)
    assert make() == facts("Generator", 6, 4)


def test_a_model_in_an_object_is_counted_as_a_whole_and_freed_parameters_or_ones_of_no_model_are_not():
    assert Script().optimizer(Optimized()) == facts("Sequential", 15)
    optimized = Optimized()
    for _ in range(3):
        model = Generator(2, 2)
        assert added(optimized, model) == facts("Generator", 6)
    found = Optimized().add(SGD([torch.zeros(5, requires_grad=True)], lr=0.1), sys._getframe())
    assert found == facts("", 5)


def test_several_optimizers_train_several_models_and_the_same_one_counts_once():
    generator, critic, optimized = Generator(2, 2), Critic(3, 1), Optimized()
    first = SGD(generator.parameters(), lr=0.1)
    optimized.add(first, sys._getframe())
    optimized.add(SGD(first.param_groups, lr=0.1), sys._getframe())
    assert added(optimized, critic) == facts("Generator + Critic", 10)
    optimized.forget()
    assert added(optimized, critic)["parameters"] == 4
    both = SGD([*generator.parameters(), *critic.parameters()], lr=0.1)
    assert Optimized().add(both, sys._getframe()) == facts("Generator + Critic", 10)


def test_lazy_parameters_without_a_size_count_nothing_and_the_learning_rate_is_of_a_group_that_moves():
    lazy = nn.Sequential(Generator(2, 2), nn.LazyLinear(3))
    optimizer = SGD(lazy.parameters(), lr=0.1)
    assert Optimized().add(optimizer, sys._getframe()) == facts("Sequential", 6)
    assert dtype_of(lazy) == "fp32"
    trained = Trained()
    trained.primary = weakref.ref(optimizer)
    assert model_sizes(trained)[:2] == (24, 6)
    tensor = torch.tensor(0.1)
    given = [], [0.1, 0.2], [0.0, 0.2], [0.0, None, tensor], [0.0, 0.0], [tensor, 0.2]
    assert [learning_rate(rates) for rates in given] == [None, 0.1, 0.2, tensor, 0.0, tensor]


def test_the_parameters_under_losses_are_those_that_a_backward_gives_gradients():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[1].requires_grad_(False)
    once, twice = model(torch.ones(1, 2)).sum(), model[2](torch.ones(1, 3, requires_grad=True)).sum()
    found = parameters_under([once, twice, torch.ones(1)])
    (once + twice).backward()
    assert sorted(map(id, found)) == sorted(id(each) for each in model.parameters() if each.grad is not None)
    assert parameters_under([torch.ones(1, requires_grad=True)]) == []


def test_looking_at_a_functions_variables_keeps_nothing_alive():
    batch = torch.zeros(3)
    seen = weakref.ref(batch)
    assert frame_locals(sys._getframe())["batch"] is batch
    del batch
    assert seen() is None


def test_what_a_script_has_from_locals_stays_as_it_is():
    kept, batch = locals(), 3
    assert frame_locals(sys._getframe()).get("batch", batch) == batch
    assert kept == {}


def test_what_a_script_has_made_with_exec_is_there_afterwards():
    exec("made = 3")
    frame_locals(sys._getframe())
    assert sys.version_info >= (3, 13) or eval("made") == 3


def test_the_updates_that_a_loaded_optimizer_has_made_are_counted_where_its_state_is_on_the_host():
    expert, weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    made = torch.optim.AdamW([expert, weight], lr=0.1)
    assert steps_done(made) == 0
    for step in range(3):
        expert.grad = torch.ones(2) if step else None
        weight.grad = torch.ones(2)
        made.step()
    loaded = torch.optim.AdamW([expert, weight], lr=0.1)
    loaded.load_state_dict(made.state_dict())
    assert steps_done(loaded) == 3
    assert steps_done(torch.optim.SGD([weight], lr=0.1)) == steps_done(None) == 0
