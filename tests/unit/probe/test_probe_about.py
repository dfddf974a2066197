"""The model inside its wrappers."""

import torch
from ftmon.trainer.probe.rank.model import describe_model
from torch.nn.utils import parametrizations


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
