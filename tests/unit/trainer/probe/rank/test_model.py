"""Which model a bare optimizer trains, found where the optimizer is made; and that nothing is kept alive by looking."""

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from ftmon.trainer.probe.guard import frame_locals
from ftmon.trainer.probe.rank.model import Optimized, Trained, describe_model, dtype_of
from ftmon.trainer.probe.values.batch import model_sizes
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim import SGD

# The model inside its wrappers.


class Net(torch.nn.Linear):
    """A model of the script's own."""


def test_a_compiled_a_parallel_and_a_parametrized_model_are_called_what_the_script_calls_them(compiling):
    compiled = torch.compile(torch.nn.DataParallel(Net(4, 4)), backend="eager")
    assert describe_model(compiled) == {"model": "Net", "parameters": 20, "trainable_parameters": 20}
    assert describe_model(parametrizations.weight_norm(Net(4, 4)))["model"] == "Net"


def test_frozen_parameters_are_not_trained():
    model = Net(4, 4)
    model.bias.requires_grad_(False)
    assert describe_model(model) == {"model": "Net", "parameters": 20, "trainable_parameters": 16}


class Generator(nn.Linear):
    pass


class Critic(nn.Linear):
    pass


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
    assert make() == {"model": "Generator", "parameters": 6, "trainable_parameters": 4}


def test_a_model_in_an_object_is_found_and_counted_as_a_whole():
    found = Script().optimizer(Optimized())
    assert found == {"model": "Sequential", "parameters": 15, "trainable_parameters": 15}


def test_wrappers_are_looked_through():
    compiled = torch.compile(Generator(2, 2), backend="eager")
    assert Optimized().add(SGD(compiled.parameters(), lr=0.1), sys._getframe())["model"] == "Generator"


def test_several_optimizers_train_several_models_and_the_same_one_counts_once():
    generator, critic, optimized = Generator(2, 2), Critic(3, 1), Optimized()
    first = SGD(generator.parameters(), lr=0.1)
    optimized.add(first, sys._getframe())
    optimized.add(SGD(first.param_groups, lr=0.1), sys._getframe())
    found = optimized.add(SGD(critic.parameters(), lr=0.1), sys._getframe())
    assert found == {"model": "Generator + Critic", "parameters": 10, "trainable_parameters": 10}
    optimized.forget()
    assert optimized.add(SGD(critic.parameters(), lr=0.1), sys._getframe())["parameters"] == 4


def test_lazy_parameters_without_a_size_count_nothing():
    lazy = nn.Sequential(Generator(2, 2), nn.LazyLinear(3))
    optimizer = SGD(lazy.parameters(), lr=0.1)
    found = Optimized().add(optimizer, sys._getframe())
    assert found == {"model": "Sequential", "parameters": 6, "trainable_parameters": 6}
    assert dtype_of(lazy) == "fp32"
    trained = Trained()
    trained.primary = weakref.ref(optimizer)
    assert model_sizes(trained)[:2] == (24, 6)


def test_an_optimizer_of_several_models_names_each_of_them():
    generator, critic = Generator(2, 2), Critic(3, 1)
    layers = list(generator.parameters()), list(critic.parameters())
    found = Optimized().add(SGD([*layers[0], *layers[1]], lr=0.1), sys._getframe())
    assert found == {"model": "Generator + Critic", "parameters": 10, "trainable_parameters": 10}


def test_parameters_that_were_freed_are_not_counted():
    optimized = Optimized()
    for _ in range(3):
        model = Generator(2, 2)
        found = optimized.add(SGD(model.parameters(), lr=0.1), sys._getframe())
    assert found == {"model": "Generator", "parameters": 6, "trainable_parameters": 6}


def test_parameters_of_no_model_are_counted():
    found = Optimized().add(SGD([torch.zeros(5, requires_grad=True)], lr=0.1), sys._getframe())
    assert found == {"model": "", "parameters": 5, "trainable_parameters": 5}


def look(frame: FrameType | None) -> dict[str, Any]:
    assert frame is not None
    return frame_locals(frame)


def test_looking_at_a_functions_variables_keeps_nothing_alive():
    batch = torch.zeros(3)
    seen = weakref.ref(batch)
    assert look(sys._getframe())["batch"] is batch
    del batch
    assert seen() is None


def test_what_a_script_has_from_locals_stays_as_it_is():
    kept, batch = locals(), 3
    assert look(sys._getframe()).get("batch", batch) == batch
    assert kept == {}


def test_what_a_script_has_made_with_exec_is_there_afterwards():
    exec("made = 3")
    look(sys._getframe())
    assert sys.version_info >= (3, 13) or eval("made") == 3
